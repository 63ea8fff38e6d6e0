"""python, bash and files in one sandbox session per episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ludus.core import Fault, InfraError, Task, ToolCall, ToolContext, ToolResult, ToolSet
from ludus.sandbox import Limits, SandboxConfig, SandboxUnavailable, SessionLost, shared_sandbox
from ludus.tools.library import build_toolset

CONFIG = SandboxConfig(workers=1, limits=Limits(wall_seconds=1.5, cpu_seconds=1, memory_mb=200))

on_sandbox = pytest.mark.asyncio(loop_scope="module")
"""One event loop for the module, and so one shared sandbox for its tests."""


class Desk:
    """An episode with its tools."""

    def __init__(self, tools: ToolSet, episode: str = "e1") -> None:
        self.tools, self.context = tools, ToolContext(episode, Task.of("?"))

    async def __call__(self, tool: str, **arguments: Any) -> ToolResult:
        return await self.tools.call(ToolCall(tool, arguments), self.context)

    async def says(self, tool: str, **arguments: Any) -> str:
        result = await self(tool, **arguments)
        assert result.fault is None, result
        return result.content


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left() -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()


@pytest_asyncio.fixture(loop_scope="module")
async def desk() -> AsyncIterator[Desk]:
    made = Desk(build_toolset(["python", "bash", "files"], sandbox=CONFIG))
    await made.tools.open(made.context)
    yield made
    await made.tools.close(made.context)


@on_sandbox
async def test_python_keeps_its_variables_and_shows_the_last_value(desk: Desk) -> None:
    assert await desk.says("python", code="x = 20") == "(no output)"
    assert await desk.says("python", code="print('hi')\nx + 1") == "hi\n21"


@on_sandbox
async def test_all_tools_of_a_list_share_one_session(desk: Desk) -> None:
    await desk.says("bash", command="echo 'from bash' > note.txt; export COLOUR=red; mkdir -p sub")
    assert await desk.says("python", code="open('note.txt').read()") == "'from bash\\n'"
    assert "from bash" in await desk.says("view_file", path="note.txt")
    await desk.says("create_file", path="sub/made.py", text="print('made')\n")
    assert await desk.says("bash", command="cat sub/made.py; echo $COLOUR") == "print('made')\nred"


@on_sandbox
async def test_episodes_do_not_see_each_other(desk: Desk) -> None:
    other = Desk(desk.tools, "e2")
    await desk.says("python", code="x = 1; open('mine', 'w').write('1')")
    assert (await other("python", code="x")).fault is Fault.TOOL_RAISED
    assert await other.says("python", code="import os; os.listdir()") == "[]"
    await other.tools.close(other.context)
    assert await desk.says("python", code="x") == "1"


@on_sandbox
async def test_an_episode_that_runs_no_code_opens_nothing(desk: Desk) -> None:
    await desk.tools.open(desk.context)
    await desk.tools.list(desk.context)
    assert shared_sandbox(CONFIG).alive == 0


@on_sandbox
async def test_calls_of_one_turn_take_turns(desk: Desk) -> None:
    await desk.says("python", code="seen = []")
    calls = [desk("python", code=f"import time; seen.append({i}); time.sleep(0.01)") for i in range(5)]
    await asyncio.gather(*calls)
    assert await desk.says("python", code="seen") == "[0, 1, 2, 3, 4]"


@pytest.mark.parametrize(
    ("code", "fault", "words"),
    [
        ("print('so far'); 1/0", Fault.TOOL_RAISED, "ZeroDivisionError"),
        ("print('so far', flush=True)\nwhile True: pass", Fault.TOOL_TIMEOUT, "stopped"),
        ("print('so far', flush=True)\nx = bytearray(10**10)", Fault.LIMIT, "emory"),
        ("print('so far', flush=True)\nimport ctypes; ctypes.string_at(0)", Fault.TOOL_RAISED, "SEGV"),
        ("print('so far', flush=True)\nimport os; os._exit(3)", Fault.TOOL_RAISED, "3"),
        ("def f(:", Fault.TOOL_RAISED, "SyntaxError"),
    ],
)
@on_sandbox
async def test_what_goes_wrong_is_told_with_the_output_so_far(
    desk: Desk, code: str, fault: Fault, words: str
) -> None:
    result = await desk("python", code=code)
    assert result.fault is fault
    assert words in result.content
    assert "so far" in result.content or "SyntaxError" in result.content


@on_sandbox
async def test_endless_output_is_a_limit(desk: Desk) -> None:
    result = await desk("python", code="import os\nwhile True: os.write(1, b'x' * 100000)")
    assert result.fault in (Fault.LIMIT, Fault.TOOL_TIMEOUT)
    assert len(result.content) <= 20_100


@on_sandbox
async def test_after_a_lost_session_the_model_is_told_once(desk: Desk) -> None:
    await desk.says("python", code="x = 1; open('kept', 'w').write('1')")
    await desk("python", code="import os; os._exit(1)")
    first = await desk("python", code="x")
    assert first.content.startswith("[A new session was started")
    assert "NameError" in first.content
    assert "new session" not in await desk.says("python", code="1 + 1")
    assert "kept" not in await desk.says("bash", command="ls")


@on_sandbox
async def test_a_status_that_is_not_zero_is_no_fault_of_a_command(desk: Desk) -> None:
    result = await desk("bash", command="echo nothing | grep something")
    assert result.fault is None
    assert "1" in result.content
    assert (await desk("bash", command="sleep 100 & while true; do :; done")).fault is Fault.TOOL_TIMEOUT


@on_sandbox
async def test_a_session_that_we_lost_is_our_failure(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.says("python", code="1")

    async def lost(*args: object, **named: object) -> None:
        raise SessionLost("the worker died")

    monkeypatch.setattr("ludus.sandbox.processes.session.ProcessSession.python", lost)
    with pytest.raises(InfraError) as caught:
        await desk("python", code="2")
    assert caught.value.boundary == "sandbox"
    assert not caught.value.retriable
    assert caught.value.attempts == 1


@on_sandbox
async def test_too_little_isolation_is_not_told_to_the_model(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: object, **named: object) -> None:
        raise SandboxUnavailable("this machine allows too little isolation")

    monkeypatch.setattr("ludus.sandbox.Sandbox.session", refused)
    with pytest.raises(InfraError, match="too little isolation"):
        await desk("python", code="1")


@on_sandbox
async def test_a_closed_episode_leaves_no_session(desk: Desk) -> None:
    await desk.says("python", code="1")
    assert shared_sandbox(CONFIG).alive == 1
    await desk.tools.close(desk.context)
    await desk.tools.close(desk.context)
    assert shared_sandbox(CONFIG).alive == 0


# files --------------------------------------------------------------------------------------------


@on_sandbox
async def test_view_shows_numbers_ranges_and_folders(desk: Desk) -> None:
    await desk.says("create_file", path="a/b.txt", text="one\ntwo\nthree\n")
    assert await desk.says("view_file", path="a/b.txt") == "     1\tone\n     2\ttwo\n     3\tthree"
    assert await desk.says("view_file", path="a/b.txt", first=2, last=2) == "     2\ttwo"
    assert await desk.says("view_file", path="a/b.txt", first=3, last=99) == "     3\tthree"
    assert await desk.says("view_file", path=".") == ".:\na/\na/b.txt (14 bytes)"
    assert "3 lines" in (await desk("view_file", path="a/b.txt", first=9)).content
    assert "No such file" in (await desk("view_file", path="nope")).content
    await desk.says(
        "bash", command="mkdir empty; printf 'a\\0b' > data.bin; : > nothing; seq 2000 > long"
    )
    assert await desk.says("view_file", path="empty") == "empty is an empty folder"
    assert "binary" in (await desk("view_file", path="data.bin")).content
    assert await desk.says("view_file", path="nothing") == "(the file is empty)"
    assert (await desk.says("view_file", path="long")).endswith(
        "... 1500 more lines, up to 2000; ask for them by first and last"
    )


@on_sandbox
async def test_replace_wants_exactly_one_match(desk: Desk) -> None:
    await desk.says("create_file", path="f.py", text="a = 1\nb = 1\n    c = 2\n")
    twice = await desk("replace_in_file", path="f.py", old="= 1", new="= 3")
    assert twice.fault is Fault.TOOL_RAISED
    assert "2 times in f.py, on lines 1, 2" in twice.content
    spaces = await desk("replace_in_file", path="f.py", old="c  = 2", new="c = 3")
    assert "does not occur" in spaces.content
    assert "Line 3 is the same but for white space" in spaces.content
    assert "     2\tb = 3" in await desk.says("replace_in_file", path="f.py", old="b = 1", new="b = 3")
    assert await desk.says("bash", command="cat f.py") == "a = 1\nb = 3\n    c = 2"
    assert (await desk("replace_in_file", path="f.py", old="", new="x")).fault is Fault.TOOL_RAISED
    assert (await desk("replace_in_file", path="gone.py", old="a", new="x")).fault is Fault.TOOL_RAISED


@on_sandbox
async def test_insert_goes_after_a_line(desk: Desk) -> None:
    await desk.says("create_file", path="f", text="one\r\ntwo")
    await desk.says("insert_in_file", path="f", line=0, text="zero")
    await desk.says("insert_in_file", path="f", line=3, text="three")
    assert await desk.says("python", code="open('f', newline='').read()") == repr(
        "zero\none\r\ntwo\nthree"
    )
    assert "line can be 0 to 4" in (await desk("insert_in_file", path="f", line=9, text="x")).content


@pytest.mark.parametrize("path", ["", "a\0b", "/etc/passwd", "../../outside", "/proc/self/mem/x"])
@on_sandbox
async def test_files_outside_are_not_written(desk: Desk, path: str) -> None:
    result = await desk("create_file", path=path, text="x")
    assert result.fault is Fault.TOOL_RAISED


@on_sandbox
async def test_invalid_text_is_shown_but_not_changed(desk: Desk) -> None:
    await desk.says("python", code="open('f', 'wb').write(b'a\\xffb\\n')")
    assert "a\\xffb" in await desk.says("view_file", path="f")
    assert "not UTF-8" in (await desk("replace_in_file", path="f", old="a", new="b")).content


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("python", {"code": "x = '\ud800'"}),
        ("python", {"code": "a\0b"}),
        ("python", {"code": "#" * 5_000_000}),
        ("bash", {"command": "echo '\ud800' a\0b"}),
        ("bash", {"command": "#" * 5_000_000}),
        ("create_file", {"path": "\ud800", "text": "x"}),
        ("create_file", {"path": "f", "text": "\ud800"}),
        ("create_file", {"path": "a" * 5000, "text": "x"}),
        ("create_file", {"path": "f", "text": "x" * 2_000_000}),
        ("view_file", {"path": "-delete"}),
    ],
    ids=range(10),
)
@on_sandbox
async def test_odd_arguments_are_answered(desk: Desk, tool: str, arguments: dict[str, str]) -> None:
    result = await desk(tool, **arguments)
    assert result.content
    result.content.encode()
    assert await desk.says("python", code="1 + 1") == "2"


ODD_FILES = """
import fcntl, os, stat, time
kept = 41
os.mkfifo("fifo")
os.mkfifo("read_fifo")
os.mknod("socket", stat.S_IFSOCK | 0o600)
os.symlink("loop", "loop")
os.symlink("fifo", "link")
os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), 8 << 20)
os.mkdir("folder")
leased = os.open("leased", os.O_CREAT | os.O_RDWR)
try:
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except PermissionError:
    print("no leases")
