"""How tokens are drawn: what no draw can be made by is refused, by its name."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core import Sampling

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, INF, NAN)),
        *(("top_p", value) for value in (0.0, 1.1, NAN)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN)),
        *(("repetition_penalty", value) for value in (0.0, INF, NAN)),
        ("top_k", -1),
        ("max_tokens", 0),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^sampling\.{name} cannot be {value!r}$"):
        Sampling(**{name: value})


def test_the_ends_of_the_ranges_can_be() -> None:
    assert not Sampling(temperature=0, top_p=1, min_p=0, repetition_penalty=1, max_tokens=1).is_truncated
