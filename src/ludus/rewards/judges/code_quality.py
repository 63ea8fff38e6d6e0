"""`CodeQuality`: a judge of how code is written. Whether it works is for tests to say."""

from __future__ import annotations

from ludus.rewards.judges.judge import Judge
from ludus.rewards.judges.rubric import Criterion, Rubric

CODE_QUALITY_RUBRIC = Rubric(
    name="code_quality",
    criteria=(
        Criterion(
            id="readability",
            text="Names say what things are, functions are short and do one thing, and comments say why.",
            weight=0.4,
        ),
        Criterion(
            id="architecture",
            text="Parts have one job each and clear interfaces; nothing is copied, dead or needlessly general.",
            weight=0.3,
        ),
        Criterion(
            id="robustness",
            text="Edge cases and wrong input are handled, errors are not swallowed, and nothing is hard-coded "
            "to pass known tests.",
            weight=0.3,
        ),
    ),
)


class CodeQuality(Judge):
    """A judge with the dimensions readability, architecture and robustness, unless others are given."""

    default_name = "code_quality"

    def default_rubric(self) -> Rubric:
        return CODE_QUALITY_RUBRIC
