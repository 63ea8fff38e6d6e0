"""The processes that train one model together, as rank 0 sees them: started, watched, and ended.

Rank 0 is the process of `ludus train`: it plays, samples, writes the run, and names the next step of the
steps (`steps.py`), which all ranks then do, rank 0 among them (`Ranks.perform`). With one process
a step is a plain call.

Who waits for whom. A rank without work waits for the next step at a key-value store, without a deadline:
playing takes as long as it takes. Everything within a step is collective, and every collective has a deadline
(`cluster.timeout`). A rank that fails tells the others at the next collective; one that dies closes its
connections, which ends the collective that the others are in. Either way rank 0 raises a `RankError` that names
the rank and the cause. Ranks that rank 0 has started end with it: they read a pipe that closes when it dies.

Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) nothing is started here. What the other
ranks do is in `steps.py`, how the ranks know each other in `wire.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from ludus.core.failures import ConfigError, LudusError
from ludus.training.config.run import ClusterConfig, launched_rank
from ludus.training.optim.sharding import (
    PeerFailed,
)
from ludus.training.ranks.steps import Ranks, RankSteps, join, leave, spawn_rank
from ludus.training.ranks.wire import (
    ERROR,
    HELLO,
    LOOPBACK,
    READY,
    STEP,
    STOP,
    SignedStore,
    StrangerError,
    chosen_interface,
    join_store,
    open_network_store,
    open_private_store,
    pack_step,
    torchrun_interface,
)

# SIGTERM, SIGHUP and Ctrl-C while rank 0 waits for other ranks. Python runs handlers of signals between
# instructions of the main thread, and a collective is one instruction. So a thread gets the signals as well,
# and passes them on to the event loop. After a signal the ranks have a while for each of their collectives, so
# that an update is saved. One that lasts longer is given up: the other ranks are killed, and where that does
# not help, this one.

_STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_POLL_SECONDS, _GIVE_UP_SECONDS = 0.5, 10.0


class StopWatch:
    """Ends calls that make no progress after a signal to stop."""

    def __init__(self, give_up: Callable[[], None], seconds: float = 30.0) -> None:
        """`give_up` kills the other ranks, after so many seconds without progress."""
        self._give_up, self._seconds = give_up, seconds
        self._closed = threading.Event()
        self.progress: Callable[[], object] = str
        """None while nothing is waited for; else something that changes with each collective."""
        self.told: signal.Signals | None = None
        """The signal, once there was one."""
        self._write = -1
        if threading.current_thread() is not threading.main_thread():
            return  # the main thread is free to handle signals then
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while heard := os.read(self._read, 4096):
            if self._before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._before, heard)
            stops = [number for number in heard if number in _STOPS]
            if stops and self.told is None:
                self.told = signal.Signals(stops[0])
                threading.Thread(target=self._watch, name="stopping", daemon=True).start()
        os.close(self._read)

    def _watch(self) -> None:
        last, since = self.progress(), time.monotonic()
        while last is None or time.monotonic() - since < self._seconds:
            if self._closed.wait(_POLL_SECONDS):
                return
            if (now := self.progress()) != last:
                last, since = now, time.monotonic()
        self._give_up()
        if self._closed.wait(_GIVE_UP_SECONDS) or self.progress() != last:
            return
        assert self.told is not None
        print(
            f"ludus: told to stop ({self.told.name}), and a process connected as another trainer rank "
            "neither answered nor ended: the run ends here, and can go on from its last checkpoint (--resume)",
            file=sys.stderr,
            flush=True,
        )
        os._exit(128 + self.told)

    def close(self) -> None:
        self._closed.set()
        if self._write < 0 or threading.current_thread() is not threading.main_thread():
            return
        current = signal.set_wakeup_fd(self._before)
        if current != self._write:  # another one has been set since
            signal.set_wakeup_fd(current)
        os.close(self._write)
        self._write = -1


_START_SECONDS = 300.0
_END_SECONDS = 20.0


class RankError(LudusError):
    """A trainer rank died, failed or did not answer. The run can go on from its last checkpoint."""


class RankProcess(Protocol):
    """Another rank's process, as its launcher knows it; `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit code (minus the signal that killed it), or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises `subprocess.TimeoutExpired` where that takes longer."""

    def kill(self) -> None: ...


@runtime_checkable
class ToldEnding(Protocol):
    """A rank's process whose launcher knows more of its end than an exit code."""

    @property
    def how(self) -> str:
        """How it was lost; empty where the exit code says it all."""


class RankLauncher(Protocol):
    """Starts ranks on other machines."""

    address: str
    """This rank's address for the others."""
    interface: str | None
    """The network interface by which they reach it; None where gloo has to find out."""

    def launch(self, variables: Mapping[str, str]) -> RankProcess:
        """Start a process that calls `serve_rank` with these environment variables added to its own."""


