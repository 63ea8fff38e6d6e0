"""The tool server under load: isolated Python executions over HTTP, next to what else one could do.

    python benchmarks/tool_server.py                     # about three minutes
    python benchmarks/tool_server.py --quick             # half a minute
    python benchmarks/tool_server.py --preload numpy --preload sympy
    python benchmarks/tool_server.py --verltool CHECKOUT --verltool-python PYTHON # pairs with VerlTool's server

Every request is one program in a fresh sandbox, sent with an idempotency key and repeated when it was not
taken. Compared in the same run with fresh interpreters (`python3 -c`) behind a semaphore, and with bubblewrap
and firejail where they are installed. `--verltool` runs VerlTool's real server instead, in turns with ours.
Memory is the proportional set size of the server and all it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

HELLO = "print('hello world')"
SLEEP = "import time; time.sleep({seconds:.3f}); print('hello world')"
CONCURRENCY = (64, 256, 1024, 4096)
PATIENCE = 300.0


@dataclass
class Measured:
    """One load: seconds of each request, and what went wrong."""

    label: str
    concurrency: int
    seconds: list[float] = field(default_factory=list)
    retries: int = 0
    failures: int = 0
    wall: float = 0.0
    memory_mb: float = 0.0

    def row(self) -> str:
        ordered = sorted(self.seconds) or [0.0]
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        rate = len(self.seconds) / self.wall
        cells = [
            self.label, f"{self.concurrency:,}", f"{len(self.seconds):,}", f"{rate:.0f}",
            f"{statistics.median(ordered):.3f}", f"{p99:.3f}", f"{ordered[-1]:.3f}",
            str(self.retries), str(self.failures), f"{self.memory_mb:.0f}" if self.memory_mb else "",
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEAD = (
    "| what | concurrent | done | per second | p50 s | p99 s | max s | not taken, repeated | failed | MB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
Once = Callable[[str, Measured], Awaitable[bool]]


async def load(label: str, concurrency: int, count: int, once: Once, programs: list[str]) -> Measured:
    """`count` requests, `concurrency` of them at a time."""
    measured = Measured(label, concurrency)
    work = iter(programs[:count])

    async def worker() -> None:
        for program in work:
            started = time.perf_counter()
            if await once(program, measured):
                measured.seconds.append(time.perf_counter() - started)
            else:
                measured.failures += 1

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(min(concurrency, count))))
    measured.wall = time.perf_counter() - started
    return measured


def over_http(client: aiohttp.ClientSession, address: str) -> Once:
    """One execution by our server, with a key, repeated when it was not taken."""

    async def once(program: str, measured: Measured) -> bool:
        body = {"key": uuid.uuid4().hex, "name": "python", "arguments": {"code": program}}
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                async with client.post(f"{address}/v1/calls", json=body) as answer:
                    if answer.status == 200:
                        return "hello world" in (await answer.json())["content"]
                    if answer.status != 503:
                        return False
                    pause = float(answer.headers.get("Retry-After", "1"))
            except aiohttp.ClientError:
                pause = 0.1
            measured.retries += 1
            await asyncio.sleep(random.uniform(0, pause))
        return False

    return once


def by_process(command: list[str], at_once: int) -> Once:
    """One execution by a fresh process; only so many at a time, as anything else would thrash."""
    places = asyncio.Semaphore(at_once)

    async def once(program: str, measured: Measured) -> bool:
        async with places:
            process = await asyncio.create_subprocess_exec(
                *command, program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            said, _ = await process.communicate()
            return b"hello world" in said

    return once


def rivals() -> dict[str, list[str]]:
    """Ways to run a program in a fresh process, those that are installed here."""
    # the system's: it starts fastest, and lies where bubblewrap and firejail can see it
    python = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
    found = {"fresh python3 -c": [python, "-c"]}
    if shutil.which("bwrap"):
        roots = [
            word for path in ("/usr", "/bin", "/lib", "/lib64") for word in ("--ro-bind-try", path, path)
        ]
        found["bubblewrap"] = [
            "bwrap", *roots, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all",
            "--die-with-parent", python, "-I", "-S", "-c",
        ]  # fmt: skip
    if shutil.which("firejail"):
        quiet = ["firejail", "--quiet", "--private", "--net=none", "--seccomp"]
        found["firejail"] = [*quiet, python, "-c"]
    return found


def start_server(preload: list[str]) -> tuple[subprocess.Popen[str], str]:
    """Our server with the sandboxed `python` tool, on a free port."""
    sandbox = f"sandbox = {{ preload = {json.dumps(preload)} }}"
    settings = Path(tempfile.mkdtemp(prefix="ludus-bench-"), "tools.toml")
    settings.write_text(f'tools = ["python"]\n{sandbox}\n')
    command = [sys.executable, "-c", "from ludus.cli.main import run; run()", "serve", "tools"]
    process = subprocess.Popen(
        [*command, "--config", str(settings), "--quiet", "--concurrency", "128", "--queue", "8192"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "LUDUS_TOKEN": ""},
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["address"]


def family(pid: int) -> list[int]:
    """A process and everything below it."""
    found, place = [pid], 0
    while place < len(found):
        try:
            for task in Path(f"/proc/{found[place]}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            pass  # it ended while we looked
        place += 1
    return found


def memory_of(pid: int) -> float:
    """Megabytes of a process and everything below it, shared pages divided."""
    total = 0
    for one in family(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):
            pass  # it ended while we looked
    return total / 1024


async def measure(
    process: subprocess.Popen[str],
    label: str,
    concurrency: int,
    count: int,
    once: Once,
    programs: list[str],
) -> Measured:
    """A load, with the highest memory seen during it."""
    peak = 0.0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, await asyncio.to_thread(memory_of, process.pid))
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    try:
        measured = await load(label, concurrency, count, once, programs)
    finally:
        watching.cancel()
    measured.memory_mb = peak
    print(measured.row(), flush=True)
    return measured


async def ours(preload: list[str], quick: bool) -> dict[int, float]:
    """Every load on our server; executions per second of the first kind, by concurrency."""
    process, address = start_server(preload)
    rates: dict[int, float] = {}
    name = "ludus" + (f" ({' and '.join(preload)} preloaded)" if preload else "")
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=PATIENCE)
        ) as client:
            once = over_http(client, address)
            await load("warm up", 8, 32, once, [HELLO] * 32)
            for concurrency in CONCURRENCY[: 2 if quick else None]:
                count = max(1024, concurrency) if not quick else 512
                measured = await measure(
                    process, f"{name}, hello", concurrency, count, once, [HELLO] * count
                )
                rates[concurrency] = len(measured.seconds) / measured.wall
            draw = random.Random(0)
            for concurrency in CONCURRENCY[: 2 if quick else None]:
                count = concurrency if not quick else 256
                programs = [SLEEP.format(seconds=draw.uniform(0.1, 1.0)) for _ in range(count)]
                await measure(process, f"{name}, sleep 0.1-1 s", concurrency, count, once, programs)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    return rates


async def theirs(quick: bool) -> dict[str, float]:
    """Fresh processes, two for each core at a time."""
    rates: dict[str, float] = {}
    for label, command in rivals().items():
        count = 128 if quick else 384
        once = by_process(command, 2 * (os.cpu_count() or 1))
        measured = await load(label, 64, count, once, [HELLO] * count)
        rates[label] = len(measured.seconds) / measured.wall
        print(measured.row(), flush=True)
    return rates


def cpu_seconds(pid: int) -> float:
    """Processor time of a process, of everything below it, and of what they have collected."""
    ticks = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked; who collected it counts it
        ticks += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return ticks / os.sysconf("SC_CLK_TCK")


def start_verltool(checkout: Path, python: str) -> subprocess.Popen[str]:
    command = [python, "-m", "verl_tool.servers.serve", "--host", "127.0.0.1", "--port", "30815"]
    tool = ["--tool_type", "python_code", "--workers_per_tool", "64"]
    # the programs that it runs are started as `python3`: the system's, which starts fastest
    path = f"/usr/bin:/bin:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [*command, *tool], cwd=checkout, text=True, env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def by_verltool(client: aiohttp.ClientSession) -> Once:
    """One execution by VerlTool's server."""

    async def once(program: str, measured: Measured) -> bool:
        code = f"<python>{program}</python>"
        body = {"trajectory_ids": [uuid.uuid4().hex], "actions": [code], "extra_fields": [{}]}
        try:
            async with client.post("http://127.0.0.1:30815/get_observation", json=body) as answer:
                return "hello world" in await answer.text()
        except aiohttp.ClientError:
            return False

    return once


