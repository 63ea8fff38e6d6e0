"""Sessions in containers. Commands are compared as text; what they do is seen on real engines, where there are.

The image is made of this machine's own files, so that no registry is needed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from container_image import IMAGE, listed, ran
from ludus.core import ConfigError
from ludus.sandbox import (
    CannotFork,
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
    SessionEnded,
    SessionLost,
)
from ludus.sandbox.containers.engines import KubernetesEngine, is_leftover, make_engine, merged, new_name


def config(tier: str = "docker", **settings: Any) -> SandboxConfig:
    return SandboxConfig.parse({"tier": tier, **settings}, "sandbox")


# What is run


def test_a_container_gets_limits_and_nothing_of_this_machine() -> None:
    limits = Limits(memory_mb=512, processes=32, open_files=99)
    given = {
        "cpus": 1.5,
        "workdir": "/testbed",
        "user": "agent",
        "pull": "never",
        "lifetime_seconds": 60,
    }
    argv = make_engine(config(container=given)).start("ludus-x", "repo/image:tag", limits).argv
    text = " ".join(argv)
    for part in (
        "docker run --interactive --rm --name ludus-x --label ludus.session",
        "--pull never --memory 512m --memory-swap 512m --cpus 1.5 --pids-limit 32 --ulimit nofile=99:99",
        "--network none --cap-drop ALL --security-opt no-new-privileges --workdir /testbed --user agent",
        "--entrypoint bash repo/image:tag -c",
    ):
        assert part in text
    assert not {"-v", "--volume", "--mount", "--privileged", "--env", "--publish"} & set(argv)
    assert argv[-1] == "60"


def test_network_and_rights_only_on_demand() -> None:
    engine = make_engine(config("podman", network=True, container={"sudo": True}))
    argv = engine.start("ludus-x", "image", Limits()).argv
    assert argv[0] == "podman" and "--network" not in argv and "--cap-drop" not in argv


@pytest.mark.parametrize("image", ["--privileged", "-v/:/host", "", "a b", "a\n", "$(id)"])
def test_an_image_is_no_option(image: str) -> None:
    """Data sets name images; the engine's command line would take these for something else."""
    with pytest.raises(ConfigError, match="is no name of an image"):
        make_engine(config()).start("ludus-x", image, Limits())
    named = "registry.example.com:5000/Lab/image_1:v1.0@sha256:0123"
    assert named in make_engine(config()).start("ludus-x", named, Limits()).argv


def test_the_program_may_be_another() -> None:
    engine = make_engine(
        config("podman", container={"program": ["sudo", "podman", "--runtime", "runc"]})
    )
    assert engine.execute("n", ["ls"]).argv == [
        "sudo", "podman", "--runtime", "runc", "exec", "--interactive", "n", "ls"
    ]  # fmt: skip


def test_a_job_of_kubernetes(tmp_path: Path) -> None:
    template = tmp_path / "pod.json"
    template.write_text(
        json.dumps({
            "nodeSelector": {"pool": "x"},
            "restartPolicy": "Always",
            "containers": [{"name": "mine", "env": [{"name": "A", "value": "1"}]}],
        })
    )  # fmt: skip
    given = {
        "namespace": "lab",
        "template": str(template),
        "workdir": "/testbed",
        "lifetime_seconds": 1800,
    }
    engine = make_engine(config("kubernetes", container=given))
    assert isinstance(engine, KubernetesEngine)
    made = engine.start("ludus-1", "image", Limits(memory_mb=2048, disk_mb=4096))
    assert made.argv == ["kubectl", "--namespace", "lab", "create", "-f", "-"]
    job = json.loads(made.stdin)
    assert job["kind"] == "Job" and job["metadata"]["namespace"] == "lab"
    assert job["spec"]["activeDeadlineSeconds"] == 1800 and job["spec"]["backoffLimit"] == 0
    assert job["spec"]["ttlSecondsAfterFinished"] == 60
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "x"} and pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert "volumes" not in pod and "hostNetwork" not in pod
    [container] = pod["containers"]
    assert container["name"] == "session" and container["env"] == [{"name": "A", "value": "1"}]
    assert container["resources"] == {
        "requests": {"cpu": "1", "memory": "2048Mi"},
        "limits": {"cpu": "2", "memory": "4096Mi", "ephemeral-storage": "4096Mi"},
    }, "one processor and 2 GB, elastic to 2 and 4"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    policy = engine.prepare()
    assert policy is not None and json.loads(policy.stdin)["spec"]["policyTypes"] == [
        "Ingress",
        "Egress",
    ]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert json.loads(policy.stdin)["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    shown = [
        "kubectl",
        "--namespace",
        "lab",
        "exec",
        "--stdin",
        "job/n",
        "--container",
        "session",
        "--",
        "ls",
    ]
    assert engine.execute("n", ["ls"]).argv == shown
    assert "--cascade=background" in engine.remove(["a", "b"]).argv


