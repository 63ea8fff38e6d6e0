"""Prints the shape of the source tree: `make shape`. Numbers to look at, not limits to meet.

Walks are counted by running tiny ones on the CPU (`walks.py`); `-v` lists their files. `--weights` also
trains the quickstart's recipe and prints a hash of its weights, and of the weights that a replay of its groups
gives: one thread and one episode at a time, because what is batched together changes last bits, and a
short RL. Hashes depend on the processor: compare them on one machine.
"""

from __future__ import annotations

import ast
import hashlib
import statistics
import sys
import tempfile
from collections import Counter, defaultdict

from walks import ROOT, SOURCE, walks


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


def weights() -> list[tuple[str, str]]:
    """Hashes of the quickstart's weights, trained and replayed."""
    import ludus
    from ludus.training.config.recipe import load_recipe

    with tempfile.TemporaryDirectory() as folder:
        settings = ["threads=1", "max_in_flight=1", "rl.steps=4", "rl.tasks=8", "evaluation.tasks=8"]
        settings += ["run.trajectories_every=1", f"run.folder={folder + '/run'!r}"]
        recipe = load_recipe(ROOT / "recipes" / "safe.toml", settings)
        trained = ludus.train(recipe, progress=False)
        replayed = ludus.train(
            replay=trained.run.path, run={"folder": f"{folder}/replay"}, progress=False
        )
        files = [result.model / "model.safetensors" for result in (trained, replayed)]
        hashes = [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files]
    return [("weights after quickstart", hashes[0]), ("weights after its replay", hashes[1])]


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
    alone = [name for name in trees if len(used[name]) == 1]
    length = dict(zip(trees, lines, strict=True))
    folders = Counter(str(f.parent.relative_to(SOURCE)) for f in files)
    widest, width = folders.most_common(1)[0]
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
        ("modules with one importer", len(alone)),
        ("of them under 150 lines", sum(length[name] < 150 for name in alone)),
        ("widest folder", f"{widest} ({width} files)"),
        ("folders over 16 files", sum(count > 16 for count in folders.values())),
        ("class names used twice", f"{len(shared)} {sorted(shared) or ''}".strip()),
    ]
    for what, walk in walks().items():
        rows.append(
            (what, f"{len(walk.files)} files, {walk.lines:,} lines, {len(walk.two_way)} two-way edges")
        )
        if "-v" in sys.argv:
            rows += [("", name) for name in sorted(walk.files)]
            rows += [("", f"{one} <-> {other}") for one, other in walk.two_way]
    if "--weights" in sys.argv:
        rows += weights()
    for name, value in rows:
        print(f"{name:28} {value}")
    print()
    for room, counts in sorted(rooms.items()):
        print(f"{room:12} {len(counts):4} files {sum(counts):7,} lines")


if __name__ == "__main__":
    main()
