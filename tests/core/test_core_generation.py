"""How tokens are drawn: what no draw can be made by is refused, by its name."""

from __future__ import annotations

from typing import Any

import pytest

from ludus.core import Sampling

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, INF, NAN, 1e-320, 1e-38, 1e7, 10**400)),
        *(("top_p", value) for value in (0.0, 1.1, NAN)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN)),
        *(("repetition_penalty", value) for value in (0.0, INF, NAN, 1e-9, 1e9, 10**400)),
        *(("top_k", value) for value in (-1, 2**31, 2**63, 10**400, 1.5, INF, NAN)),
        *(("max_tokens", value) for value in (0, 2**31, 10**400, 1.5, INF)),
        *(("seed", value) for value in (2**64, -(2**63) - 1, 10**400, 0.5, NAN)),
        *(("stop", value) for value in (("",), ("a", "b" * 5000))),
    ],
)
def test_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^sampling\.{name} cannot be .+; it can be .+$") as error:
        Sampling(**{name: value})
    assert repr(value)[:60] in str(error.value)
    assert len(str(error.value)) < 200


def test_the_ends_of_the_ranges_can_be() -> None:
    assert not Sampling(temperature=0, top_p=1, min_p=0, repetition_penalty=1, max_tokens=1).is_truncated
    assert Sampling(temperature=1e-30, top_k=2**31 - 1, seed=2**64 - 1, max_tokens=2**31 - 1)
    assert Sampling(temperature=1e6, repetition_penalty=1000, top_p=1e-300, seed=-(2**63))
