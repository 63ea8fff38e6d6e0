"""A trainer rank: it is started, connects, and, where it is not 0, does the steps that rank 0 names."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ludus.core.failures import LudusError
from ludus.training.optim.sharding import PeerFailed, RankGroup, join_group, leave_group
from ludus.training.ranks.program import Program
from ludus.training.ranks.wire import (
    ERROR,
    HELLO,
    READY,
    STEP,
    STOP,
    WATCHED,
    SignedStore,
    chosen_interface,
    gloo_through,
    join_store,
    torchrun_interface,
    unpack_step,
)

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


# Starting a rank on this machine, and connecting to the others, which rank 0 does in the same way.


def spawn_rank(
    variables: Mapping[str, str], program: type[Program] = Program
) -> subprocess.Popen[bytes]:
    """Start a rank on this machine. It ends when this process does."""
    paths = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {**os.environ, **variables, "PYTHONPATH": paths, WATCHED: "1"}
    own = f"from {program.__module__} import {program.__name__}"
    code = f"from ludus.training.ranks.worker import serve_rank; {own}; serve_rank({program.__name__})"
    # in a session of its own: Ctrl-C in a terminal is for rank 0 alone, also while this one still imports
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, start_new_session=True
    )


def join(
    store: SignedStore, rank: int, size: int, hello: dict[str, Any], interface: str | None
) -> RankGroup:
    """Connect this process to all others, as rank 0 has said, and ask them for the key."""
    device = torch.device(hello["device"])
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    if hello["threads"] is not None:
        torch.set_num_threads(hello["threads"])
    hook = sys.excepthook
    with gloo_through(interface):
        dist.init_process_group(
            hello["backend"],
            store=PrefixStore("ludus", store.inner),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=hello["timeout"]),
        )
        sys.excepthook = hook  # torch's puts "[rank0]:" before every line of a traceback, and stays
        store.prove_membership(rank, [dist.group.WORLD])
        group = join_group(device, hello["replicas"])
    assert group.mesh is not None
    store.prove_membership(
        rank, [one for one in group.mesh.get_all_groups() if one is not dist.group.WORLD]
    )
    return group


def leave() -> None:
    """This process trains alone again."""
    leave_group()
    if dist.is_initialized():
        dist.destroy_process_group()
