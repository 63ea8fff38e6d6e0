"""Trainer ranks and processes that are none: a stranger runs no code as the trainer, and is named."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from stranger import HELLO, Payload
from test_ranks import pids
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from called_ranks import CalledRanks, CallSteps, called_ranks
from ludus.core import ConfigError, LudusError
from ludus.training.config.run import ClusterConfig
from ludus.training.ranks import steps as served_rank
from ludus.training.ranks import wire as rank_store
from ludus.training.ranks.processes import RankError, RankProcess, start_ranks
from ludus.training.ranks.steps import spawn_rank
from ludus.training.ranks.wire import KEY, STORE, SignedStore, StrangerError, join_store
from warm_python import WarmProcess, warm

pytestmark = pytest.mark.timeout(200)
HERE = Path(__file__).parent
SERVE = "from ludus.training.ranks.steps import serve_rank; serve_rank()"
WARM = ("ludus.cli.options", "ludus.training.ranks.steps", "ludus.training.ranks.processes")


class Program(WarmProcess):
    """A program whose standard error is read."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        read, write = os.pipe()
        self.stderr = open(read)  # noqa: PTH123, SIM115 - a pipe
        try:
            super().__init__(command, {**os.environ, **variables}, stderr=write)
        finally:
            os.close(write)

    def ended(self, timeout: float) -> str:
        """What it said, once it has ended."""
        self.wait(timeout)
        return self.stderr.read()


Started = Callable[..., Program]


@pytest.fixture(scope="module")
def _warm() -> Iterator[None]:
    with warm(*WARM):
        yield


@pytest.fixture
def started(_warm: None) -> Iterator[Started]:
    made: list[Program] = []

    def start(*command: str, **variables: str) -> Program:
        made.append(Program(command, variables))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        process.stderr.close()


def stranger(started: Started, port: int, rank: int, way: str, mark: Path) -> Program:
    return started(str(HERE / "stranger.py"), str(port), str(rank), way, str(mark))


# A stranger in the place of rank 0, as the other ranks see it.


