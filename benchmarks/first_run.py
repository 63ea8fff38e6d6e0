"""Runs README's example as a reader would, and draws its picture: docs/images/first_run.svg.

    python benchmarks/first_run.py [--seed 0] [--threads 2]

Seconds count from the start of the program, imports included. Full points are success on tickets that were
never trained on (every 50 steps of imitation, which takes time of its own); rings are the episodes that RL
plays. The picture shows the end for some seconds, then the run in seven; without animation it shows the end.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ludus.observe import RunFolder

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "images" / "first_run.svg"
WIDTH, HEIGHT = 880, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 560, 48, 282
HOLD, PLAY = 5.0, 7.0
DARK, GRAY, BLUE, GREEN, WHITE = "#0d1117", "#8b949e", "#58a6ff", "#3fb950", "#e6edf3"


@dataclass(frozen=True, slots=True)
class Curve:
    """Success by seconds: measured on held-out tickets, and while RL plays; and how long all of it took."""

    held_out: list[tuple[float, float]]
    played: list[tuple[float, float]]
    seconds: float
    machine: str

    @property
    def imitated(self) -> tuple[float, float]:
        """The last measurement before RL."""
        return max(point for point in self.held_out if point[0] < self.played[0][0])


def measured(seed: int, threads: int, folder: Path) -> Curve:
    (block, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    settings = 'run={"folder": "run"}, evaluation={"every": 50}'
    code = block.replace('model="scratch"', f'model="scratch", seed={seed}, {settings}')
    assert code != block
    (folder / "tickets.py").write_text(code)
    is_busy = os.getloadavg()[0] > 0.5
    started = time.time()
    command, environment = (
        [sys.executable, "tickets.py"],
        {**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    subprocess.run(command, cwd=folder, env=environment, check=True)
    seconds = time.time() - started
    rows = RunFolder(folder / "run").metrics()
    held_out = [(row["time"] - started, row["eval/success"]) for row in rows if "eval/success" in row]
    played = [(row["time"] - started, row["success"]) for row in rows if "success" in row]
    played = [point for point in played if point[0] < held_out[-1][0]]
    cores = f"{threads} busy CPU core" if is_busy else f"{threads} CPU core"
    return Curve(held_out, played, seconds, cores + "s" * (threads > 1))


def place(curve: Curve, seconds: float, success: float) -> tuple[float, float]:
    x = LEFT + (RIGHT - LEFT) * seconds / curve.seconds
    return round(x, 1), round(BOTTOM - (BOTTOM - TOP) * success, 1)


def text(x: float, y: float, said: str, color: str = GRAY, size: int = 13, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" {more}>{escape(said)}</text>'


def appears(what: str, curve: Curve, at: float) -> str:
    """Shown from that second of the run on."""
    first = HOLD / (HOLD + PLAY)
    then = first + (1 - first) * min(0.97, at / curve.seconds)
    return (
        f'<g>{what}<animate attributeName="opacity" values="1;1;0;0;1;1" keyTimes="0;{first:.4f};'
        f'{first + 0.001:.4f};{then:.4f};{then + 0.01:.4f};1" dur="{HOLD + PLAY}s" '
        f'repeatCount="indefinite"/></g>'
    )


def drawn(curve: Curve) -> str:
    """The picture: a curve that grows, and what the program prints."""
    measured, played = ([place(curve, *one) for one in kind] for kind in (curve.held_out, curve.played))
    middle = place(curve, *curve.imitated)[0]
    grid = "".join(
        f'<line x1="{LEFT}" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="#30363d"/>'
        + text(LEFT - 8, y + 4, f"{share:.0%}", more='text-anchor="end"')
        for share in (0, 0.5, 1)
        for y in [place(curve, 0, share)[1]]
    )
    ticks = "".join(
        text(place(curve, second, 0)[0], BOTTOM + 20, f"{second} s", more='text-anchor="middle"')
        for second in range(0, int(curve.seconds) + 1, 5 if curve.seconds < 45 else 10)
    )
    parts = (
        f'<line x1="{middle}" y1="{TOP - 8}" x2="{middle}" y2="{BOTTOM}" stroke="{GRAY}" '
        'stroke-dasharray="3 4"/>'
        + text((LEFT + middle) / 2, TOP - 18, "imitation", more='text-anchor="middle"')
        + text((middle + RIGHT) / 2, TOP - 18, "reinforcement learning", more='text-anchor="middle"')
    )
    path = "M" + " L".join(f"{x},{y}" for x, y in sorted([*measured, *played]))
    line = f'<path d="{path}" fill="none" stroke="{BLUE}" stroke-width="3" stroke-linejoin="round"/>'
    rings = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{DARK}" stroke="{BLUE}"/>' for x, y in played
    )
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="5" fill="{BLUE}"/>' for x, y in measured)
    first = HOLD / (HOLD + PLAY)
    reveal = (
        f'<clipPath id="so-far"><rect x="0" y="0" width="{WIDTH}" height="{HEIGHT}">'
        f'<animate attributeName="width" values="{WIDTH};{WIDTH};{LEFT};{RIGHT + 8}" '
        f'keyTimes="0;{first:.4f};{first + 0.001:.4f};1" dur="{HOLD + PLAY}s" repeatCount="indefinite"/>'
        f"</rect></clipPath>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace">',
            "<title>Success on tickets that were never trained on, by seconds since the start</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="{DARK}"/>',
            reveal, grid, ticks, parts,
            f'<g clip-path="url(#so-far)">{line}{rings}{dots}</g>',
            *printed(curve),
            "</svg>\n",
        ]
    )  # fmt: skip


def printed(curve: Curve) -> list[str]:
    """The table of the result, line by line when it is known."""
    x = RIGHT + 40
    first, last = curve.held_out[0], curve.held_out[-1]
    lines = [("at the start", first), ("after imitation", curve.imitated), ("after RL", last)]
    shown = [
        text(x, 78, "$ python tickets.py", WHITE, 15),
        text(x, 112, "held-out success", GRAY, 14),
    ]
    for number, (when, (seconds, success)) in enumerate(lines):
        color = GREEN if number == 2 else WHITE
        row = text(x, 142 + 32 * number, when, color, 15) + text(
            WIDTH - 30,
            142 + 32 * number,
            f"{success:.0%}",
            color,
            20,
            'text-anchor="end" font-weight="bold"',
        )
        shown.append(appears(row, curve, seconds))
    ended = f"{curve.seconds:.0f} s on {curve.machine}"
    shown.append(appears(text(x, 252, ended), curve, curve.seconds))
    shown.append(text(x, BOTTOM + 20, "● held out   ○ played by RL", BLUE, 12))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curve = measured(options.seed, options.threads, Path(folder))
    options.out.write_text(drawn(curve))
    print(f"{options.out}: {curve.held_out[-1][1]:.1%} after {curve.seconds:.1f} s")


if __name__ == "__main__":
    main()
