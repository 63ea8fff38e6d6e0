"""Processors that take videos as well, where torchvision is not installed: without that part of them.

Ludus shows frames of a video as images, so their part for videos is never called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.video_processing_utils import BaseVideoProcessor, VideoProcessorMixin


class NoVideos(VideoProcessorMixin):  # type: ignore[misc]
    """Stands for the part of a processor that takes videos; it keeps the configuration, for checkpoints."""

    model_input_names: tuple[str, ...] = ()

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = config or {}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.config)


@contextmanager
def videos_optional() -> Iterator[None]:
    """Within, transformers loads processors without their part for videos, if torchvision is not there."""
    if find_spec("torchvision") is not None:
        yield
        return

    def without(name: str, **settings: Any) -> NoVideos:
        revision = settings.get("revision") or "main"
        return NoVideos(BaseVideoProcessor.get_video_processor_dict(name, revision=revision)[0])

    find = ProcessorMixin.get_possibly_dynamic_module

    def find_class(name: str) -> Any:
        return VideoProcessorMixin if name == VideoProcessorMixin.__name__ else find(name)

    replaced = {
        (AutoVideoProcessor, "from_pretrained"): without,
        (ProcessorMixin, find.__name__): staticmethod(find_class),
    }
    before = {(owner, name): vars(owner)[name] for owner, name in replaced}
    try:
        for (owner, name), function in replaced.items():
            setattr(owner, name, function)
        yield
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)