@pytest.mark.parametrize(("is_greeted", "way"), [(False, "random"), (True, "random"), (True, "echo")])
def test_a_rank_does_nothing_that_a_stranger_says(
    started: Started, tmp_path: Path, is_greeted: bool, way: str
) -> None:
    """The store has no password, as torchrun's: anybody can write to it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    key, mark = secrets.token_bytes(32), tmp_path / "mark"
    if is_greeted:  # by the real rank 0, whose place in gloo is taken afterwards
        SignedStore(store, key).set("ludus/hello", json.dumps(HELLO).encode())
    stranger(started, store.port, 0, way, mark)
    rank = started(
        "-c", SERVE, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), **{KEY: key.hex()},
    )  # fmt: skip
    told = rank.ended(120)
    assert rank.returncode == 1
    assert "trainer rank 1 ended" in told and "this run's key" in told, told
    assert not mark.exists()


def test_what_was_not_signed_under_its_name_is_not_read(tmp_path: Path) -> None:
    inner = FileStore(str(tmp_path / "store"), -1)
    store = SignedStore(inner, b"k" * 32)
    store.set("a", b"\x00 value")
    assert store.get("a") == b"\x00 value" == SignedStore(inner, b"k" * 32).get("a")
    inner.set("b", bytes(inner.get("a")))  # type: ignore[arg-type]
    inner.set("c", "value")
    inner.set("d", "")
    forged = bytearray(store.sign("call", pickle.dumps(Payload(str(tmp_path / "mark")))))
    forged[-1] ^= 1
    inner.set("call", bytes(forged))  # type: ignore[arg-type]
    for name in ("b", "c", "d", "call"):
        with pytest.raises(StrangerError, match="signature"):
            store.get(name)
    with pytest.raises(StrangerError, match="signature"):
        SignedStore(inner, b"x" * 32).get("a")


@pytest.mark.parametrize("kind", ["file", "network"])
def test_a_rank_waits_for_its_next_call_however_long(
    tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    monkeypatch.setattr(served_rank, "_PATIENCE", timedelta(seconds=0.05))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it gave up"))
    path = str(tmp_path / "store")
    if kind == "file":
        writer, reader = FileStore(path, -1), FileStore(path, -1)
    else:
        writer = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        reader = TCPStore("127.0.0.1", writer.port, is_master=False)
    later = threading.Timer(0.4, SignedStore(writer, b"k" * 32).set, ("a", b"1"))
    later.start()
    assert served_rank._waited_for(SignedStore(reader, b"k" * 32), "a") == b"1"
    later.join()


# A stranger in the place of another rank, as rank 0 sees it.


class Launcher:
    """Starts strangers instead of ranks, and tells them no key; a real rank may have said that it is ready."""

    address = "127.0.0.1"
    interface = "lo"

    def __init__(self, started: Started, way: str, mark: Path, is_ready: bool) -> None:
        self._started, self._way, self._mark, self._is_ready = started, way, mark, is_ready

    def launch(self, variables: Mapping[str, str]) -> RankProcess:
        port = int(variables["MASTER_PORT"])
        if self._is_ready:
            client = TCPStore("127.0.0.1", port, is_master=False)
            SignedStore(client, bytes.fromhex(variables[KEY])).set("ludus/ready/1", b"1")
        return stranger(self._started, port, 1, self._way, self._mark)


@pytest.mark.parametrize(
    ("is_ready", "way", "told"),
    [
        (False, "random", "ludus/ready/1, .* does not have the signature of this run's key"),
        (True, "random", "connected as trainer rank 1 does not have this run's key"),
        (True, "echo", "connected as trainer rank 1 does not have this run's key"),
        (True, "silent", "the trainer ranks could not connect to each other"),
    ],
)
def test_a_stranger_is_no_rank(
    started: Started, tmp_path: Path, monkeypatch: Any, is_ready: bool, way: str, told: str
) -> None:
    monkeypatch.setattr(rank_store, "_PROOF_SECONDS", 2.0)
    cluster = ClusterConfig.parse({"trainer_ranks": 2, "timeout": 600})
    launcher = Launcher(started, way, tmp_path / "mark", is_ready)
    with pytest.raises(LudusError, match=told) as error:
        start_ranks(cluster, torch.device("cpu"), threads=1, launcher=launcher)
    assert isinstance(error.value, StrangerError | RankError)
    assert not torch.distributed.is_initialized()


class RealLauncher:
    """Ranks that could be on other machines."""

    address = "127.0.0.1"
    interface = "lo"

    def launch(self, variables: Mapping[str, str]) -> RankProcess:
        return spawn_rank(variables, CallSteps)


def test_ranks_that_a_launcher_starts_meet_at_its_address_alone() -> None:
    before = set(listening(os.getpid()))
    cluster = ClusterConfig.parse({"trainer_ranks": 2, "timeout": 60})
    ranks = CalledRanks(
        start_ranks(cluster, torch.device("cpu"), threads=1, launcher=RealLauncher(), steps=CallSteps)
    )
    try:
        found = {address for address, _ in set(listening(os.getpid())) - before}
        assert found == {"0100007F"}  # 127.0.0.1
        assert ranks.run(pids) == os.getpid()
    finally:
        ranks.close()


# Ranks on one machine.


def listening(*pids: int) -> list[tuple[str, int]]:
    """The addresses at which these processes listen."""
    inodes = set()
    for pid in pids:
        for one in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(one.readlink()))
            except OSError:
                continue  # closed since
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in inodes:
                address, port = parts[1].split(":")
                found.append((address, int(port, 16)))
    return found


INTRUDE = """
import signal, socket, sys
from contextlib import suppress
from datetime import timedelta
from stranger import Payload
from torch._C._distributed_c10d import TCPStore
import pickle
port, mark = int(sys.argv[1]), sys.argv[2]
data = pickle.dumps(Payload(mark))
for sent in (b"", data, bytes(64) + data, b"\\xff" * 4096):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as link:
        link.sendall(sent)
        link.settimeout(0.5)
        link.recv(64)
print("tries", file=sys.stderr, flush=True)
signal.alarm(5)  # what is no store does not answer
with suppress(RuntimeError):
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=3))
    for call in range(1, 50):
        store.set(f"ludus/call/{call}", str(len(data)))
    print("there is a store that anybody can write to", file=sys.stderr, flush=True)
