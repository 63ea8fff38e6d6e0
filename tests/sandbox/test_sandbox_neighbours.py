"""What one session does to the kernel's counts, to our protocol and to itself, and what others notice of it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attacks.case import INTERNALS
from attacks.cases_kernel import CASES

from ludus.sandbox import (
    CannotFork,
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
)
from ludus.sandbox.guest import watch
from ludus.sandbox.processes import machine
from ludus.sandbox.processes.machine import ControlGroup
from ludus.sandbox.processes.worker import SandboxWorker

on_sandbox = pytest.mark.asyncio(loop_scope="module")
IN_FLIGHT = """
import socket
keep, count = [], 0
try:
    while True:
        one, other = socket.socketpair()
        keep += [one, other]
        socket.send_fds(one, [b"x"], [0] * 100)
        count += 100
except OSError as error:
    print(count, error.strerror)
"""
SPARSE = "for name in 'abcd':\n    file = open(name, 'wb'); file.truncate(60 << 20); file.close()\n"
DEEP = """
import os
folder = os.open(".", os.O_RDONLY)
for _ in range(30):
    os.mkdir("d" * 200, dir_fd=folder)
    folder, above = os.open("d" * 200, os.O_RDONLY, dir_fd=folder), folder
    os.close(above)
os.close(folder)
"""
THREADS = """
import ctypes, resource, threading
try:
    resource.setrlimit(resource.RLIMIT_NPROC, (resource.getrlimit(resource.RLIMIT_NPROC)[1],) * 2)
except (ValueError, OSError):
    pass