def test_manifests_are_valid_by_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    engine = KubernetesEngine(config("kubernetes", container={"user": "1000", "workdir": "/w"}))
    policy = engine.prepare()
    assert policy is not None
    for manifest in (engine.job("ludus-1", "image", Limits()), json.loads(policy.stdin)):
        validate.validate(manifest, "1.32", strict=True)


def test_tables_are_merged_and_ours_win() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]}) == {
        "a": {"b": 1, "c": 3},
        "d": [2],
    }


def test_containers_of_dead_processes_are_leftovers() -> None:
    own = new_name()
    assert re.fullmatch(r"ludus-[0-9a-f]{8}-\d+-\d+-[0-9a-f]{8}", own) and not is_leftover(own)
    head, pid, _, tail = own.rsplit("-", 3)
    assert is_leftover(f"{head}-{pid}-1-{tail}"), "another process had that number"
    assert is_leftover(f"{head}-{2**22 - 1}-77-{tail}")
    assert not is_leftover(f"ludus-00000000-{2**22 - 1}-77-{tail}"), "another machine's"
    assert not is_leftover("somebody-elses")


# What is refused


def test_settings_that_containers_do_not_have() -> None:
    with pytest.raises(ConfigError, match=r'sandbox.readable is for tier = "process".*image'):
        Sandbox(config(readable=["/etc"]))
    with pytest.raises(ConfigError, match="tier"):
        config("dockr")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        KubernetesEngine(config("kubernetes", container={"template": "/no/such.json"})).job(
            "n", "i", Limits()
        )


async def test_an_engine_that_is_not_there_is_named() -> None:
    box = Sandbox(config(container={"program": ["no-such-engine"], "image": "x"}))
    with pytest.raises(
        SandboxUnavailable, match=r"needs the program 'no-such-engine'.*tier = \"process\""
    ):
        await box.session()
    box = Sandbox(config(container={"program": ["false"], "image": "x"}))
    with pytest.raises(
        SandboxUnavailable, match=r"sandbox.tier = \"docker\": false version .* failed.*running"
    ):
        await box.session()
    async with Sandbox() as processes:
        with pytest.raises(SandboxUnavailable, match=r"image 'x' needs a container"):
            await processes.session(image="x")


# Real engines


@pytest.fixture
async def box(container_engine: tuple[str, list[str]]) -> AsyncIterator[Sandbox]:
    tier, program = container_engine
    container = {"program": program, "image": IMAGE, "workdir": "/work", "pull": "never"}
    limits = {"memory_mb": 256, "processes": 48, "wall_seconds": 10}
    async with Sandbox(config(tier, container=container, limits=limits)) as made:
        yield made
        assert made.config.container.image == IMAGE
    assert not [name for name in listed(program) if f"-{os.getpid()}-" in name], "nothing is left"


@pytest.mark.worlds
async def test_a_session_is_what_it_is_in_processes(box: Sandbox) -> None:
    """The same calls and the same answers as on the tier "process"."""
    async with await box.session(files={"a/b.txt": "milk", "c.bin": bytes(range(256))}) as session:
        assert (await session.shell("pwd; cat a/b.txt")).stdout == "/work\nmilk"
        await session.shell("cd a && export WHO=me && f() { echo f-$WHO; }")
        assert (await session.shell("f; echo ${PWD##*/}")).stdout == "f-me\na\n"
        assert await session.read("c.bin") == bytes(range(256))
        assert await session.read("a/b.txt", max_bytes=2) == b"mi"
        await session.write("d/e.txt", "über")
        assert await session.read("/work/d/e.txt") == "über".encode()
        with pytest.raises(FileNotFoundError):
            await session.read("none")
        with pytest.raises(IsADirectoryError):
            await session.read("a")
        assert (await session.run(["cat"], stdin="ß\n")).stdout == "ß\n"
        failed = await session.shell("echo out; echo err >&2; exit 3")
        assert (failed.outcome, failed.exit_code, failed.stdout, failed.stderr) == (
            Outcome.RAISED, 3, "out\n", "err\n",
        )  # fmt: skip
        slow = await session.shell("echo before; sleep 60", wall_seconds=0.5)
        assert slow.outcome is Outcome.TIMEOUT and slow.stdout == "before\n" and slow.stderr == ""
        started = time.monotonic()
        assert (await session.shell("sleep 60 & echo on")).stdout == "on\n"
        assert time.monotonic() - started < 30, "a process in the background holds nothing up"
        assert (await session.shell("x" * 300_000)).outcome is Outcome.RAISED
        with pytest.raises(CannotFork):
            await session.fork()


