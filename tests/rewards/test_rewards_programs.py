"""Programs in several languages: built, run, and judged by what they write."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from ludus.core import ConfigError, InfraError, Task
from ludus.rewards import build_reward, synthetic_episode
from ludus.rewards.code_tests import Programs
from ludus.sandbox import Execution, Outcome, SandboxConfig, SessionLost, shared_sandbox
from ludus.sandbox.processes.session import ProcessSession

CONFIG = SandboxConfig(workers=1)
on_sandbox = pytest.mark.asyncio(loop_scope="module")
"""One event loop for the module, and so one shared sandbox for its tests."""
SUMS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "20 22", "stdout": "42"}]
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left() -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()


async def parts(code: str, cases: Any = SUMS, fence: str = "", **options: Any) -> dict[str, float]:
    metadata = options.pop("metadata", {})
    task = Task.of("Write it.", tests=cases, **metadata)
    reward = Programs(**{"sandbox": CONFIG, "seconds": 1.0, **options})
    return await reward.score(synthetic_episode(task, f"Like so:\n```{fence}\n{code}\n```"), task, {})


async def share(code: str, cases: Any = SUMS, **options: Any) -> float:
    return (await parts(code, cases, **options))["programs"]


PYTHON = "print(sum(map(int, input().split())))"
C = '#include <stdio.h>\nint main(void) { int a, b; scanf("%d %d", &a, &b); printf("%d\\n", a + b); return 0; }'
CPP = (
    "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }"
)
BASH = "read a b; echo $((a + b))"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", PYTHON),
        pytest.param("c", C, marks=needs_gcc),
        pytest.param("c++", CPP, marks=needs_gxx),
        ("bash", BASH),
        ({"file": "p.awk", "run": "awk -f {file}"}, "{ print $1 + $2 }"),
        (
            {"file": "p.sh", "run": ["sh", "./built"], "build": "cp {file} built"},
            "read a b; echo $((a + b))",
        ),
    ],
)
@on_sandbox
async def test_right_programs_win(language: Any, code: str) -> None:
    assert await share(code, language=language) == 1.0
    wrong = [{"stdin": "1 2", "stdout": "4"}, *SUMS]
    assert await share(code, wrong, language=language) == pytest.approx(2 / 3)
    assert await share(code, wrong, language=language, credit="all") == 0.0


@needs_gcc
@on_sandbox
async def test_what_does_not_compile_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = await parts("int main( { return 0; }", language="c", fence="c")
    assert found == {
        "programs": 0.0,
        "programs_built": 0.0,
        "programs_passed": 0.0,
        "programs_total": 2.0,
    }
    assert "does not compile" in caplog.text
    assert (await parts(C, language="c"))["programs_built"] == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "print(3); raise SystemExit(1)",
        "print(3); 1/0",
        "print(3)\nwhile True: pass",
        "import os; os.abort()",
        "import sys\nwhile True: sys.stdout.write('3 ' * 100000)",
        "x = bytearray(10**10)",
        "print('expected output: 3')",
        "import os\nfor root, _, files in os.walk('/home'): print(root, files)",
        "",
    ],
    ids=range(9),
)
@on_sandbox
async def test_the_programs_own_mistakes_score_nothing(code: str) -> None:
    assert await share(code, SUMS[:1]) == 0.0


@on_sandbox
async def test_compiled_and_interpreted_programs_have_limits_too() -> None:
    assert await share("while true; do :; done", SUMS[:1], language="bash", seconds=0.5) == 0.0
    assert (
        await share("echo 3; no_such_command", SUMS[:1], language="bash") == 0.0
    )  # status 127 is its own
    assert await share("echo 3; exit 127", SUMS[:1], language="bash") == 0.0


@on_sandbox
async def test_manners_of_comparing() -> None:
    code, case = "print('0.30000000001  x ')\nprint('y')", [{"stdin": "", "stdout": "0.3 x\ny\n"}]
    assert await share(code, case) == 0.0
    assert await share(code, case, tolerance=1e-6) == 1.0
    assert await share("print('a  b')", [{"stdin": "", "stdout": "a b"}], compare="lines") == 0.0
    assert await share("print('a b ')", [{"stdin": "", "stdout": "a b"}], compare="lines") == 1.0
    assert await share("print('a b ')", [{"stdin": "", "stdout": "a b"}], compare="exact") == 0.0


@on_sandbox
async def test_whole_numbers_are_compared_exactly() -> None:
    case = [{"stdin": "", "stdout": "1000001"}]
    for language, code in (("python", "print({})"), ("bash", "echo {}")):
        assert await share(code.format(1000000), case, language=language, tolerance=1e-6) == 0.0
        assert await share(code.format(1000001), case, language=language, tolerance=1e-6) == 1.0


@on_sandbox
async def test_a_program_that_ends_its_session_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [{"stdin": "", "stdout": ""}] * 2
    assert await share("true", silent, language="bash") == 1.0
    run = ProcessSession.run

    async def ending(session: ProcessSession, argv: Sequence[str], **named: Any) -> Execution:
        if "program" not in argv:
            return await run(session, argv, **named)
        return Execution(Outcome.EXITED, exit_code=0, lost=True)

    monkeypatch.setattr(ProcessSession, "run", ending)
    assert await share("true", silent, language="bash") == 0.0


@on_sandbox
async def test_a_task_may_name_its_language() -> None:
    assert await share(BASH, metadata={"language": "bash"}) == 1.0
    assert await share(BASH, metadata={"language": "bash"}, language="python") == 1.0


@on_sandbox
async def test_what_is_missing_here_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfraError, match="no 'no-such-compiler' in the sandbox"):
        await share("x", language={"file": "p.x", "run": "./p", "build": "no-such-compiler {file}"})
    with pytest.raises(InfraError, match="no 'no-such-runner' in the sandbox"):
        await share("x", language={"file": "p.x", "run": "no-such-runner {file}"})
    with pytest.raises(InfraError, match="no cases"):
        await share("x", ["assert f(1)"])

    async def lost(*args: object, **named: object) -> None:
        raise SessionLost("gone")

    monkeypatch.setattr("ludus.sandbox.Sandbox.session", lost)
    with pytest.raises(InfraError) as caught:
        await share(BASH, language="bash")
    assert caught.value.boundary == "sandbox"


def test_options_are_checked() -> None:
    assert isinstance(build_reward({"reward": "programs", "language": "c++"}), Programs)
    for options in (
        {"language": "cobol"},
        {"language": {"file": "a/b", "run": "x"}},
        {"language": {"run": "x"}},
        {"credit": "half"},
        {"compare": "near"},
        {"langauge": "c"},
    ):
        with pytest.raises(ConfigError):
            build_reward({"reward": "programs", **options})