"""


def children_of(pid: int) -> list[int]:
    return [
        int(one) for p in Path(f"/proc/{pid}/task").glob("*/children") for one in p.read_text().split()
    ]


def test_ranks_of_one_machine_listen_on_loopback_and_their_store_is_private(
    started: Started, tmp_path: Path, monkeypatch: Any
) -> None:
    """Another process connects to all that listens; the run does not mind, and goes on."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")  # of a cluster that this run has no use for
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    mark = tmp_path / "mark"
    before = set(listening(os.getpid()))
    ranks = called_ranks()
    try:
        assert os.environ["GLOO_SOCKET_IFNAME"] == "nowhere0"
        (rank,) = [
            one
            for one in children_of(os.getpid())
            if b"serve_rank" in Path(f"/proc/{one}/cmdline").read_bytes()
        ]
        open_ones = [one for one in listening(os.getpid(), rank) if one not in before]
        assert open_ones and {address for address, _ in open_ones} == {"0100007F"}  # 127.0.0.1
        (folder,) = tmp_path.glob("ludus-ranks-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        variables = dict(
            one.split(b"=", 1) for one in Path(f"/proc/{rank}/environ").read_bytes().split(b"\0") if one
        )
        key = variables[KEY.encode()]
        assert len(bytes.fromhex(key.decode())) == 32
        assert key not in Path(f"/proc/{rank}/cmdline").read_bytes()
        intruders = [started("-c", INTRUDE, str(port), str(mark)) for _, port in open_ones]
        for intruder in intruders:
            said = intruder.ended(60)
            assert said == "tries\n", said
            assert ranks.run(pids) == os.getpid()
        assert not mark.exists()
    finally:
        ranks.close()
    assert not folder.exists()


# Under torchrun, whose store anybody can write to.


def joined(store: Store, rank: int, monkeypatch: Any) -> SignedStore:
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_store, "rendezvous", lambda address: iter([(store, rank, 2)]))
    return join_store()[0]


def test_ranks_of_torchrun_share_a_key_that_only_their_user_reads(
    tmp_path: Path, monkeypatch: Any
) -> None:
    inner = FileStore(str(tmp_path / "store"), -1)
    leader = joined(inner, 0, monkeypatch)
    path = Path(inner.get("ludus/key_file").decode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    leader.set("a", b"1")
    assert joined(inner, 1, monkeypatch).get("a") == b"1"
    known = tmp_path / "ludus-ranks-open" / "key"  # what a stranger could have the rank believe
    known.parent.mkdir(mode=0o755)
    known.write_bytes(b"k" * 32)
    for wrong in (str(known), str(tmp_path / "none"), "/dev/zero", "/etc/hostname"):
        inner.set("ludus/key_file", wrong)
        with pytest.raises(ConfigError, match=f"set {KEY} to the same 64 hexadecimal digits"):
            joined(inner, 1, monkeypatch)
    leader.close()
    assert not path.parent.exists()
    monkeypatch.setenv(KEY, "ab" * 32)
    assert joined(inner, 1, monkeypatch).sign("a", b"") == SignedStore(inner, b"\xab" * 32).sign(
        "a", b""
    )
    assert KEY not in os.environ and STORE not in os.environ
    monkeypatch.setenv(KEY, "secret")
    with pytest.raises(ConfigError, match="openssl rand"):
        joined(inner, 1, monkeypatch)


# A stranger that holds the connection and says nothing: rank 0 obeys signals nevertheless.

STUCK = """
import asyncio, os, sys, torch, torch.distributed as dist
from datetime import timedelta
from torch._C._distributed_c10d import FileStore
from ludus.cli.options import until_told
from ludus.training.ranks import processes
from ludus.training.ranks.processes import StopWatch
processes._GIVE_UP_SECONDS = 0.5
rank = int(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = FileStore(sys.argv[2], -1)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
if rank == 0:
    async def main():
        watch = StopWatch(lambda: print("gives up", file=sys.stderr, flush=True), seconds=1.0)
        print("waits", file=sys.stderr, flush=True)
        dist.recv(torch.zeros(1), 1)
    asyncio.run(until_told(main()))
else:
    import time
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_waits_for_a_stranger_obeys_signals(
    started: Started, tmp_path: Path, number: signal.Signals
) -> None:
    started("-c", STUCK, "1", str(tmp_path / "store"))
    leader = started("-c", STUCK, "0", str(tmp_path / "store"))
    assert leader.stderr.readline() == "waits\n"
    time.sleep(0.5)
    leader.send_signal(number)
    told = leader.ended(60)
    assert leader.returncode == 128 + number
    assert "gives up" in told and f"told to stop ({number.name})" in told and "--resume" in told


TOLD = """
import asyncio, sys
from ludus.cli.options import until_told
from ludus.training.ranks.processes import StopWatch
async def main():
    watch = StopWatch(lambda: None, seconds=1.0)
    watch.progress = lambda: None
    print("waits", file=sys.stderr, flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        watch.close()
        print("cancelled", file=sys.stderr, flush=True)
asyncio.run(until_told(main()))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_event_loop_hears_of_signals_as_ever(started: Started, number: signal.Signals) -> None:
    process = started("-c", TOLD)
    assert process.stderr.readline() == "waits\n"
    process.send_signal(number)
    told = process.ended(60)
    assert told.startswith("cancelled")