async def pairs(checkout: Path, python: str, rounds: int, concurrencies: tuple[int, ...]) -> None:
    """Both servers at the same loads, in turns: what disturbs one of a pair disturbs the other as well."""
    ours, address = start_server([])
    theirs = start_verltool(checkout, python)
    print("| concurrent | ludus/s | ms CPU | VerlTool/s | ms CPU | ratio | ratio of CPU |")
    print("|---|---|---|---|---|---|---|", flush=True)
    try:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=PATIENCE)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
            sides = {ours.pid: over_http(client, address), theirs.pid: by_verltool(client)}
            for _ in range(180):
                if await sides[theirs.pid](HELLO, Measured("", 1)):
                    break
                await asyncio.sleep(1)
            await load("warm up", 8, 32, sides[ours.pid], [HELLO] * 32)
            for concurrency in concurrencies:
                ratios = []
                # as many for both: at the end of a load fewer and fewer are under way
                count = max(512, concurrency)
                for _ in range(rounds):
                    rates, costs = [], []
                    for pid, once in sides.items():
                        before = cpu_seconds(pid)
                        measured = await load("", concurrency, count, once, [HELLO] * count)
                        assert not measured.failures, f"{measured.failures} of {count} failed"
                        rates.append(count / measured.wall)
                        costs.append(1000 * (cpu_seconds(pid) - before) / count)
                    ratios.append(rates[0] / rates[1])
                    cells = f"{rates[0]:.0f} | {costs[0]:.1f} | {rates[1]:.1f} | {costs[1]:.0f}"
                    ratio = f"{ratios[-1]:.1f} | {costs[1] / costs[0]:.1f}"
                    print(f"| {concurrency:,} | {cells} | {ratio} |", flush=True)
                print(f"median ratio at {concurrency:,}: {statistics.median(ratios):.1f}", flush=True)
    finally:
        for process in (ours, theirs):
            process.send_signal(signal.SIGTERM)
            process.wait(60)


async def main(options: argparse.Namespace) -> None:
    if options.verltool is not None:
        concurrencies = (64, 256) if options.quick else (64, 256, 1024)
        await pairs(options.verltool, options.verltool_python, options.rounds, concurrencies)
        return
    print(HEAD, flush=True)
    rates = await ours(options.preload, options.quick)
    others = await theirs(options.quick)
    print()
    for label, rate in others.items():
        ratio = f"{rates[256] / rate:.1f} times" if rate else "it ran nothing here"
        print(f"ludus at 256 concurrent / {label}: {ratio}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preload", action="append", default=[], help="a module to preload; repeatable")
    parser.add_argument("--quick", action="store_true", help="fewer requests, two loads")
    parser.add_argument(
        "--verltool", type=Path, help="a checkout of VerlTool: only pairs with its server"
    )
    parser.add_argument(
        "--verltool-python", default=sys.executable, help="an interpreter that has its dependencies"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs for each load")
    asyncio.run(main(parser.parse_args()))
