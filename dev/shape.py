"""Prints the shape of the source tree: `make shape`. Numbers to look at, not limits to meet.

Hops are counted by running a tiny model on the CPU: the source files in which a function is called while a
request is generated (a token), a trajectory is scored (a reward), a task becomes a scored group (a task).
`-v` lists them.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import statistics
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(__file__).parent.parent / "src" / "ludus"


def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name."""
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(file.read_text())
    return found


def importers(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """For each module, which modules import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found[inner if inner in trees else node.module].add(name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.name].add(name)
    return found


def shared_class_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public class names that are defined in more than one module."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: places for name, places in found.items() if len(places) > 1}


@contextlib.contextmanager
def files_run() -> Iterator[set[str]]:
    """The source files whose functions are called meanwhile, in threads that start meanwhile too."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            found.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


async def hops() -> dict[str, set[str]]:
    """The files that a token, a reward and a task pass through."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import ludus
    from ludus.core import ByteTokenizer, Sampling
    from ludus.engine import EmbeddedEngine
    from ludus.rewards import Scorer
    from ludus.rollouts import Budgets, Renderer, Rollout, load_format
    from ludus.tools import LocalTools

    @ludus.reward
    def length(trajectory: ludus.Trajectory) -> float:
        return float(len(trajectory.answer or ""))

    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    engine = EmbeddedEngine(LlamaForCausalLM(config), tokenizer)
    scorer = Scorer([length])
    rollout = Rollout(
        engine,
        Renderer(tokenizer, load_format("hermes")),
        scorer,
        LocalTools([]),
        budgets=Budgets(max_turns=1, max_turn_tokens=4),
    )
    task = ludus.Task.of("Say something.")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        with files_run() as token:
            await engine.generate([1, 2, 3], Sampling(max_tokens=2))
        with files_run() as whole:
            (group,) = [group async for group in rollout.groups([task], seed=0)]
        with files_run() as reward:
            await scorer.score(replace(group.trajectories[0], reward=None, rewards={}))
    return {"token": token, "reward": reward, "task": whole | token | reward}


def main() -> None:
    trees = modules()
    files = sorted(SOURCE.rglob("*.py"))
    lines = [len(file.read_text().splitlines()) for file in files]
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    sizes = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    used = importers(trees)
    widest, width = Counter(str(f.parent.relative_to(SOURCE)) for f in files).most_common(1)[0]
    rooms: dict[str, list[int]] = defaultdict(list)
    for file, count in zip(files, lines, strict=True):
        if file.parent != SOURCE:
            rooms[file.relative_to(SOURCE).parts[0]].append(count)
    shared = shared_class_names(trees)
    rows: list[tuple[str, object]] = [
        ("files", len(files)),
        ("lines", sum(lines)),
        ("median lines of a file", statistics.median(lines)),
        ("files under 40 lines", sum(count < 40 for count in lines)),
        ("mean lines of a function", round(statistics.mean(sizes), 1)),
        ("modules with one importer", sum(len(used[name]) == 1 for name in trees)),
        ("widest folder", f"{widest} ({width} files)"),
        ("class names used twice", f"{len(shared)} {sorted(shared) or ''}".strip()),
    ]
    for what, passed in asyncio.run(hops()).items():
        rows.append((f"files that a {what} passes", len(passed)))
        if "-v" in sys.argv:
            rows += [("", name) for name in sorted(passed)]
    for name, value in rows:
        print(f"{name:28} {value}")
    print()
    for room, counts in sorted(rooms.items()):
        print(f"{room:12} {len(counts):4} files {sum(counts):7,} lines")


if __name__ == "__main__":
    main()
