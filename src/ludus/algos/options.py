"""Kinds of numbers that options can be; a recipe's value outside of its range is refused by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1."""
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Above 0."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""0 or above."""
Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""
