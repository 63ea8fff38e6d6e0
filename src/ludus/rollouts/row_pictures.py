"""Pictures that rows of data name: as files beside the rows, in a column, or in the rows themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Media
from ludus.core.pictures import PictureError, picture_of_file, picture_of_part, picture_of_url

_COLUMN = "images"


def with_row_pictures(row: Any, folder: Path | None, where: str) -> Any:
    """A row in which each picture of a message is `Media`: {"type": "image", "path": "a.png"} and the like.

    Paths are relative to `folder`, that of the row's file; without one, no file is read. A part without a
    picture of its own, {"type": "image"}, takes the next one of the column `images`.
    """
    if not isinstance(row, Mapping):
        return row
    try:
        found = {name: _messages(value, row, folder) for name, value in row.items()}
    except PictureError as error:
        raise ConfigError(f"{where}: {error}") from None
    changed = {name for name, value in found.items() if value is not row[name]}
    if not changed:
        return row
    return {name: value for name, value in found.items() if name != _COLUMN or not _has_bare(row)}


def _messages(value: Any, row: Mapping[str, Any], folder: Path | None) -> Any:
    if not isinstance(value, list) or not any(_has_pictures(message) for message in value):
        return value
    column = row.get(_COLUMN)
    left = iter(column if isinstance(column, list) else ())
    return [
        {**message, "content": [_part(part, left, folder) for part in message["content"]]}
        if _has_pictures(message)
        else message
        for message in value
    ]


def _has_pictures(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(_is_picture(part) for part in content)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_bare(part: Any) -> bool:
    return _is_picture(part) and not part.keys() - {"type", "text"}


def _has_bare(row: Mapping[str, Any]) -> bool:
    messages = [m for value in row.values() if isinstance(value, list) for m in value]
    return any(_has_pictures(m) and any(_is_bare(part) for part in m["content"]) for m in messages)


def _part(part: Any, left: Iterator[Any], folder: Path | None) -> Any:
    if not _is_picture(part):
        return part
    if _is_bare(part):
        given = next(left, None)
        if given is None:
            raise PictureError(
                f'a part {{"type": "image"}} has no picture: give it "path", or the row a column {_COLUMN!r}'
            )
    else:
        given = next((part[name] for name in ("path", "image", "url") if name in part), None)
    made = picture_of_part(part) if given is None else _picture(given, folder)
    return {"type": "image", "image": made}


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
