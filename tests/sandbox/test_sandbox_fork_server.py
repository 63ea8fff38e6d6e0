"""Orders are heard, however much a session says, and however long its processes take to look at."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.sandbox import Limits, Outcome, Sandbox, SandboxConfig
from ludus.sandbox.exchange import ProcessExit, unfinished
from ludus.sandbox.guest import fork_server, frames, watch
from ludus.sandbox.guest.confinement import IsolationPlan
from ludus.sandbox.processes.worker import SandboxWorker

FLOOD = """
import os
frame = (2).to_bytes(4, "little") + bytes(4) + b"{}"
while True:
    os.write(3, frame * 1000)
"""


async def test_a_session_is_ended_once_however_much_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kills, tell = Counter[int](), SandboxWorker.tell

    def counted(worker: SandboxWorker, header: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if header["op"] == "kill":
            kills[header["id"]] += 1
        tell(worker, header, fds)

    monkeypatch.setattr(SandboxWorker, "tell", counted)
    async with Sandbox(SandboxConfig(workers=1, limits=Limits(wall_seconds=20))) as box:
        async with await box.session() as session:
            await session.python(FLOOD)
        assert (await box.python("1 + 1")).value == "2"
    assert kills and set(kills.values()) == {1}


@pytest.fixture
def signals() -> Iterator[None]:
    """What a worker does about signals is undone."""
    handlers = {which: signal.getsignal(which) for which in (signal.SIGCHLD, signal.SIGINT)}
    waker = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(waker)
    for which, handler in handlers.items():
        signal.signal(which, handler)


@pytest.mark.usefixtures("signals")
def test_few_looks_are_taken_while_orders_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every look takes longer than the time between two, orders must not wait for one each."""
    orders, seen = 200, list[str]()
    monkeypatch.setattr(fork_server, "_OFTEN_SECONDS", 0.0)
    monkeypatch.setattr(watch, "suspected", lambda *_: seen.append("look"))
    monkeypatch.setattr(fork_server.ForkServer, "_signal", lambda *_: seen.append("order"))
    monkeypatch.setattr(
        fork_server.ForkServer, "_reap", lambda _: None
    )  # this process has other children
    host, link = socket.socketpair()
    plan = IsolationPlan(True, 0, False, False, (), "", None, 0)
    with host, link:
        worker = fork_server.ForkServer(link, plan)
        worker._sessions[1] = watch.SessionRecord(0, Limits(cpu_seconds=1.0))
        worker._watched.add(1)
        for _ in range(orders):
            frames.send(host, {"op": "signal", "id": 1, "signal": 0})
        host.shutdown(socket.SHUT_WR)
        with contextlib.suppress(EOFError):
            worker.serve()
    assert seen.count("order") == orders
    assert 0 < seen.count("look") < orders / 10, "limits are checked, and requests come first"


def test_a_session_that_cannot_be_looked_after_is_ended_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its code has made of itself: it ends, for what it did, and the worker goes on."""

    def look(pid: int, *_: object) -> float | None:
        if pid == 11:
            raise RuntimeError("no such look was foreseen")
        return None

    killed: list[int] = []
    monkeypatch.setattr(watch, "suspected", look)
    monkeypatch.setattr(watch, "cpu_seconds", lambda *given: look(*given) or 0.0)
    monkeypatch.setattr(fork_server.ForkServer, "_kill", lambda _, number: killed.append(number))
    host, link = socket.socketpair()
    with host, link:
        worker = fork_server.ForkServer(link, IsolationPlan(True, 0, False, False, (), "", None, 0))
        for number, pid in ((1, 11), (2, 12)):
            worker._sessions[number] = watch.SessionRecord(pid, Limits(cpu_seconds=1.0))
        worker._enforce(worker._monitor.check_totals({1, 2}))
        worker._enforce(worker._monitor.check_idle({1, 2}, 1.0))
        told = [frames.receive(host)[0] for _ in range(2)]
    assert told == [{"event": "excess", "id": 1, "what": "unreadable"}] * 2
    assert killed == [1, 1]
    assert unfinished(ProcessExit(9, excess="unreadable"), None, Limits()).outcome is Outcome.KILLED


PAGES = st.tuples(st.integers(0, 100), st.integers(0, 100))


@given(st.lists(PAGES, min_size=2, max_size=20), st.integers(0, 1500))
def test_a_family_is_held_to_its_share_of_pages(family: list[tuple[int, int]], most: int) -> None:
    """Each process has pages of its own, and pages that count in part, because others have them too."""
    resident = [own + shared for own, shared in family]
    proportional = [own + shared // len(family) for own, shared in family]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "tree", lambda *_: list(range(len(family))))
        patch.setattr(watch, "_threads", lambda _: 1)
        patch.setattr(watch, "_socket_bytes", lambda _: 0)
        patch.setattr(watch, "_resident", resident.__getitem__)
        patch.setattr(watch, "_proportional", proportional.__getitem__)
        patch.setattr(watch, "_descriptors", lambda _: 0)
        suspected = watch.suspected(0, set(), most, most_processes=20)
        exceeded = watch.uses_more(0, set(), most)
    assert exceeded == (sum(proportional) > most)
    assert suspected == ("memory" if sum(resident) > most else None)
    assert suspected or not exceeded, "nobody who exceeds a limit is above suspicion"


def test_few_are_counted_slowly_where_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dividing shared pages takes the kernel a walk through all of a process's memory."""
    asked: list[int] = []
    monkeypatch.setattr(watch, "tree", lambda *_: list(range(33)))
    monkeypatch.setattr(watch, "_threads", lambda _: 1)
    monkeypatch.setattr(watch, "_socket_bytes", lambda _: 0)
    monkeypatch.setattr(watch, "_resident", lambda _: 17)
    monkeypatch.setattr(watch, "_proportional", lambda pid: asked.append(pid) or 1)
    assert not watch.uses_more(0, set(), 33 * 17 - 20)
    assert asked == [0, 1]
