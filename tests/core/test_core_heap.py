"""A settled heap: what is old is left alone, what is new is collected, and all is as before at the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from ludus.core.concurrency import frozen_gc


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """The tests themselves run on a frozen heap."""
    gc.unfreeze()
    yield
    gc.freeze()


class Knot:
    """Part of a cycle, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


def watched() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def test_new_garbage_is_collected_and_old_garbage_after_the_end() -> None:
    old = Knot()
    seen = weakref.ref(old)
    with frozen_gc():
        assert gc.get_freeze_count() > 0
        new = watched()
        gc.collect()
        assert new() is None
        del old
        gc.collect()
        assert seen() is not None, "the collector does not look at it here"
    gc.collect()
    assert seen() is None


def test_what_was_garbage_before_is_not_kept() -> None:
    seen = watched()
    with frozen_gc():
        assert seen() is None


def test_only_the_outermost_ends_it() -> None:
    with frozen_gc():
        with pytest.raises(ValueError, match="inside"), frozen_gc():
            raise ValueError("inside")
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_has_frozen_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with frozen_gc(), frozen_gc():
        pass
    assert gc.get_freeze_count() == before


def test_an_interrupt_at_the_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gc, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt), frozen_gc():
            pass
    with frozen_gc():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
