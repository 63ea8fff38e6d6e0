"""The sandbox's pure parts, and those that meet hostile bytes: frames, filters, captures, endings, groups."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError
from ludus.sandbox import (
    Execution,
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
)
from ludus.sandbox.exchange import ProcessExit, execution_of, unfinished
from ludus.sandbox.guest import confinement, frames, kernel, seccomp
from ludus.sandbox.processes import isolation
from ludus.sandbox.processes.guest_process import ControlChannel, OutputPipe
from ludus.sandbox.processes.machine import ControlGroup, make_group

HEADERS = st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.booleans()))
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86 = 0xC000003E


@given(HEADERS, st.binary(max_size=2000))
def test_a_frame_arrives_as_it_was_sent(header: dict[str, Any], body: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send(ours, header, body)
        assert frames.receive(theirs) == (header, body, [])


def test_descriptors_travel_with_a_frame_and_are_usable() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    with ours, theirs:
        frames.send(ours, {"here": 1}, b"", (writer,))
        os.close(writer)
        _, _, fds = frames.receive(theirs)
        os.write(fds[0], b"hello")
        frames.close_all(fds)
    assert os.read(reader, 100) == b"hello" and os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x03\0\0\0\0\0\0\0{{{",
        (10_000).to_bytes(4, "little") + bytes(4) + b"[" * 10_000,
        b"\x02\0\0\0\xff\xff\0\0{}",
    ],
    ids=["huge", "no object", "no JSON", "deep", "a body nobody asked for"],
)
async def test_what_is_no_frame_ends_the_link(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    closed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    link = ControlChannel(ours, lambda *_: pytest.fail("it was taken for a frame"), closed.set_result)
    theirs.sendall(data)
    assert await asyncio.wait_for(closed, 5) is not None
    link.close()
    theirs.close()


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_flood_of_descriptors_ends_the_link() -> None:
    ours, theirs = socket.socketpair()
    before = _open_descriptors()
    closed: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    ControlChannel(ours, lambda *_: None, closed.set_result)
    for _ in range(20):
        if closed.done():
            break
        try:
            socket.send_fds(theirs, [b"\x01"], [0, 1, 2, 0, 1, 2])
        except OSError:
            break
        await asyncio.sleep(0)
    assert await asyncio.wait_for(closed, 5) is not None
    theirs.close()
    assert _open_descriptors() <= before


def _verdict(code: list[seccomp.Instruction], number: int, *arguments: int, arch: int = X86) -> int:
    """An interpreter for the few instructions a filter is made of, written from the manual page."""
    fields = {0: number, 4: arch}
    for place, argument in enumerate((*arguments, 0, 0, 0, 0, 0, 0)[:6]):
        fields[16 + 8 * place] = argument & 0xFFFFFFFF
        fields[20 + 8 * place] = argument >> 32 & 0xFFFFFFFF
    place = accumulator = 0
    while True:
        operation, yes, no, value = code[place]
        place += 1
        if operation == 0x20:
            accumulator = fields[value]
        elif operation == 0x06:
            return value
        else:
            truth = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[operation]
            place += yes if truth else no


needs_x86 = pytest.mark.skipif(kernel.MACHINE != "x86_64", reason="the numbers here are those of x86_64")


@needs_x86
@pytest.mark.parametrize(
    ("number", "argument", "expected"),
    [
        (0, 0, ALLOW),  # read
        (59, 0, ALLOW),  # execve
        (165, 0, EPERM),  # mount
        (272, 0, EPERM),  # unshare
        (101, 0, EPERM),  # ptrace
        (41, 2, EPERM),  # socket
        (53, 1, ALLOW),  # socketpair
        (435, 0, ENOSYS),  # clone3
        (500, 0, ENOSYS),  # newer than the list
        (0x40000000, 0, EPERM),  # the x32 way to say read
        (56, 0x11, ALLOW),  # fork
        (56, 0x10000011, EPERM),  # a new user namespace
        (157, 38, ALLOW),  # prctl: no new privileges
        (157, 1, EPERM),  # prctl: parent-death signal
        (157, 22, EPERM),  # prctl: a filter
        (62, 1234, ALLOW),  # kill
        (53, 2, EPERM),  # socketpair of another family
        (206, 0, EPERM),  # io_setup
        (278, 0, EPERM),  # vmsplice
        (317, 0, EPERM),  # seccomp
        (444, 0, EPERM),  # landlock_create_ruleset
        (319, 0, EPERM),  # memfd_create
        (162, 0, EPERM),  # sync
        (335, 0, EPERM),  # no call at all
        (451, 0, EPERM),  # cachestat
    ],
)
def test_the_filter_refuses_what_it_should(number: int, argument: int, expected: int) -> None:
    code = seccomp.program(network=False, fork_flags=0, own_pid=None)
    assert _verdict(code, number, argument) == expected


@needs_x86
def test_the_filter_knows_other_machines_and_the_way_to_fork() -> None:
    flags = kernel.clone_flags(confinement.NAMESPACES)
    code = seccomp.program(network=True, fork_flags=flags, own_pid=77)
    assert _verdict(code, 0, arch=0x40000003) == KILL
    assert _verdict(code, 56, flags) == ALLOW
    assert _verdict(code, 56, flags | kernel.CLONE_NEWNET) == EPERM
    assert _verdict(code, 41, 2) == ALLOW
    assert _verdict(code, 62, 77) == ALLOW and _verdict(code, 62, 78) == EPERM
    assert _verdict(code, 62, -1) == EPERM and _verdict(code, 424, 5) == EPERM


@pytest.mark.parametrize("number", [10**4000, -1, 0, 65, 9.0, "9", None, [9]], ids=range(8))
def test_a_signal_that_is_none_is_not_told(number: Any) -> None:
    said = execution_of({"done": "signal", "signal": number}, None)
    assert (said.outcome, said.signal) == (Outcome.KILLED, None)
    assert execution_of({"done": "signal", "signal": 11}, None).signal == "SIGSEGV"


def test_what_the_inside_says_can_be_written() -> None:
    said = execution_of({"done": "raised", "error": "a\udcffb", "value": "\ud800 \U0001f600"}, None)
    assert said.text().encode() == "\\ud800 \U0001f600\na\\udcffb".encode()


@needs_x86
def test_files_are_not_leased() -> None:
    code = seccomp.program(network=False, fork_flags=0, own_pid=None)
    leases = (fcntl.F_SETLEASE, fcntl.F_NOTIFY, fcntl.F_SETOWN, fcntl.F_SETSIG)
    assert {_verdict(code, 72, 3, command) for command in leases} == {EPERM}
    usual = (fcntl.F_DUPFD_CLOEXEC, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_SETLK, fcntl.F_GETOWN, 1031)
    assert {_verdict(code, 72, 3, command) for command in usual} == {ALLOW}


@needs_x86
def test_send_buffers_stay_as_they_are() -> None:
    code = seccomp.program(network=False, fork_flags=0, own_pid=None)
    pretended = 0x00050000
    assert [_verdict(code, 54, 3, 1, option) for option in (7, 32)] == [
        pretended
    ] * 2  # SO_SNDBUF, ...FORCE
    assert _verdict(code, 54, 3, 1, 8) == _verdict(code, 54, 3, 6, 7) == ALLOW


@pytest.mark.parametrize(
    ("header", "column"),
    [("x86_64-linux-gnu/asm/unistd_64.h", 0), ("asm-generic/unistd.h", 1)],
    ids=["x86_64", "aarch64"],
)
def test_the_numbers_are_the_kernels(header: str, column: int) -> None:
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip("the kernel's headers are not installed")
    text = path.read_text()
    known = {
        name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)", text)
    }
    known["newfstatat"] = known.get("newfstatat", known.get("fstatat", -1))
    for name, both in {**seccomp._ALLOWED, **seccomp._NETWORK}.items():
        newer = both[column] > 449 and name not in known  # than the headers of this machine
        assert newer or known.get(name, -1) == both[column], name


@needs_x86
@pytest.mark.parametrize("sees_others", [False, True])
def test_the_limit_on_processes_is_not_for_code_to_set(sees_others: bool) -> None:
    code = seccomp.program(network=False, fork_flags=0, own_pid=None, sees_others=sees_others)
    nproc, others = 6, [0, 7]
    for somewhere in (1, 1 << 32, 0x7F00_0000_1000):
        assert _verdict(code, 302, 0, nproc, somewhere) == EPERM
        assert all(_verdict(code, 302, 0, other, somewhere) == ALLOW for other in others)
    assert _verdict(code, 302, 0, nproc, 0, 1) == ALLOW, "it may be read"
    assert _verdict(code, 160, nproc) == EPERM and _verdict(code, 160, 7) == ALLOW
    assert _verdict(code, 302, 4242, 7, 1) == (EPERM if sees_others else ALLOW)


@given(st.integers(0, 456))
def test_every_path_of_the_filter_ends(number: int) -> None:
    code = seccomp.program(network=False, fork_flags=0x30020011, own_pid=1)
    assert _verdict(code, number, arch=seccomp._ARCHITECTURE[kernel.MACHINE]) in (ALLOW, EPERM, ENOSYS)


async def _captured(pieces: list[bytes], limit: int) -> tuple[str, bool, int]:
    overflows = 0

    def overflow() -> None:
        nonlocal overflows
        overflows += 1

    capture = OutputPipe(limit, overflow)
    writer = os.dup(capture.writer)
    capture.close_writer()
    os.set_blocking(writer, False)
    try:
        for piece in pieces:
            while piece:
                try:
                    piece = piece[os.write(writer, piece) :]
                except BlockingIOError:
                    await asyncio.sleep(0)
    except BrokenPipeError:
        pass
    finally:
        os.close(writer)
    return capture.finish(), capture.truncated, overflows


async def test_short_output_is_kept_whole_and_odd_bytes_are_shown() -> None:
    text, truncated, _ = await _captured([b"caf\xc3", b"\xa9 \xff\n"], 1000)
    assert text == "café \\xff\n" and not truncated


async def test_long_output_keeps_head_and_tail() -> None:
    text, truncated, overflows = await _captured([b"a" * 500, b"b" * 100_000, b"c" * 500], 1000)
    assert truncated and not overflows
    assert text.startswith("a" * 500) and text.endswith("c" * 500)
    assert "[100,000 bytes left out]" in text and len(text) < 1200


async def test_endless_output_is_cut_off_once() -> None:
    _, truncated, overflows = await _captured([b"x" * (1 << 20)] * 40, 1000)
    assert truncated and overflows == 1


@given(
    st.dictionaries(
        st.sampled_from(["done", "value", "error", "code", "signal"]),
        st.none() | st.integers() | st.text(),
    )
)
def test_whatever_the_inside_says_is_a_result(said: dict[str, Any]) -> None:
    result = execution_of(said, None)
    assert isinstance(result.text(), str)
    assert execution_of(said, Outcome.TIMEOUT).outcome is Outcome.TIMEOUT


@pytest.mark.parametrize(
    ("ending", "stopped", "expected"),
    [
        (ProcessExit(7 << 8), None, (Outcome.EXITED, 7, None)),
        (ProcessExit(int(signal.SIGSEGV)), None, (Outcome.KILLED, None, "SIGSEGV")),
        (ProcessExit(int(signal.SIGKILL), cpu_seconds=3.0), None, (Outcome.CPU, None, None)),
        (ProcessExit(int(signal.SIGKILL), cpu_seconds=0.1), None, (Outcome.KILLED, None, "SIGKILL")),
        (ProcessExit(int(signal.SIGKILL)), Outcome.TIMEOUT, (Outcome.TIMEOUT, None, None)),
        (
            ProcessExit(int(signal.SIGKILL), excess="memory"),
            Outcome.TIMEOUT,
            (Outcome.MEMORY, None, None),
        ),
        (ProcessExit(None), None, (Outcome.KILLED, None, None)),
    ],
)
def test_a_silent_end_is_explained_by_the_kernel(
    ending: ProcessExit, stopped: Outcome | None, expected: tuple[Outcome, int | None, str | None]
) -> None:
    result = unfinished(ending, stopped, Limits(cpu_seconds=2))
    assert (result.outcome, result.exit_code, result.signal) == expected


def test_a_model_reads_output_value_and_what_happened() -> None:
    shown = Execution(Outcome.OK, stdout="a\n", stderr="b\n", value="3").text()
    assert shown == "a\nb\n3"
    assert "longer than 2" in Execution(Outcome.TIMEOUT, seconds=2.0, lost=True).text()
    assert "variables and files are gone" in Execution(Outcome.TIMEOUT, lost=True).text()
    assert Execution(Outcome.RAISED, exit_code=3).text() == "[exit status 3]"


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_is_made_swept_and_removed(tmp_path: Path, version: int) -> None:
    if version == 2:
        (tmp_path / "cgroup.controllers").write_text("memory pids")
        homes = [tmp_path]
    else:
        homes = [tmp_path / "memory", tmp_path / "pids"]
    for home in homes:
        (home / "ludus-sandbox-999999999").mkdir(parents=True)
    group = make_group(tmp_path, pid=os.getpid())
    assert group.counts
    for home in homes:
        assert not (home / "ludus-sandbox-999999999").exists()
        folder = home / f"ludus-sandbox-{os.getpid()}"
        assert any(int(file.read_text()) > 1000 for file in folder.iterdir())
    group.add(123)
    for home in homes:
        assert (home / f"ludus-sandbox-{os.getpid()}" / "cgroup.procs").read_text() == "123"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "expected"), [(str(64 << 20), 48 << 20), ("max", None), (str((1 << 63) - 4096), None)]
)
def test_a_containers_own_limit_is_heeded(
    tmp_path: Path, version: int, limit: str, expected: int | None
) -> None:
    free = make_group(tmp_path / "nowhere").memory_bytes
    home = tmp_path if version == 2 else tmp_path / "memory"
    home.mkdir(exist_ok=True)
    if version == 2:
        (home / "cgroup.controllers").write_text("memory pids")
    (home / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
    assert make_group(tmp_path, pid=os.getpid()).memory_bytes == (expected or free)


def test_where_no_group_can_be_made_there_is_none(tmp_path: Path) -> None:
    group = make_group(tmp_path / "nowhere")
    assert not group.counts and group.kills() == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 1\noom_kill {}\n"),
        ("memory.events", "low 0\nhigh 3\nmax 4\noom 5\noom_kill {}\noom_group_kill 6\n"),
    ],
)
def test_a_group_tells_how_many_the_kernel_has_ended(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text.format(0))
    group = ControlGroup([tmp_path], 1 << 30)
    assert group.kills() == 0
    (tmp_path / name).write_text(text.format(12))
    assert group.kills() == 12
    group.remove()
    assert group.kills() == 0


async def test_too_little_isolation_is_refused_unless_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without any layer but seccomp: its probe finds the doors open, and says so."""
    arrangements = isolation.arrangements

    def weakened(config: SandboxConfig, reasons: dict[str, str]) -> Any:
        bare = list(arrangements(config, reasons))[1]
        reasons["namespaces"] = "switched off for this test"
        return [{**bare, "landlock": False, "uid": None}]

    monkeypatch.setattr(isolation, "arrangements", weakened)
    with pytest.raises(SandboxUnavailable, match=r"still reaches: .*files.*accept_risk"):
        async with Sandbox(SandboxConfig(workers=1)):
            pass
    async with Sandbox(SandboxConfig(workers=1, accept_risk=True)) as box:
        assert box.layers is not None and "files" in box.layers.open_doors
        assert (await box.python("1 + 1")).value == "2"


async def test_weaker_isolation_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = isolation.try_arrangement

    async def refuse_namespaces(worker: Any, order: dict[str, Any], *rest: Any) -> Any:
        if order["namespaces"]:
            raise SandboxError("refused for this test")
        return await real(worker, order, *rest)

    monkeypatch.setattr(isolation, "try_arrangement", refuse_namespaces)
    async with Sandbox(SandboxConfig(workers=1, accept_risk=True)) as box:
        assert (await box.python("1 + 1")).value == "2"
    assert "without namespaces" in caplog.text
    assert "refused for this test" in caplog.text


async def test_a_preload_that_does_not_exist_is_named() -> None:
    with pytest.raises(Exception, match="no_such_module_at_all"):
        await Sandbox(SandboxConfig(preload=("no_such_module_at_all",))).start()


async def test_a_path_to_show_must_exist() -> None:
    with pytest.raises(ConfigError, match="readable"):
        await Sandbox(SandboxConfig(readable=("/no/such/folder",))).start()


def test_headers_are_json() -> None:
    data = frames.packed({"a": 1}, b"xyz")
    assert frames.sizes(data[:8]) == (len(json.dumps({"a": 1})), 3)
