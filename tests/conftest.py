"""Shared by all tests: deterministic where it can be, and no claim about speed."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

settings.register_profile("ludus", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("ludus")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models gain nothing from threads, and several test processes would fight for cores."""
    import torch

    torch.set_num_threads(1)
