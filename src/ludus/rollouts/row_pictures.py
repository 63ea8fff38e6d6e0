"""Pictures that rows of data name: as files beside the rows, in a column, or in the rows themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.core.messages import Media, Message
from ludus.core.pictures import PARTS, PictureError, picture_of_file, picture_of_part, picture_of_url
from ludus.model.pictures import check_picture, decode_picture

_COLUMN = "images"


def with_row_pictures(row: Any, folder: Path | None, where: str) -> Any:
    """A row in which each picture of a message is `Media`: {"type": "image", "path": "a.png"} and the like.

    Paths are relative to `folder`, that of the row's file; without one, no file is read. A part without a
    picture of its own, {"type": "image"}, takes the next one of the column `images`. What is no picture, too
    large or cut off is refused, with `where`.
    """
    if not isinstance(row, Mapping) or not any(isinstance(value, list) for value in row.values()):
        return row
    try:
        found = {name: _messages(value, row, folder, where) for name, value in row.items()}
    except PictureError as error:
        raise ConfigError(f"{where}: {error}") from None
    changed = {name for name, value in found.items() if value is not row[name]}
    if not changed:
        return row
    return {name: value for name, value in found.items() if name != _COLUMN or not _has_bare(row)}


def undecodable_pictures(messages: Iterable[Message]) -> Iterator[str]:
    """What is wrong with those of the messages' pictures that cannot be decoded, and where each comes from.

    It decodes each picture once, which takes about 10 to 50 ms for a million pixels.
    """
    pictures: dict[str, Media] = {}
    for media in (media for one in messages for media in one.media if media.is_image):
        pictures.setdefault(media.sha256, media)
    for media in pictures.values():
        try:
            if media.data is not None:
                decode_picture(media.data)
        except PictureError as error:
            yield media.named(error)


def _messages(value: Any, row: Mapping[str, Any], folder: Path | None, where: str) -> Any:
    if not isinstance(value, list) or not any(_has_pictures(message) for message in value):
        return value
    column = row.get(_COLUMN)
    left = iter(column if isinstance(column, list) else ())
    return [
        {**message, "content": [_part(part, left, folder, where) for part in message["content"]]}
        if _has_pictures(message)
        else message
        for message in value
    ]


def _has_pictures(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(_is_picture(part) for part in content)


def _is_picture(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in PARTS


def _is_bare(part: Any) -> bool:
    return _is_picture(part) and part["type"] == "image" and not part.keys() - {"type", "text"}


def _has_bare(row: Mapping[str, Any]) -> bool:
    messages = [m for value in row.values() if isinstance(value, list) for m in value]
    return any(_has_pictures(m) and any(_is_bare(part) for part in m["content"]) for m in messages)


def _part(part: Any, left: Iterator[Any], folder: Path | None, where: str) -> Any:
    if not _is_picture(part):
        return part
    given: Any = None
    if _is_bare(part):
        given = next(left, None)
        if given is None:
            raise PictureError(
                f'a part {{"type": "image"}} has no picture: give it "path", or the row a column {_COLUMN!r}'
            )
    elif part["type"] == "image":
        given = next((part[name] for name in ("path", "image", "url") if name in part), None)
    made = picture_of_part(part) if given is None else _picture(given, folder)
    is_path = isinstance(given, str) and not given.startswith("data:")
    name = f"{given:.200}" if is_path else "a picture"
    _check(made, name)
    return {"type": "image", "image": replace(made, origin=f"{where}: {name}")}


def _check(picture: Media, name: str) -> None:
    if picture.data is None:
        return
    try:
        check_picture(picture.data)
    except MissingExtraError:
        return  # no model is shown it without that, and one that reads text only needs no pictures
    except PictureError as error:
        raise PictureError(f"{name}: {error}; save it again, or leave the row out") from None


def _picture(given: Any, folder: Path | None) -> Media:
    """A path, a data: URL, bytes, a table with either (Parquet), or a picture of Pillow's (datasets)."""
    if isinstance(given, Media):
        return given
    if isinstance(given, Mapping):
        return _picture(given.get("bytes") or given.get("path"), folder)
    if isinstance(given, bytes):
        return Media.image(given)
    if hasattr(given, "save"):
        file = BytesIO()
        given.convert("RGB").save(file, format="PNG")
        return Media.image(file.getvalue())
    if not isinstance(given, str):
        raise PictureError(f"a picture is a path or a data: URL, not {given!r:.60}")
    if given.startswith("data:") or "://" in given:
        return picture_of_url(given)
    if folder is None:
        raise PictureError(f"the picture {given!r:.60} is a path, and its row is of no file")
    return picture_of_file(folder / given)