if os.fork() == 0:
    os.open("read_fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.mkdir("ready")
    time.sleep(60)
while not os.path.exists("ready"): time.sleep(0.01)
"""


@on_sandbox
async def test_a_file_tool_waits_for_no_file(desk: Desk) -> None:
    """A pipe, a lease or a device would hold the session until its time is up, and cost it."""
    assert "no leases" in await desk.says("python", code=ODD_FILES)
    odd = [
        "fifo",
        "read_fifo",
        "socket",
        "loop",
        "link",
        "/dev/zero",
        "/dev/full",
        "a/" * 1500,
    ]
    for path in odd:
        for tool, arguments in (
            ("create_file", {"text": "x" * 200_000}),
            ("view_file", {}),
            ("replace_in_file", {"old": "a", "new": "b"}),
            ("insert_in_file", {"line": 0, "text": "x"}),
        ):
            result = await desk(tool, path=path, **arguments)
            assert result.fault is Fault.TOOL_RAISED, (path, tool, result)
            assert "session" not in result.content
    assert "binary" in (await desk("view_file", path="sparse")).content
    assert "Is a directory" in (await desk("create_file", path="folder", text="x")).content
    assert "fifo (p)" in await desk.says("view_file", path=".")
    assert await desk.says("python", code="kept + 1") == "42"


@on_sandbox
async def test_a_listing_reads_what_find_says_with_care(desk: Desk) -> None:
    many = "import os\nos.mkdir('many')\nfor i in range(3000): os.mknod(f'many/{i:0200}')"
    await desk.says("python", code=many)
    assert "more" in await desk.says("view_file", path="many")  # its output is cut in the middle
    forged = "#!/bin/sh\nprintf 'f x y\\\\0f %05000d z\\\\0f 1 good\\\\0' 7\n"
    await desk.says(
        "python",
        code=f"open('find', 'w').write('''{forged}''')\nos.chmod('find', 0o755)\n"
        "os.environ['PATH'] = os.getcwd() + ':' + os.environ['PATH']",
    )
    assert await desk.says("view_file", path=".") == ".:\ngood (1 bytes)"
