"""Prints the page docs/metrics.md: `python dev/metrics_page.py > docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.observe.metrics import ROLLOUT_METRICS, SPLITS, TRAINING_METRICS, Metric


def catalogue_markdown() -> str:
    """The catalogue as the page `docs/metrics.md`."""
    splits = ", ".join(f"`{split}/`" for split in SPLITS)
    head = [
        "# Metrics",
        "",
        "Every number that Ludus logs, and what it means. This page is generated from",
        "`ludus.observe.metrics`; a test fails when the two differ.",
        "",
        "A name such as `reward/<part>` stands for a family. A name may start with the split it was",
        f"measured on ({splits}): `eval/success` is `success` over the",
        "evaluation episodes. The last column says how the numbers of several steps combine into one.",
    ]
    return "\n".join(
        [*head, *_section("Episodes", ROLLOUT_METRICS), *_section("Training", TRAINING_METRICS), ""]
    )


def _section(title: str, metrics: Sequence[Metric]) -> list[str]:
    rows = [f"| `{m.name}` | {m.definition} | {m.unit} | {m.aggregate} |" for m in metrics]
    return ["", f"## {title}", "", "| name | definition | unit | combine |", "|---|---|---|---|", *rows]


if __name__ == "__main__":
    print(catalogue_markdown(), end="")
