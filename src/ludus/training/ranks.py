"""The processes that train one model together: started, told what to do, watched, and ended.

Rank 0 is the process of `ludus train`: it plays, samples, writes the run, and decides what happens next. The
others do nothing but train. Rank 0 calls a function on all ranks at once (`Ranks.run`), with the same
arguments everywhere; objects that were made so (`Ranks.make`: models, learners, critics) are named by number in
later calls, so each rank uses its own. Inside a call all ranks compute the same things, except that each has
its share of the micro-batches (`optim/sharding.py`). With one process, `run` and `make` are plain calls.

Who waits for whom. A rank without work waits for the next call at a key-value store, without a deadline:
playing takes as long as it takes. Everything within a call is collective, and every collective has a deadline
(`cluster.timeout`). A rank that fails tells the others at the next collective; one that dies closes its
connections, which ends the collective that the others are in. Either way rank 0 raises a `RankError` that names
the rank and the cause. Ranks that rank 0 has started end with it: they read a pipe that closes when it dies.

Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) nothing is started here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from ludus.core.failures import ConfigError, LudusError
from ludus.training.config.cluster import ClusterConfig, launched_rank
from ludus.training.optim.sharding import (
    PeerFailed,
    RankGroup,
    ShardedModel,
    join_group,
    leave_group,
)
from ludus.training.rank_calls import OnLeader, pack_call, unpack_call
from ludus.training.sharded_models import build_sharded, publish_weights, receive_weights, skeleton_of

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_START_SECONDS = 300.0
_END_SECONDS = 20.0
_HELLO, _READY, _CALL, _ERROR = "ludus/hello", "ludus/ready", "ludus/call", "ludus/error"
_STOP = b"stop"
_WATCHED = "LUDUS_RANK_WATCHES_STDIN"


class RankError(LudusError):
    """A trainer rank died, failed or did not answer. The run can go on from its last checkpoint."""


class Ranks:
    """The ranks as rank 0 sees them. This class is one process alone."""

    size = 1

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function on all ranks at once, and give rank 0's result back."""
        return function(*args, **kwargs)

    def make(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for something that each rank keeps: it can be an argument of later calls."""
        return function(*args, **kwargs)

    def shard(self, model: nn.Module) -> nn.Module:
        """The model, sharded over all ranks. Rank 0 keeps the one that it has."""
        return model

    def publish(self, policy: nn.Module, model: nn.Module) -> None:
        """Copy the trained weights into rank 0's own model, which its engine samples."""

    def receive(self, policy: nn.Module, model: nn.Module) -> None:
        """Copy the weights of rank 0's own model into the sharded one."""

    def close(self) -> None:
        """End the other ranks."""


class RankProcess(Protocol):
    """Another rank's process, as whoever started it knows it; `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit code (minus the signal that killed it), or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises `subprocess.TimeoutExpired` where that takes longer."""

    def kill(self) -> None: ...


class RankLauncher(Protocol):
    """Starts ranks on other machines."""

    address: str
    """What they call this one."""
    interface: str | None
    """The network interface by which they reach it; None where gloo has to find out."""

    def launch(self, variables: Mapping[str, str]) -> RankProcess:
        """Start a process that calls `serve_rank` with these environment variables added to its own."""


class LeadingRanks(Ranks):
    """Several processes, of which this one is rank 0."""

    def __init__(self, store: Store, group: RankGroup, processes: Sequence[RankProcess]) -> None:
        """`processes` are ranks 1, 2, ... where this process has started them."""
        self.size = group.size
        self._store, self._group, self._processes = store, group, processes
        self._calls = 0
        self._numbers: dict[int, int] = {}
        """The numbers of objects that all ranks have, by their identity here."""
        self._next_number = 0
        self._dropped: list[int] = []
        self._is_broken = self._is_closed = False
        for process in processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(None, function, args, kwargs)

    def make(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        number, self._next_number = self._next_number, self._next_number + 1
        made = self._call(number, function, args, kwargs)
        self._numbers[id(made)] = number
        weakref.finalize(made, self._drop, id(made), number)
        return made

    def shard(self, model: nn.Module) -> nn.Module:
        return self.make(build_sharded, skeleton_of(model), OnLeader(model))

    def publish(self, policy: nn.Module, model: nn.Module) -> None:
        assert isinstance(policy, ShardedModel)
        self.run(publish_weights, policy, OnLeader(model))

    def receive(self, policy: nn.Module, model: nn.Module) -> None:
        assert isinstance(policy, ShardedModel)
        self.run(receive_weights, policy, OnLeader(model))

    def _drop(self, identity: int, number: int) -> None:
        if self._numbers.get(identity) == number:
            del self._numbers[identity]
        self._dropped.append(number)

    def _call(self, number: int | None, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        if self._is_broken or self._is_closed:
            raise RankError(self._death("the ranks have ended"))
        dropped, self._dropped = self._dropped, []
        message = pack_call((number, dropped, function, args, kwargs), self._numbers)
        self._calls += 1
        try:
            self._store.set(f"{_CALL}/{self._calls}", str(len(message)))
            self._store.delete_key(f"{_CALL}/{self._calls - 1}")
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)
        except RuntimeError as error:
            self._is_broken = True
            raise RankError(self._death(str(error))) from error
        try:
            result = function(*args, **kwargs)
            self._group.agree()
            return result
        except PeerFailed as error:
            self._group.reset()
            raise RankError(self._cause()) from error
        except Exception as error:
            try:
                self._group.tell(error)
            except PeerFailed:
                self._group.reset()
                raise RankError(self._cause()) from error
            except RuntimeError as lost:  # so the first error was a lost connection
                self._is_broken = True
                raise RankError(self._death(str(lost))) from error
            raise
        except (
            BaseException
        ):  # interrupted in the midst of a call: the others wait for what does not come
            self._is_broken = True
            raise

    def _cause(self) -> str:
        """What the rank that failed said of it."""
        for rank in range(1, self.size):
            key = f"{_ERROR}/{self._calls}/{rank}"
            if self._store.check([key]):
                return f"trainer rank {rank} failed: {self._store.get(key).decode()}"
        return "a trainer rank failed and did not say why"

    def _death(self, told: str) -> str:
        """Which rank is gone, and how it ended."""
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:  # a process that is dying may not have ended yet
            for rank, process in enumerate(self._processes, start=1):
                code = process.poll()
                if code is not None:
                    return f"trainer rank {rank} {_how(process, code)}"
            time.sleep(0.02)
        return f"a trainer rank was lost, or did not answer within cluster.timeout: {told}"

    def _watch(self, process: RankProcess) -> None:
        """Where one has ended, end the others: what is left of a collective would wait for it."""
        process.wait()
        if not self._is_closed:
            for other in self._processes:
                if other is not process and other.poll() is None:
                    time.sleep(0.5)  # so that the first one to end is found first
                    other.kill()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._store.set(f"{_CALL}/{self._calls + 1}", _STOP.decode())
        except RuntimeError:
            self._is_broken = True
        for process in self._processes:
            try:
                process.wait(0 if self._is_broken else _END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if isinstance(process, subprocess.Popen) and process.stdin is not None:
                process.stdin.close()
        _leave()


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _how(process: RankProcess, code: int) -> str:
    """The same of a rank, by whoever started it where that is more than a code."""
    return getattr(process, "how", "") or ending(code)


def start_ranks(
    cluster: ClusterConfig,
    device: torch.device,
    threads: int | None,
    *,
    launcher: RankLauncher | None = None,
) -> Ranks:
    """The ranks of a recipe: started here, or those that the environment tells of.

    Args:
        cluster: How many, and how the model lies on them.
        device: Where rank 0 trains; the others on devices of the same kind.
        threads: Of each process on the host; one on a CPU when left out.
        launcher: Starts the other ranks; on this machine when left out.
    """
    given = launched_rank()[1]
    size = given if given > 1 else cluster.trainer_ranks or 1
    if given > 1 and cluster.trainer_ranks not in (None, given):
        raise ConfigError(
            f"cluster.trainer_ranks = {cluster.trainer_ranks}, and the environment (WORLD_SIZE) has {given} "
            "ranks: leave cluster.trainer_ranks out under torchrun"
        )
    if size == 1:
        return Ranks()
    if size % cluster.replicas:
        raise ConfigError(
            f"cluster.replicas = {cluster.replicas} does not divide the {size} trainer ranks"
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if launcher is None else 1
    if device.type == "cuda" and torch.cuda.device_count() < here:
        raise ConfigError(
            f"cluster.trainer_ranks = {size} needs a GPU each, and this machine has "
            f"{torch.cuda.device_count()}"
        )
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is in use in this process already: train from a process of its own, or "
            "destroy its process group first"
        )
    if threads is None and device.type == "cpu":
        threads = 1  # processes that share the cores wait for each other's threads otherwise
    hello = {
        "backend": _backend(cluster, device),
        "timeout": cluster.timeout,
        "replicas": cluster.replicas,
        "device": device.type,
        "threads": threads,
    }
    if given > 1:
        store, _, _ = next(iter(rendezvous("env://")))
        store.set(_HELLO, json.dumps(hello))
        return LeadingRanks(store, _join(store, 0, size, hello), [])
    address = "127.0.0.1" if launcher is None else launcher.address
    start = spawn_rank if launcher is None else launcher.launch
    with _gloo_through("lo" if launcher is None else launcher.interface):
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        store.set(_HELLO, json.dumps(hello))
        variables = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(store.port)}
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        processes: list[RankProcess] = []
        try:
            for rank in map(str, range(1, size)):
                processes.append(start({**variables, "RANK": rank, "LOCAL_RANK": rank}))
            _wait_until_ready(store, processes)
            return LeadingRanks(store, _join(store, 0, size, hello), processes)
        except BaseException:
            for process in processes:
                process.kill()
                process.wait()
            _leave()
            raise


def _backend(cluster: ClusterConfig, device: torch.device) -> str:
    """For tensors on the host it is always gloo, which carries calls, agreements and metrics."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{'nccl' if cluster.backend == 'auto' else cluster.backend}"


@contextmanager
def _gloo_through(interface: str | None) -> Iterator[None]:
    """gloo looks up the host's name to find its own address, which fails on many machines; not so here."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or interface is None or sys.platform != "linux":
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        del os.environ[name]


def spawn_rank(variables: Mapping[str, str]) -> RankProcess:
    """Start a rank on this machine. It ends when this process does."""
    paths = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    environment = {**os.environ, **variables, "PYTHONPATH": paths, _WATCHED: "1"}
    code = "from ludus.training.ranks import serve_rank; serve_rank()"
    # in a session of its own: Ctrl-C in a terminal is for rank 0 alone, also while this one still imports
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, start_new_session=True
    )


def _wait_until_ready(store: Store, processes: Sequence[RankProcess]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    for rank, process in enumerate(processes, start=1):
        while not store.check([f"{_READY}/{rank}"]):
            if (code := process.poll()) is not None:
                raise RankError(f"trainer rank {rank} {_how(process, code)} while it was started")
            if time.monotonic() > deadline:
                raise RankError(f"trainer rank {rank} did not start within {_START_SECONDS:g} seconds")
            time.sleep(0.02)


def _join(store: Store, rank: int, size: int, hello: dict[str, Any]) -> RankGroup:
    device = torch.device(hello["device"])
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    if hello["threads"] is not None:
        torch.set_num_threads(hello["threads"])
    hook = sys.excepthook
    dist.init_process_group(
        hello["backend"],
        store=PrefixStore("ludus", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=hello["timeout"]),
    )
    sys.excepthook = hook  # torch's puts "[rank0]:" before every line of a traceback, and stays
    return join_group(device, hello["replicas"])


def _leave() -> None:
    leave_group()
    if dist.is_initialized():
        dist.destroy_process_group()


# A rank that is not 0.


def serve_rank() -> None:
    """Do what rank 0 says until it says to stop; the process then ends. The environment tells the rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's to hear, which saves first
    if os.environ.get(_WATCHED):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as torchrun sends it to all: likewise
    logging.getLogger("ludus").setLevel(logging.ERROR)  # rank 0 says it all
    warnings.simplefilter("ignore")
    store, rank, size = next(iter(rendezvous("env://")))
    store.set(f"{_READY}/{rank}", "1")
    hello = json.loads(_waited_for(store, _HELLO))
    group = _join(store, rank, size, hello)
    objects: dict[int, Any] = {}
    call = 0
    while (told := _waited_for(store, f"{_CALL}/{(call := call + 1)}")) != _STOP:
        message = torch.empty(int(told), dtype=torch.uint8)
        try:
            dist.broadcast(message, 0)
        except RuntimeError:  # rank 0 is gone
            os._exit(1)
        _perform(message.numpy().tobytes(), objects, group, store, f"{_ERROR}/{call}/{rank}")
    objects.clear()
    _leave()


def _perform(message: bytes, objects: dict[int, Any], group: RankGroup, store: Store, key: str) -> None:
    try:
        number, dropped, function, args, kwargs = unpack_call(message, objects)
        for gone in dropped:
            objects.pop(gone, None)
        result = function(*args, **kwargs)
        group.agree()
        if number is not None:
            objects[number] = result
    except PeerFailed:
        group.reset()  # rank 0 knows, and decides
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 has to hear of it
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        store.set(key, text)
        try:
            group.tell(error)
        except PeerFailed:
            group.reset()
        except RuntimeError:  # a lost connection: nobody is left to work with
            print(f"a trainer rank ended: {text}", file=sys.stderr)
            os._exit(1)


def _waited_for(store: Store, key: str) -> bytes:
    """A value of the store, however long it takes; ends the process where the store is gone."""
    while True:
        try:
            store.wait([key], timedelta(days=1))  # a store that is gone closes its connection at once
            return bytes(store.get(key))
        except dist.DistStoreError as error:
            if "timeout" not in str(error).lower():
                os._exit(1)
        except RuntimeError:
            os._exit(1)


def _end_with_parent() -> None:
    """Rank 0 holds the other end of this pipe."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)
