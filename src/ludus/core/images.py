"""Images: from what files and clients send to `Media`, within bounds. `model.image_files` decodes them.

An image stays the bytes that were sent, identified by their hash, until a model's processor wants pixels. Its
sender may be hostile: bytes and pixels are bounded, and the bound on pixels is checked before any is decoded.
Addresses are never fetched, and files are read only where a row of a file names them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.failures import EngineError
from ludus.core.messages import Media

MOST_BYTES = 32 << 20
"""Bytes of one image."""
MOST_PIXELS = 40_000_000
"""Pixels of one image: 120 MB once it is decoded."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that are decoded; of an animation, the first frame."""
PARTS = ("image", "image_url", "input_image")
"""The types of parts of a message that are images: Hugging Face's and Anthropic's, then OpenAI's."""


class ImageError(ValueError):
    """An image that cannot be read; the message says why."""


def image_of_part(part: Mapping[str, Any]) -> Media:
    """The image of a part: OpenAI's `image_url` or `input_image`, Anthropic's `image`, `{"image": Media}`."""
    kind = part.get("type")
    given = part.get("image") if kind == "image" else part.get("image_url")
    source = part.get("source")
    if isinstance(given, Media):
        return given
    if kind == "image" and isinstance(source, Mapping):
        return _from_anthropic(source)
    url = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(url, bytes | bytearray):
        return _media(bytes(url))
    if not isinstance(url, str) or not url:
        raise ImageError(
            f"a part of type {kind!r} has no image in it: send a data: URL (data:image/png;base64,...)"
        )
    return image_of_url(url)


def image_of_url(url: str) -> Media:
    """The image in a data: URL. Other addresses are not fetched."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise ImageError(
            f"the image's address {url[:60]!r} is not fetched: send the image itself, as a data: URL "
            "(data:image/png;base64,...)"
        )
    about, comma, data = rest.partition(",")
    if not comma or not about.lower().endswith(";base64"):
        raise ImageError("an image's data: URL is written data:image/png;base64,...")
    return _media(_decoded(data))


def _from_anthropic(source: Mapping[str, Any]) -> Media:
    if source.get("type") == "url":
        return image_of_url(str(source.get("url", "")))
    data = source.get("data")
    if source.get("type") != "base64" or not isinstance(data, str):
        raise ImageError(
            f'an image\'s source is {{"type": "base64", "data": ...}}, not of type {source.get("type")!r:.40}'
        )
    return _media(_decoded(data))


def image_of_file(path: Path) -> Media:
    """The image of a file."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise OSError("it is not a file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ImageError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a null byte in the path
        raise ImageError(f"{str(path)!r} cannot be read: {error}") from None
    return _media(data)


def _decoded(text: str) -> bytes:
    """Base64, with line breaks or without padding as some encoders write it; nothing else is skipped."""
    text = "".join(text.split())
    if len(text) > MOST_BYTES * 4 // 3 + 4:
        raise too_large()
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image is not base64: {error}") from None


def _media(data: bytes) -> Media:
    if not data:
        raise ImageError("an image has no bytes")
    if len(data) > MOST_BYTES:
        raise too_large()
    return Media.image(data)


def not_shown(engine: str) -> EngineError:
    """Images in a request to an engine that takes none."""
    return EngineError(
        f"{engine} is shown no images: sample with the engine in the trainer's process or with "
        'cluster.engines, or set model.vision = "off" to read text only (docs/images.md)',
        retriable=False,
    )


def too_large() -> ImageError:
    """More bytes than are read."""
    return ImageError(f"an image has more than {MOST_BYTES >> 20} MiB, which is the most that is read")
