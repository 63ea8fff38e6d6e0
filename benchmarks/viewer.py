"""How fast is `ludus view` on a hundred thousand episodes? One command:

    python benchmarks/viewer.py

It writes synthetic episodes by the store that training uses, starts the real server as a process, and asks
for pages by HTTP: the first page after the start, then filters of every kind, sorted and paged at random.
Beside it stands the time of DuckDB straight on the Parquet files, without the server's table, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

from ludus.core import (
    Boundary,
    Failure,
    Fault,
    FinishReason,
    Group,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TimeSpan,
    TokenSequence,
    ToolCall,
    Trajectory,
    VersionSpan,
)
from ludus.observe import RunWriter, rollout_metrics

WORDS = (
    "the", "safe", "dial", "turns", "red", "green", "blue", "to", "number", "until", "it", "clicks", "and",
    "door", "opens", "while", "agent", "thinks", "about", "what", "is", "left", "because", "search", "found",
)  # fmt: skip
TOOLS = ("search", "python", "open", "turn")


def episode(draw: random.Random, task: int, attempt: int, step: int) -> Trajectory:
    """A plausible episode: 2 to 6 turns, a few hundred tokens, calls, faults, failures."""

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=words))

    segments = [Segment(SegmentKind.PROMPT, [draw.randrange(32_000) for _ in range(60)])]
    messages = [Message("system", "You open safes."), Message("user", f"Task {task}: {text(20)}")]
    spans, clock = [], 0.0
    for turn in range(draw.randint(2, 6)):
        call = ToolCall(draw.choice(TOOLS), {"query": text(4), "n": turn}, id=f"call_{turn}_0")
        fault = draw.random() < 0.08
        size = draw.randint(12, 60)
        action = Segment(
            SegmentKind.ACTION,
            [draw.randrange(32_000) for _ in range(size)],
            [-draw.random() for _ in range(size)],
            versions=(VersionSpan(0, step),),
            finish=FinishReason.STOP_TOKEN,
            calls=(call,),
            faults=(Fault.TOOL_TIMEOUT,) if fault else (),
            faulted=(call.name,) if fault else (),
            seconds=0.2,
            advantages=[draw.gauss(0, 1)] * size,
            entropies=[draw.random() for _ in range(size)],
        )
        segments += [
            action,
            Segment(SegmentKind.OBSERVATION, [draw.randrange(32_000) for _ in range(30)]),
        ]
        messages += [Message("assistant", text(30), (call,)), Message("tool", text(25), name=call.name)]
        spans += [
            TimeSpan("generate", clock, 0.2, "", turn),
            TimeSpan("tool", clock + 0.2, 0.1, call.name, turn),
        ]
        clock += 0.3
    lost = draw.random() < 0.02
    success = draw.random() < 0.2 + 0.6 * step / 200
    if draw.random() < 0.001:
        messages.append(Message("assistant", "a needle in the haystack"))
    return Trajectory(
        Task.of(f"Task {task}: open the safe", target=task % 10, id=f"task-{task}"),
        [TokenSequence(segments)],
        messages,
        answer=str(draw.randrange(10)),
        stop=StopReason.FAILED
        if lost
        else draw.choice([StopReason.ANSWERED] * 4 + [StopReason.MAX_TURNS]),
        failure=Failure(Boundary.TOOL, "TimeoutError", "the tool server does not answer", 2)
        if lost
        else None,
        rewards={} if lost else {"success": float(success), "format": draw.random() / 10},
        reward=None if lost else float(success) + draw.random() / 10,
        attempt=attempt,
        seed=draw.getrandbits(60),
        seconds={"generate": 1.0, "tools": 0.3, "total": clock},
        spans=spans,
    )


def write_runs(root: Path, episodes: int, runs: int = 4, step_episodes: int = 256) -> int:
    """Runs of steps of 32 groups of 8, with metrics; how many episodes there are."""
    steps = -(-episodes // (runs * step_episodes))
    written = 0
    for number in range(runs):
        draw = random.Random(number)
        with RunWriter.create(
            root / f"synthetic-{number:03d}", {"name": "synthetic", "seed": number}
        ) as run:
            for step in range(1, steps + 1):
                groups = []
                for _ in range(step_episodes // 8):
                    task = draw.randrange(2_000)
                    played = [episode(draw, task, attempt, step) for attempt in range(8)]
                    groups.append(Group(played[0].task, played))
                run.write_groups(groups, step)
                run.log(step, rollout_metrics(groups))
                written += step_episodes
    return written


FILTERS = (
    "", "run=synthetic-001", "first_step=20&last_step=40", "task=task-77", "task=task-1*", "least_reward=0.9",
    "most_reward=0.1&success=no", "stop=max_turns", "failure=any", "failure=tool", "tool=search",
    "fault=tool_timeout", "faulted=python", "text=needle in the haystack", "text=green blue", "text=zzzz",
    "success=yes&tool=open&text=until", "run=synthetic-002&text=door opens&sort=reward",
    "split=train&least_reward=0.5&fault=any",
)  # fmt: skip
NEEDLE = "list_contains(list_transform(messages, lambda m: m.content LIKE '%needle%'), true)"
SORTS = ("step", "reward", "turns", "tokens", "seconds", "task")


def get(address: str, path: str) -> tuple[float, dict]:
    started = time.perf_counter()
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        body = answer.read()
    return time.perf_counter() - started, json.loads(body) if path.startswith("/api") else {}


def memory(pid: int) -> int:
    """Resident megabytes."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) // 1024


