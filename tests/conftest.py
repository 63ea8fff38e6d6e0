"""Shared by all tests: deterministic where it can be, and no claim about speed."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import settings

from ludus.remote.threads import frozen_gc

if not torch.cuda.is_available():
    # The compiled kernels then run in the interpreter, which has to be asked for before Triton is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# No token unless a test is about one: it would be kept in the home of whoever runs the tests.
os.environ.setdefault("LUDUS_TOKEN", "")

# What imports make stays; looking for garbage among it takes a quarter of their time.
gc.disable()

# `make test-slow` plays the same properties with the other profile.
common = settings(deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.register_profile("ludus", common, max_examples=25)
settings.register_profile("thorough", common, max_examples=250)
settings.load_profile("ludus")


@pytest.fixture(autouse=True, scope="session")
def _no_power_cut() -> Iterator[None]:
    """Processes are killed here, machines are not: what was written need not reach a disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models gain nothing from threads, and several test processes would fight for cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """A command that serves makes JSON lines the log of its process: the next test's is its own again."""
    root, ludus = logging.getLogger(), logging.getLogger("ludus")
    levels = root.level, ludus.level
    yield
    for handler in [one for one in root.handlers if type(one) is logging.StreamHandler]:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        ludus.setLevel(levels[1])


@pytest.fixture(scope="session", params=["docker", "podman"])
def container_engine(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """A tier whose engine works here and its program; it has the image `container_image.IMAGE`."""
    from container_image import IMAGE, engines, import_image

    tier, found = request.param, engines()
    if tier not in found:
        pytest.skip(f"no {tier} engine here")
    import_image(found[tier], IMAGE)
    return tier, found[tier]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a GPU is skipped, visibly, where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


_HEAP = pytest.StashKey[AbstractContextManager[None]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports have made is never looked at again; what the tests make is collected as always.

    By `frozen_gc`, so that a run in a test need not count a million objects to see whether they are frozen.
    """
    heap = session.config.stash[_HEAP] = frozen_gc()
    heap.__enter__()
    gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """At the end of the process extension modules count what they have made, and expect it to be gone."""
    if heap := config.stash.get(_HEAP, None):
        heap.__exit__(None, None, None)
