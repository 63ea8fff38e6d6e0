"""From the bytes of an image to its pixels. The sender may be hostile."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from ludus.core.failures import MissingExtraError
from ludus.core.images import FORMATS, MOST_BYTES, MOST_PIXELS, ImageError, too_large
from ludus.core.messages import Media

if TYPE_CHECKING:
    from PIL.Image import Image


def noise_image(seed: int, size: tuple[int, int] = (64, 48)) -> Media:
    """An image of noise, to probe a model with: what looks alike everywhere shows no difference."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(noise).save(file, format="PNG")
    return Media.image(file.getvalue())


def decode_image(data: bytes) -> Image:
    """The pixels, in RGB; what is transparent is white."""
    with _opened(data) as opened:
        from PIL import Image, ImageOps

        image: Image.Image = opened  # each copy of a large one takes 160 MB
        ImageOps.exif_transpose(image, in_place=True)
        if "A" in image.getbands() or "transparency" in image.info:
            layered = image.convert("RGBA")
            image = Image.new("RGB", layered.size, "white")
            image.paste(layered, mask=layered.getchannel("A"))
        if image.mode != "RGB":
            return image.convert("RGB")
        image.load()
        return image


def video_frames(data: bytes, most: int = 8) -> list[Media]:
    """At most so many frames of an animation (GIF, WebP), at even distances, the first and the last included.

    Each is an image of its own. Other videos are cut into images by other programs, such as ffmpeg.
    """
    if most < 1:
        raise ValueError("video_frames needs at least one frame (most)")
    made: list[Media] = []
    with _opened(data) as opened:
        count = int(getattr(opened, "n_frames", 1))
        for place in np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(int)).tolist():
            opened.seek(place)
            file = BytesIO()
            opened.convert("RGBA" if "A" in opened.getbands() else "RGB").save(file, format="PNG")
            made.append(Media.image(file.getvalue()))
    return made


class PixelBudget:
    """Bounds the pixels that threads decode at once, in the order in which they came."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextmanager
    def held(self, pixels: int) -> Iterator[None]:
        """Wait until there is room for so many, and hold them for the length of a block."""
        pixels, own = min(pixels, self._most), object()
        with self._changed:
            self._waiting.append(own)
            self._changed.wait_for(lambda: self._waiting[0] is own and self._held + pixels <= self._most)
            self._waiting.popleft()
            self._held += pixels
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= pixels
                self._changed.notify_all()


def pixel_count(data: bytes) -> int:
    """How many pixels an image has; only its header is read."""
    with _opened(data) as opened:
        return opened.width * opened.height


def check_image(data: bytes) -> None:
    """Refuse what is no image, has too many pixels, or is cut off; what looks whole is not decoded.

    That takes a hundredth of the time of decoding, and finds what copying and downloading break. Only an image
    whose end is missing is decoded: decoders forgive some of it.
    """
    with _opened(data) as opened:
        seems_whole = _seems_whole(opened, data)
    if not seems_whole:
        decode_image(data)


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    """The image with its header read and within bounds; any fault of it is an `ImageError`."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtraError("pillow", "vision", "an image that a model is shown") from None
    if len(data) > MOST_BYTES:
        raise too_large()
    # Pillow warns from 89 million pixels on, which are refused here; a filter for a moment is not thread-safe
    if ("ignore", None, Image.DecompressionBombWarning, None, 0) not in warnings.filters:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:  # nothing is decoded yet
                raise ImageError(
                    f"an image has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded"
                )
            yield opened
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(f"an image has too many pixels: at most {MOST_PIXELS:,} are decoded") from None
    except UnidentifiedImageError:
        raise ImageError(f"an image is in no format that is read ({', '.join(FORMATS)})") from None
    except Exception as error:  # noqa: BLE001 - decoders raise whatever broken bytes make of them
        raise ImageError(f"an image cannot be decoded: {type(error).__name__}: {error!s:.200}") from None


def _seems_whole(image: Image, data: bytes) -> bool:
    """Whether an image has its end, by its format's own marks, and a PNG its checksums."""
    if image.format == "PNG":
        try:
            image.verify()
        except Exception:  # noqa: BLE001 - decoding says what it is
            return False
    if image.format == "JPEG":  # the end of the image, after the last scan: a thumbnail has its own
        return data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")
    if image.format == "GIF":
        return data.rstrip(b"\0").endswith(b";")
    if image.format == "BMP":
        return int.from_bytes(data[2:6], "little") <= len(data)
    return True  # WebP is opened whole, or not at all