@pytest.mark.worlds
async def test_python_keeps_its_state(box: Sandbox) -> None:
    async with await box.session() as session:
        await session.python("import math\nradius = 2")
        assert (await session.python("print('x'); round(math.pi * radius**2, 2)")).text() == "x\n12.57"
        assert (await session.python("input()", stdin="hey\n")).value == "'hey'"
        assert "ZeroDivisionError" in (await session.python("1/0")).text()
        assert (await session.python("while True: pass", wall_seconds=0.5)).outcome is Outcome.TIMEOUT
        assert (await session.python("radius")).value == "2", "an interrupt leaves the state"
        gone = await session.python("import os; os._exit(7)")
        assert (gone.outcome, gone.exit_code) == (Outcome.EXITED, 7)
        assert (await session.python("'radius' in dir()")).value == "False"
    assert (await box.python("6 * 7")).value == "42"


@pytest.mark.worlds
async def test_limits_and_isolation(box: Sandbox) -> None:
    async with await box.session() as session:
        status = (
            await session.shell("grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status")
        ).stdout.split()
        assert status[1::2] == ["0000000000000000", "1", "2"]
        network = "import socket; socket.create_connection(('1.1.1.1', 80), 2)"
        assert "unreachable" in (await session.run(["python3", "-c", network])).stderr
        assert (await session.shell("cat /proc/net/dev | grep -vc lo:")).stdout == "2\n"
        assert (await session.shell(f"cat {__file__}")).outcome is Outcome.RAISED, (
            "no file of this machine"
        )
        memory = await session.run(["python3", "-c", "x = bytearray(1 << 30)"])
        assert memory.outcome is Outcome.MEMORY and session.alive
        many = await session.shell("for i in $(seq 200); do sleep 30 & done", wall_seconds=3)
        assert "Resource temporarily unavailable" in many.text()
        await session.shell(
            "true"
        )  # there may be no room for it; the container's first process makes some
        assert (await session.shell("echo well")).stdout == "well\n"
        await session.shell("kill -9 -1")
        assert (await session.shell("echo well")).stdout == "well\n"


@pytest.mark.worlds
async def test_too_much_output_ends_the_session_by_its_own_fault(box: Sandbox) -> None:
    for source in (
        "/dev/zero",
        "/dev/urandom",
    ):  # more than once: where reading stops is a matter of timing
        async with await box.session() as session:
            assert (await session.run(["cat", source])).outcome is Outcome.OUTPUT
    async with await box.session() as session:
        flood = await session.run(["cat", "/dev/zero"])
        assert flood.outcome is Outcome.OUTPUT and flood.lost and flood.truncated
        assert session.was_ended_inside and not session.alive
        assert (await session.shell("echo on")).lost
        with pytest.raises(SessionEnded):
            await session.read("x")


@pytest.mark.worlds
async def test_a_container_that_somebody_removes_is_no_fault_of_the_code(
    box: Sandbox, container_engine: tuple[str, list[str]]
) -> None:
    async with await box.session() as session:
        holder = session._holder  # type: ignore[attr-defined]
        holder.stdin.close()  # as if it had reached the end of its life
        await holder.wait()
        with pytest.raises(SessionLost):
            await session.shell("true")
        assert not session.was_ended_inside
    with pytest.raises(SandboxError, match="no-such-image"):
        await box.session(image="localhost/no-such-image:1")


_DIES = """
import asyncio, os, signal, sys
from ludus.sandbox import Sandbox, SandboxConfig
async def main():
    box = Sandbox(SandboxConfig.parse({"tier": sys.argv[1], "container": {"image": sys.argv[2],
        "program": sys.argv[3:], "pull": "never"}}, "x"))
    session = await box.session()
    await session.shell("sleep 1000 &")
    print(session.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def died(tier: str, program: list[str]) -> str:
    """The name of the container of a process that was killed."""
    argv = [sys.executable, "-c", _DIES, tier, IMAGE, *program]
    said = subprocess.run(argv, capture_output=True, text=True)
    assert said.stdout.startswith("ludus-"), said.stderr
    return said.stdout.strip()


@pytest.mark.worlds
async def test_containers_end_with_us(container_engine: tuple[str, list[str]]) -> None:
    tier, program = container_engine
    name = died(tier, program)
    for _ in range(100):
        if name not in listed(program):
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"{name} is still there")


@pytest.mark.worlds
async def test_leftovers_are_removed_at_the_next_start(container_engine: tuple[str, list[str]]) -> None:
    tier, program = container_engine
    head, _, _, tail = new_name().rsplit("-", 3)
    old, other = f"{head}-{2**22 - 1}-7-{tail}", f"ludus-00000000-1-7-{tail}"
    for name in (old, other):
        make = ["run", "-d", "--name", name, "--label", "ludus.session", "--network", "none"]
        more = [
            "--ulimit",
            "nofile=99:99",
            "--ulimit",
            "nproc=999:999",
            "--entrypoint",
            "sleep",
            IMAGE,
            "60",
        ]
        ran(*program, *make, *more)
    async with Sandbox(config(tier, container={"program": program, "image": IMAGE})):
        names = listed(program)
    ran(*program, "rm", "-f", other)
    assert old not in names and other in names
