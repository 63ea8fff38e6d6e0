"""A trainer rank that is not 0: it connects, and does the steps of the program that rank 0 names."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from ludus.core.failures import LudusError
from ludus.training.optim.sharding import PeerFailed
from ludus.training.ranks.processes import ERROR, HELLO, READY, STEP, STOP, WATCHED, join, leave
from ludus.training.ranks.program import Program
from ludus.training.ranks.store import SignedStore, chosen_interface, join_store, torchrun_interface
from ludus.training.ranks.wire import unpack_step

_PATIENCE = timedelta(days=1)


def serve_rank(program: type[Program] = Program) -> None:
    """Do the program's steps until rank 0 says to stop, and end. The environment tells the rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to hear, which saves first
    is_watched = bool(os.environ.get(WATCHED))
    if not is_watched:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun also sends it to all
    logging.getLogger("ludus").setLevel(logging.ERROR)  # rank 0 says it all
    warnings.simplefilter("ignore")
    store, rank, size = join_store()
    if is_watched:
        threading.Thread(target=_end_with_parent, args=(store,), daemon=True).start()
    interface = chosen_interface(None) if is_watched else torchrun_interface()
    try:
        store.set(f"{READY}/{rank}", b"1")
        hello = json.loads(_waited_for(store, HELLO))
        group = join(store, rank, size, hello, interface)
        _serve(store, rank, program(group))
    except LudusError as error:
        _end(f"trainer rank {rank} ended: {error}")
    leave()


def _serve(store: SignedStore, rank: int, program: Program) -> None:
    number = 0
    while (told := _waited_for(store, f"{STEP}/{(number := number + 1)}")) != STOP:
        message = torch.empty(int(told), dtype=torch.uint8)
        try:
            dist.broadcast(message, 0)
        except RuntimeError:  # rank 0 is gone
            os._exit(1)
        packed = store.read(f"{STEP}/{number}/message", message.numpy().tobytes())
        _perform(packed, program, store, f"{ERROR}/{number}/{rank}")


def _perform(message: bytes, program: Program, store: SignedStore, key: str) -> None:
    group = program.group
    try:
        step, arguments = unpack_step(message)
        program.perform(step, arguments)
        group.agree()
    except PeerFailed:
        group.reset()  # rank 0 knows, and decides
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 has to hear of it
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        store.set(key, text.encode())
        try:
            group.tell(error)
        except PeerFailed:
            group.reset()
        except RuntimeError:  # a lost connection: rank 0 is gone
            _end(f"a trainer rank ended: {text}")


def _waited_for(store: SignedStore, name: str) -> bytes:
    """A value of the store, however long it takes; ends the process where the store is gone."""
    while True:
        try:
            store.inner.wait([name], _PATIENCE)  # a store that is gone closes its connection
            return store.get(name)
        except RuntimeError as error:
            is_store = isinstance(error, dist.DistStoreError) or str(error) == "Wait timeout"  # a file's
            if not (is_store and "timeout" in str(error).lower()):
                os._exit(1)


def _end(text: str) -> None:
    """End at once: what is left of a collective would wait for the others."""
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _end_with_parent(store: SignedStore) -> None:
    """Rank 0, or the actor that has started this process, holds the other end of this pipe."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    store.close()
    os._exit(1)