def straight(root: Path, condition: str) -> float:
    """Seconds of the same kind of query by DuckDB on the files themselves."""
    import duckdb

    with duckdb.connect(config={"threads": 2}) as database:
        started = time.perf_counter()
        database.execute(
            f"SELECT task_id, reward, step FROM read_parquet('{root}/*/trajectories/*.parquet') "
            f"WHERE {condition} ORDER BY step DESC LIMIT 50"
        ).fetchall()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and use what is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        root = options.folder or Path(made)
        root.mkdir(parents=True, exist_ok=True)
        if not any(root.iterdir()):
            started = time.perf_counter()
            count = write_runs(root, options.episodes)
            print(f"wrote {count} episodes in {time.perf_counter() - started:.0f} s")
        size = sum(file.stat().st_size for file in root.rglob("*.parquet"))
        print(f"Parquet: {size / 1e6:.0f} MB in {len(list(root.rglob('*.parquet')))} files")
        measure(root, options.queries)


def measure(root: Path, queries: int) -> None:
    command = [sys.executable, "-m", "ludus", "view", str(root), "--port", "0"]
    started = time.perf_counter()
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+?(?=/?\s*$)", server.stdout.readline())[0]
        up = time.perf_counter() - started
        page = get(address, "/")[0] + get(address, "/api/runs")[0]
        first, found = get(address, "/api/episodes?limit=50")
        rows, waiting = len(found["episodes"]), found["index"]["waiting"]
        print(f"server up after {up:.2f} s; first page {1000 * (page + first):.0f} ms ({rows} episodes, "
              f"{waiting} files to go)")  # fmt: skip
        while get(address, "/api/episodes?limit=1")[1]["index"]["waiting"]:
            time.sleep(0.5)
        print(
            f"all files read after {time.perf_counter() - started:.1f} s, memory {memory(server.pid)} MB"
        )
        draw, times = random.Random(0), []
        for number in range(queries):
            chosen = FILTERS[number % len(FILTERS)]
            more = {"sort": draw.choice(SORTS), "offset": draw.choice([0, 0, 50, 1000]), "limit": 50}
            given = chosen if "sort=" in chosen else f"{chosen}&{urllib.parse.urlencode(more)}"
            seconds, found = get(address, "/api/episodes?" + given.replace(" ", "%20"))
            times.append((seconds, given, found["summary"]["episodes"]))
        ordered = sorted(seconds for seconds, _, _ in times)
        p95 = ordered[int(0.95 * len(ordered))]
        print(f"{queries} filters: p50 {1000 * statistics.median(ordered):.0f} ms, p95 {1000 * p95:.0f} ms, "
              f"slowest {1000 * ordered[-1]:.0f} ms")  # fmt: skip
        for seconds, given, episodes in sorted(times, reverse=True)[:5]:
            print(f"    {1000 * seconds:5.0f} ms  {episodes:6d} episodes  {given}")
        opened = [
            get(address, f"/api/episode/{row['run']}/{row['file']}/{row['row']}")[0]
            for row in get(address, "/api/episodes?limit=20&sort=reward")[1]["episodes"]
        ]
        print(
            f"one episode: median {1000 * statistics.median(opened):.0f} ms; memory {memory(server.pid)} MB"
        )
        for condition in (
            "reward >= 0.9",
            NEEDLE,
        ):
            ours = [s for s, given, _ in times if ("needle" in given) == ("needle" in condition)]
            theirs = straight(root, condition)
            print(f"straight on the files, {condition[:20]}...: {1000 * theirs:.0f} ms, "
                  f"{theirs / statistics.median(ours):.1f} times the table's")  # fmt: skip
    finally:
        server.terminate()
        server.wait(20)


if __name__ == "__main__":
    main()
