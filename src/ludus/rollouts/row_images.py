"""Images that rows of data name: as files beside the rows, in a column, or in the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.images import PARTS, ImageError, image_of_file, image_of_part, image_of_url
from ludus.core.messages import Media, Message
from ludus.model.image_files import check_image, decode_image

_COLUMN = "images"


def with_row_images(row: Any, folder: Path | None, where: str) -> Any:
    """A row in which each image of a message is `Media`: {"type": "image", "path": "a.png"} and the like.

    Paths are relative to `folder`, that of the row's file; without one, no file is read. A part without a
    image of its own, {"type": "image"}, takes the next one of the column `images`. What is no image, too
    large or cut off is refused, with `where`.
    """
    if not isinstance(row, Mapping) or not any(isinstance(value, list) for value in row.values()):
        return row
    try:
        found = {name: _messages(value, row, folder, where) for name, value in row.items()}
    except ImageError as error:
        raise ConfigError(f"{where}: {error}") from None
    changed = {name for name, value in found.items() if value is not row[name]}
    if not changed:
        return row
    return {name: value for name, value in found.items() if name != _COLUMN or not _has_bare(row)}


def undecodable_images(messages: Iterable[Message]) -> Iterator[str]:
    """What is wrong with those of the messages' images that cannot be decoded, and where each comes from.

    It decodes each image once, which takes about 10 to 50 ms for a million pixels.
    """
    images: dict[str, Media] = {}
    for media in (media for one in messages for media in one.media if media.is_image):
        images.setdefault(media.sha256, media)
    for media in images.values():
        try:
            if media.data is not None:
                decode_image(media.data)
        except ImageError as error:
            yield media.named(error)


def _messages(value: Any, row: Mapping[str, Any], folder: Path | None, where: str) -> Any:
    if not isinstance(value, list) or not any(_has_images(message) for message in value):
        return value
    column = row.get(_COLUMN)
    left = iter(column if isinstance(column, list) else ())
    return [
        {**message, "content": [_part(part, left, folder, where) for part in message["content"]]}
        if _has_images(message)
        else message
        for message in value
    ]


def _has_images(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(_is_image(part) for part in content)


def _is_image(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in PARTS


def _is_bare(part: Any) -> bool:
    return _is_image(part) and part["type"] == "image" and not part.keys() - {"type", "text"}


def _has_bare(row: Mapping[str, Any]) -> bool:
    messages = [m for value in row.values() if isinstance(value, list) for m in value]
    return any(_has_images(m) and any(_is_bare(part) for part in m["content"]) for m in messages)


def _part(part: Any, left: Iterator[Any], folder: Path | None, where: str) -> Any:
    if not _is_image(part):
        return part
    given: Any = None
    if _is_bare(part):
        given = next(left, None)
        if given is None:
            raise ImageError(
                f'a part {{"type": "image"}} has no image: give it "path", or the row a column {_COLUMN!r}'
            )
    elif part["type"] == "image":
        given = next((part[name] for name in ("path", "image", "url") if name in part), None)
    made = image_of_part(part) if given is None else _image(given, folder)
    is_path = isinstance(given, str) and not given.startswith("data:")
    name = f"{given:.200}" if is_path else "an image"
    _check(made, name)
    return {"type": "image", "image": replace(made, origin=f"{where}: {name}")}


def _check(image: Media, name: str) -> None:
    if image.data is None:
        return
    try:
        check_image(image.data)
    except MissingExtraError:
        return  # no model is shown it without that, and one that reads text only needs no images
    except ImageError as error:
        raise ImageError(f"{name}: {error}; save it again, or leave the row out") from None


def _image(given: Any, folder: Path | None) -> Media:
    """A path, a data: URL, bytes, a table with either (Parquet), or an image of Pillow's (datasets)."""
    if isinstance(given, Media):
        return given
    if isinstance(given, Mapping):
        return _image(given.get("bytes") or given.get("path"), folder)
    if isinstance(given, bytes):
        return Media.image(given)
    if hasattr(given, "save"):
        file = BytesIO()
        given.convert("RGB").save(file, format="PNG")
        return Media.image(file.getvalue())
    if not isinstance(given, str):
        raise ImageError(f"an image is a path or a data: URL, not {given!r:.60}")
    if given.startswith("data:") or "://" in given:
        return image_of_url(given)
    if folder is None:
        raise ImageError(f"the image {given!r:.60} is a path, and its row is of no file")
    return image_of_file(folder / given)