class LeadingRanks(Ranks):
    """Several processes, of which this one is rank 0."""

    def __init__(
        self,
        store: SignedStore,
        rank0: RankSteps,
        processes: Sequence[RankProcess],
        signals: StopWatch,
    ) -> None:
        """`processes` are ranks 1, 2, ... where this process has started them."""
        super().__init__(rank0)
        group = rank0.group
        self.size = group.size
        self._store, self._group, self._processes = store, group, processes
        self._steps, self._is_busy = 0, False
        self._lock = threading.Lock()
        """One step at a time: engines' canaries are scored in threads."""
        self._signals = signals
        signals.progress = lambda: (self._steps, group.exchanges) if self._is_busy else None
        self._is_broken = self._is_closed = False
        for process in processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def perform(self, step: str, *arguments: Any) -> Any:
        with self._lock:
            if self._is_broken or self._is_closed:
                raise RankError(self._death("the ranks have ended"))
            self._steps += 1
            self._is_busy = True
            try:
                return self._perform(step, arguments)
            finally:
                self._is_busy = False

    def _perform(self, step: str, arguments: tuple[Any, ...]) -> Any:
        name = f"{STEP}/{self._steps}"
        message = self._store.sign(f"{name}/message", pack_step(step, arguments))
        try:
            self._store.set(name, str(len(message)).encode())
            self._store.delete(f"{STEP}/{self._steps - 1}")
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)
        except RuntimeError as error:
            self._is_broken = True
            raise RankError(self._death(str(error))) from error
        try:
            result = self.rank0.perform(step, arguments)
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
        ):  # interrupted in the midst of a step: the others wait for what does not come
            self._is_broken = True
            raise

    def _cause(self) -> str:
        """The error text of the rank that failed."""
        for rank in range(1, self.size):
            key = f"{ERROR}/{self._steps}/{rank}"
            if self._store.check(key):
                try:
                    return f"trainer rank {rank} failed: {self._store.get(key).decode()}"
                except StrangerError as error:
                    return str(error)
        return "a trainer rank failed and did not say why"

    def _death(self, told: str) -> str:
        """Which rank is gone, and how it ended."""
        if self._signals.told is not None:
            return (
                f"told to stop ({self._signals.told.name}), and another trainer rank did not come to the end "
                "of what it was doing: the update in progress is lost"
            )
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
            self._store.set(f"{STEP}/{self._steps + 1}", STOP)
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
        self._signals.close()
        self._store.close()
        leave()


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _how(process: RankProcess, code: int) -> str:
    """How a rank ended; its launcher may know more than a code."""
    return process.how if isinstance(process, ToldEnding) and process.how else ending(code)


def start_ranks(
    cluster: ClusterConfig,
    device: torch.device,
    threads: int | None,
    *,
    launcher: RankLauncher | None = None,
    steps: type[RankSteps] = RankSteps,
) -> Ranks:
    """The ranks of a recipe: started here, or those that the environment tells of.

    Args:
        cluster: How many, and how the model lies on them.
        device: Where rank 0 trains; the others on devices of the same kind.
        threads: Of each process on the host; one on a CPU when left out.
        launcher: Starts the other ranks; on this machine when left out.
        steps: What all ranks do; the other ranks must have been started with the same.
    """
    given, size = launched_rank()[1], _size_of(cluster, device, launcher)
    if size == 1:
        return Ranks(steps())
    if threads is None and device.type == "cpu":
        threads = 1  # processes that share the cores wait for each other's threads otherwise
    hello = {
        "backend": _backend(cluster, device),
        "timeout": cluster.timeout,
        "replicas": cluster.dp_replicate,
        "device": device.type,
        "threads": threads,
    }
    processes: list[RankProcess] = []
    signals = StopWatch(lambda: _kill(processes))
    store: SignedStore | None = None
    try:
        if given > 1:
            store, _, _ = join_store()
        elif launcher is None:
            store, found = open_private_store()
        else:
            store, found = open_network_store(launcher.address)
        store.set(HELLO, json.dumps(hello).encode())
        if given == 1:
            found |= {"WORLD_SIZE": str(size)}
            found |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
            start = partial(spawn_rank, steps=steps) if launcher is None else launcher.launch
            for rank in map(str, range(1, size)):
                processes.append(start({**found, "RANK": rank, "LOCAL_RANK": rank}))
            _wait_until_ready(store, processes)
        if given > 1:
            interface = torchrun_interface()
        else:
            interface = LOOPBACK if launcher is None else chosen_interface(launcher.interface)
        group = join(store, 0, size, hello, interface)
        return LeadingRanks(store, steps(group), processes, signals)
    except BaseException as error:
        _kill(processes)
        for process in processes:
            process.wait()
        signals.close()
        if store is not None:
            store.close()
        leave()
        if isinstance(error, RuntimeError) and not isinstance(error, LudusError):  # gloo's
            raise RankError(f"the trainer ranks could not connect to each other: {error}") from error
        raise


def _size_of(cluster: ClusterConfig, device: torch.device, launcher: RankLauncher | None) -> int:
    """How many ranks there will be; refuses what cannot be started."""
    given = launched_rank()[1]
    size = given if given > 1 else cluster.trainer_ranks or 1
    if given > 1 and cluster.trainer_ranks not in (None, given):
        raise ConfigError(
            f"cluster.trainer_ranks = {cluster.trainer_ranks}, and the environment (WORLD_SIZE) has {given} "
            "ranks: leave cluster.trainer_ranks out under torchrun"
        )
    if size == 1:
        return 1
    if size % cluster.dp_replicate:
        raise ConfigError(
            f"cluster.dp_replicate = {cluster.dp_replicate} does not divide the {size} trainer ranks"
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
    return size


def _kill(processes: Sequence[RankProcess]) -> None:
    for process in processes:
        process.kill()


def _backend(cluster: ClusterConfig, device: torch.device) -> str:
    """For tensors on the host it is always gloo, which carries steps, agreements and metrics."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{'nccl' if cluster.backend == 'auto' else cluster.backend}"


def _wait_until_ready(store: SignedStore, processes: Sequence[RankProcess]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    for rank, process in enumerate(processes, start=1):
        while not store.check(f"{READY}/{rank}"):
            if (code := process.poll()) is not None:
                raise RankError(f"trainer rank {rank} {_how(process, code)} while it was started")
            if time.monotonic() > deadline:
                raise RankError(f"trainer rank {rank} did not start within {_START_SECONDS:g} seconds")
            time.sleep(0.02)
        store.get(f"{READY}/{rank}")  # which is signed