threading.stack_size(1 << 16)
done, started = threading.Event(), 0
try:
    for _ in range(300):
        threading.Thread(target=done.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
done.set()
print("threads", started)
"""
NAMES = (b"\xff\xfe", b") R 1 (", b"a\nNSpid:\t1", b")))", b" ")
RENAMED = "import ctypes\nctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\n"
CROWD = """
import os, time
block = bytearray(@MB@ << 20)
for place in range(0, len(block), 4096):
    block[place] = 1
for _ in range(@FORKS@):
    if not os.fork():
        if @COPIES@:
            for place in range(0, len(block), 4096):
                block[place] = 2
        time.sleep(@SECONDS@)
        os._exit(0)
time.sleep(@SECONDS@)
print("within its limits")
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def box() -> AsyncIterator[Sandbox]:
    async with Sandbox(SandboxConfig(workers=1)) as box:
        yield box


@on_sandbox
async def test_descriptors_in_flight_in_one_session_do_not_keep_others_from_forking(
    box: Sandbox,
) -> None:
    async with await box.session() as hostile, await box.session() as neighbour:
        full = await hostile.python(IN_FLIGHT)
        assert full.ok and int(full.stdout.split()[0]) >= 200, full.text()
        await neighbour.python("x = 1")
        async with (
            await neighbour.fork() as twin,
            await neighbour.snapshot() as before,
            await before.restore() as again,
        ):
            for session in (neighbour, twin, again):
                assert (await session.python("x")).value == "1"


@on_sandbox
async def test_each_session_is_a_user_of_its_own(box: Sandbox) -> None:
    if not box.layers.active["own user ids"]:
        pytest.skip(box.layers.reasons["own user ids"])
    async with await box.session() as one, await box.session() as other:
        outside = [
            (await session.python("open('/proc/self/uid_map').read().split()[1]")).value
            for session in (one, other)
        ]
        assert outside[0] != outside[1]
        assert (await one.python("import os; os.getresuid(), os.getresgid()")).value == str(
            ((1000,) * 3, (1000,) * 3)
        )
        full = await one.python(IN_FLIGHT)
        same = await other.python(IN_FLIGHT)
        assert int(same.stdout.split()[0]) >= int(full.stdout.split()[0]) > 0, same.text()


@on_sandbox
@pytest.mark.parametrize("use", ["fork", "snapshot"])
async def test_a_refused_fork_leaves_the_session_as_it_was(box: Sandbox, use: str) -> None:
    async with await box.session() as session:
        await session.python(f"{DEEP}\nx = 41")
        with pytest.raises(CannotFork, match="File name too long"):
            await getattr(session, use)()
        assert (await session.python("x + 1")).value == "42"
        limit = "import resource; resource.getrlimit(resource.RLIMIT_NPROC)[0]"
        assert (await session.python(limit)).value == str(session.limits.processes)
        await session.shell("rm -rf d*")
        made = await getattr(session, use)()
        assert (await session.python("x")).value == "41"
        await made.close()


@on_sandbox
async def test_sparse_files_are_copied_as_sparse_files(box: Sandbox) -> None:
    async with await box.session() as session:
        await session.python(
            SPARSE + "file = open('a', 'r+b'); file.seek(5 << 20); file.write(b'here'); file.close()"
        )
        async with await session.fork() as twin:
            said = await twin.python(
                "import os\nfile = open('a', 'rb'); file.seek(5 << 20)\n"
                "file.read(5), os.path.getsize('a'), os.path.getsize('d'), os.stat('a').st_blocks < 100"
            )
            assert said.value == str((b"here\0", 60 << 20, 60 << 20, True)), said.text()


@on_sandbox
async def test_a_fork_that_fails_by_our_fault_is_ours_and_harms_nobody(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt = SandboxWorker.adopt

    def far_too_small(
        worker: SandboxWorker, pid: int, parent: Any, limits: Limits, end: Any, *, copy: bool
    ) -> object:
        return adopt(worker, pid, parent, limits.model_copy(update={"disk_mb": -1}), end, copy=copy)

    async with await box.session() as session:
        await session.python("x = 1")
        with monkeypatch.context() as patch:
            patch.setattr(
                SandboxWorker, "adopt", far_too_small
            )  # a tmpfs that the kernel refuses to mount
            with pytest.raises(SandboxError, match="could not be completed"):
                await session.snapshot()
        assert (await session.python("x")).value == "1"


@on_sandbox
@pytest.mark.parametrize("status", ["2**70", "-1", "2**40", "True", "'0'", "float('nan')"])
async def test_a_forged_status_of_a_fork_is_a_result(box: Sandbox, status: str) -> None:
    async with await box.session() as session:
        forged = (
            f"{INTERNALS}\nassert '_fork_status' in inside\ninside['_fork_status'] = lambda *_: {status}"
        )
        assert (await session.python(forged)).ok
        async with await session.fork() as twin:
            ended = await twin.python("import os; os._exit(3)")
            assert ended.lost and not ended.ok


@on_sandbox
async def test_what_a_session_needs_to_be_forked_lets_its_code_out_of_nothing(box: Sandbox) -> None:
    """Executions of their own may not use it at all, as the campaign finds; sessions may, for their forks."""
    case = next(case for case in CASES if case.name == "the flags that forks of a session use")
    async with await box.session() as session:
        said = await session.python(case.code.replace("@HOST@", str(os.getpid())))
        assert case.expect(said) is None and "entered 1" in said.stdout, said.text()
    assert "entered 0" in (await box.python(case.code.replace("@HOST@", "1"))).stdout


async def test_a_network_that_is_the_machines_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "slirp_program", lambda: None)
    with pytest.raises(SandboxUnavailable, match=r"loopback.*slirp4netns.*accept_risk"):
        await Sandbox(SandboxConfig(workers=1, network=True)).start()
    async with Sandbox(SandboxConfig(workers=1, network=True, accept_risk=True)) as box:
        assert box.layers is not None and box.layers.open_doors == ["loopback"]
        refused = (
            "import socket\ntry: socket.socket(socket.AF_PACKET)\nexcept OSError as error: print(error)"
        )
        assert "not permitted" in (await box.python(refused)).stdout


@pytest.mark.skipif(
    machine.slirp_program() is None or not os.access("/dev/net/tun", os.R_OK | os.W_OK),
    reason="slirp4netns or its device is not there",
)
async def test_a_network_of_its_own_reaches_others_and_not_our_loopback() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as secret,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way,
    ):
        way.connect(("192.0.2.254", 9))
        ours = way.getsockname()[0]  # an address of this machine that is not its loopback
        with socket.create_server((ours, 0)) as public:
            gateway = (machine.GATEWAY, secret.getsockname()[1])
            places = [public.getsockname(), secret.getsockname(), gateway]
            code = (
                "import socket\n"
                f"for place in {places}:\n"
                "    try: socket.create_connection(place, 5); print('reached')\n"
                "    except OSError: print('refused')"
            )
            async with Sandbox(SandboxConfig(workers=1, network=True)) as box:
                assert (await box.python(code)).stdout.split() == ["reached", "refused", "refused"]


_NEVER_CLOSED = """
import asyncio, glob, os, sys
from ludus.sandbox import Sandbox, SandboxConfig, sandbox
async def main():
    one, two = sandbox.shared_sandbox(), sandbox.shared_sandbox(SandboxConfig(workers=2))
    await one.python("1")
    for _ in range(4):
        await (await two.session()).python("x = bytearray(50 << 20)")  # takes its end a moment
    await one.close()
    print(len(glob.glob(f"/sys/fs/cgroup/**/ludus-sandbox-{os.getpid()}", recursive=True)))
asyncio.run(main())
"""


def test_no_control_group_is_left_behind() -> None:
    """Neither where a sandbox is never closed, as at the end of a server, nor where two share one group."""
    ended = subprocess.Popen([sys.executable, "-c", _NEVER_CLOSED], stdout=subprocess.PIPE, text=True)
    said = ended.communicate(timeout=30)[0]
    if said == "0\n":
        pytest.skip("this user may make no control group")
    assert ended.returncode == 0 and int(said) > 0
    assert list(Path("/sys/fs/cgroup").glob(f"**/ludus-sandbox-{ended.pid}")) == []


_DELEGATED = """
import asyncio, os, sys
from attacks.user import exec_as
if os.getuid() == 0:
    exec_as(65534, [sys.executable, *sys.orig_argv[1:]], dict(os.environ))
from ludus.sandbox import Sandbox, SandboxConfig
async def main():
    async with Sandbox(SandboxConfig(workers=1)) as box:
        print(box.layers.active["control group"], open(f"/proc/{box.backend.workers[0].pid}/cgroup").read())
asyncio.run(main())
"""


def test_an_ordinary_user_with_a_part_of_the_hierarchy_gets_a_control_group(tmp_path: Path) -> None:
    home = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not os.access(home, os.W_OK):
        pytest.skip("needs root and control groups of version 1")
    given = home / f"ludus-test-{os.getpid()}"
    given.mkdir()
    try:
        for path in (given, given / "cgroup.procs"):
            os.chown(path, 65534, 65534)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o777)
            paths = [str(Path(__file__).parent), str(Path(machine.__file__).parents[3])]
            done = subprocess.run(
                [
                    "sh",
                    "-c",
                    f'echo $$ > {given}/cgroup.procs; exec "$@"',
                    "sh",
                    sys.executable,
                    "-c",
                    _DELEGATED,
                ],
                env={**os.environ, "PYTHONPATH": ":".join(paths), "TMPDIR": folder, "HOME": folder},
                capture_output=True,
                text=True,
                timeout=40,
            )
        assert done.stdout.startswith("True"), done.stdout + done.stderr[-2000:]
        assert f"/{given.name}/ludus-sandbox-" in done.stdout
        assert not [path for path in given.iterdir() if path.is_dir()]
    finally:
        given.rmdir()


@on_sandbox
async def test_threads_count_as_processes(box: Sandbox) -> None:
    limits = Limits(processes=32)
    said = await box.python(THREADS, limits=limits)
    assert "threads" in said.stdout and int(said.stdout.split()[1]) < 32, said.text()
    async with await box.session(limits=limits) as session, await session.fork() as twin:
        for one in (session, twin):
            said = await one.python(THREADS)
            assert "threads" in said.stdout and int(said.stdout.split()[1]) < 32, said.text()


@on_sandbox
async def test_processes_of_any_name_are_looked_after(box: Sandbox) -> None:
    """A process's name is in what /proc says of it, as the bytes that its code has chosen."""
    replaced = box.replaced
    async with AsyncExitStack() as stack:
        neighbour, *hostile = [
            await stack.enter_async_context(await box.session()) for _ in range(len(NAMES) + 1)
        ]
        await neighbour.python("x = 41")
        for session, name in zip(hostile, NAMES, strict=True):
            assert (await session.python(RENAMED.format(name=name) + "x = 1")).ok
        await asyncio.sleep(1.2)  # until idle sessions have been looked after
        assert (await neighbour.python("x + 1")).value == "42"
        for session in hostile:
            async with await session.fork() as twin:
                assert (await twin.python("x")).value == "1"
            await session.python("import os, time\nif not os.fork(): time.sleep(30)")
            with pytest.raises(CannotFork, match="child process"):
                await session.fork()
        assert (await neighbour.python("x + 1")).value == "42"
    assert box.replaced == replaced


def crowd(mb: int, forks: int, seconds: float, *, copies: bool) -> str:
    values = {"MB": mb, "FORKS": forks, "SECONDS": seconds, "COPIES": copies}
    code = CROWD
    for key, value in values.items():
        code = code.replace(f"@{key}@", str(value))
    return code


@on_sandbox
async def test_forks_share_their_memory_and_pay_for_copies(box: Sandbox) -> None:
    limits = Limits(memory_mb=200, wall_seconds=20.0)
    shared, copied = await asyncio.gather(
        box.python(crowd(60, 8, 1.0, copies=False), limits=limits),
        box.python(crowd(60, 8, 15.0, copies=True), limits=limits),
    )
    assert shared.stdout == "within its limits\n", shared.text()
    assert copied.outcome is Outcome.MEMORY, copied.text()


def test_a_long_count_of_memory_delays_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count takes longer than this test may: whoever waited for one would never be served."""
    monkeypatch.setattr(watch, "_proportional", lambda _: time.sleep(600))
    monkeypatch.setattr(watch, "_COUNT_REST", 1e9)
    limits = Limits(memory_mb=16, processes=1000)
    monitor = watch.UsageMonitor({1: watch.SessionRecord(os.getpid(), limits)}, 0)
    held = subprocess.Popen(["sleep", "600"])
    try:
        for _ in range(3):
            assert monitor.check_totals({1}) == []
        (helper,) = monitor.counters
        os.kill(helper, 9)
        _, status = os.waitpid(helper, 0)
        assert monitor.counted(helper, status) == [], "a helper that was killed says nothing"
        assert monitor.check_totals({1}) == [] and not monitor.counters, "the next count waits"
    finally:
        held.kill()
        held.wait()


def _fake_slirp(folder: Path, help_text: str) -> Path:
    path = folder / "slirp4netns"
    path.write_text(
        "#!/bin/bash\n"
        f'if [ "$1" = --help ]; then echo "{help_text}"; exit; fi\n'
        f'echo "$@" > {folder}/arguments\n'
        'while [ "$1" != --ready-fd ]; do shift; done\n'
        'ready=$2; ending=$4; eval "echo 1 >&$ready"; eval "read line <&$ending"; sleep 0.5\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("help_text", "confined"),
    [("--enable-sandbox --enable-seccomp", ["--enable-sandbox", "--enable-seccomp"]), ("-c", [])],
    ids=["new", "old"],
)
async def test_slirp4netns_is_confined_as_far_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help_text: str, confined: list[str]
) -> None:
    monkeypatch.setattr(machine, "slirp_program", lambda: str(_fake_slirp(tmp_path, help_text)))
    ready: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
    network = machine.Slirp(os.getpid(), ready.set_result)
    assert await ready is None
    given = (tmp_path / "arguments").read_text().split()
    assert [option for option in given if option.startswith("--enable")] == confined
    beats = 0
    started = SandboxWorker({"uid": None, "subids": None}, ControlGroup([], 0), lambda _: None)
    started._slirp = network
    closing = asyncio.create_task(started.close())
    while not closing.done():
        beats += 1
        await asyncio.sleep(0.01)
    assert beats > 2, "others run while it ends"
    assert network._popen.returncode == 0
