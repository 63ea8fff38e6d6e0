"""Pictures from clients, files and tools: bounds, formats, and hostile bytes."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from vision_models import noise, picture

from ludus.core.failures import ConfigError
from ludus.core.messages import IMAGE_MARK, Media, Message
from ludus.core.pictures import (
    MOST_BYTES,
    MOST_PIXELS,
    PictureError,
    picture_of_part,
    picture_of_url,
)
from ludus.engine.pictures import decode_picture
from ludus.rollouts.tasksets import load_tasks
from ludus.training.data.conversations import read_conversations


def url(media: Media) -> str:
    return "data:image/png;base64," + base64.b64encode(media.data or b"").decode()


RED = picture("red")
PARTS: dict[str, dict[str, Any]] = {
    "openai": {"type": "image_url", "image_url": {"url": url(RED)}},
    "openai, short": {"type": "image_url", "image_url": url(RED)},
    "responses": {"type": "input_image", "image_url": url(RED)},
    "anthropic": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": url(RED).partition(",")[2]},
    },
    "hugging face": {"type": "image", "image": url(RED)},
    "python": {"type": "image", "image": RED},
}


@pytest.mark.parametrize("form", PARTS)
def test_a_message_has_pictures_in_their_places(form: str) -> None:
    parts = [{"type": "text", "text": "is "}, PARTS[form], {"type": "text", "text": " red?"}]
    message = Message.parse({"role": "user", "content": parts})
    assert message.content == f"is {IMAGE_MARK} red?"
    assert message.media == (RED,) and message.media[0].data == RED.data


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "http://x/y.png"}}, "is not fetched"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is not fetched"),
        ({"type": "image", "image": "/etc/passwd"}, "is not fetched"),
        ({"type": "image", "source": {"type": "url", "url": "https://x"}}, "is not fetched"),
        ({"type": "image", "source": {"type": "file", "file_id": "1"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is written data:"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "no bytes"),
        ({"type": "image_url"}, "no picture in it"),
        ({"type": "input_image", "file_id": "f"}, "no picture in it"),
    ],
)
def test_what_is_no_picture_is_refused_with_the_reason(part: dict[str, Any], said: str) -> None:
    with pytest.raises(PictureError, match=said):
        picture_of_part(part)
    with pytest.raises(ValueError, match=said):
        Message.parse({"role": "user", "content": [part]})


def test_bytes_and_pixels_are_bounded() -> None:
    long = base64.b64encode(b"x" * (MOST_BYTES + 3)).decode()
    with pytest.raises(PictureError, match="MiB"):
        picture_of_url(f"data:image/png;base64,{long}")
    with pytest.raises(PictureError, match="MiB"):
        decode_picture(b"x" * (MOST_BYTES + 1))
    # a bomb: a header that promises more pixels than memory has, and hardly any bytes
    side = 65_000
    assert side * side > MOST_PIXELS

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100))
    with pytest.raises(PictureError, match=r"pixels|decoded"):
        decode_picture(bomb)


@given(st.binary(max_size=300), st.integers(0, 60))
def test_broken_bytes_are_a_picture_error_and_nothing_else(noise_: bytes, place: int) -> None:
    whole = RED.data or b""
    for data in (noise_, whole[:place], whole[:place] + noise_ + whole[place + len(noise_) :]):
        with contextlib.suppress(PictureError):
            assert decode_picture(data).mode == "RGB"


def test_transparency_is_white_and_other_modes_are_rgb() -> None:
    def saved(image: Image.Image, kind: str) -> bytes:
        file = BytesIO()
        image.save(file, format=kind)
        return file.getvalue()

    clear = decode_picture(saved(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "PNG"))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    for mode, kind in (("L", "PNG"), ("1", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("I;16", "PNG")):
        assert decode_picture(saved(Image.new(mode, (3, 2)), kind)).size == (3, 2)
    with pytest.raises(PictureError, match="no format"):
        decode_picture(saved(Image.new("RGB", (2, 2)), "TIFF"))


def test_task_files_name_pictures_by_path_url_and_column(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    one, two = noise(1), noise(2)
    (tmp_path / "pictures" / "one.png").write_bytes(one.data or b"")
    by_path = {"type": "image", "path": "pictures/one.png"}
    text = {"type": "text", "text": "what is this?"}
    rows = [
        {"prompt": [{"role": "user", "content": [by_path, text]}], "target": "a"},
        {"messages": [{"role": "user", "content": [text, {"type": "image", "image": url(two)}]}]},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, text]}],
            "images": ["pictures/one.png"],
        },
    ]
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tasks = load_tasks(str(file))
    assert [task.messages[0].media for task in tasks] == [(one,), (two,), (one,)]
    assert [task.messages[0].media[0].data for task in tasks] == [one.data, two.data, one.data]
    assert tasks[1].messages[0].content == f"what is this?{IMAGE_MARK}"
    assert "images" not in tasks[2].metadata
    shown = {"messages": [*rows[0]["prompt"], {"role": "assistant", "content": "noise"}]}
    file.write_text(json.dumps(shown))
    assert read_conversations(file)[0][0].media == (one,)
    for part, said in (
        ({"type": "image", "path": "gone.png"}, r"gone\.png cannot be read"),
        ({"type": "image", "path": "http://x/y.png"}, "not fetched"),
        ({"type": "image"}, "has no picture"),
    ):
        file.write_text(json.dumps({"prompt": [{"role": "user", "content": [part]}]}))
        with pytest.raises(ConfigError, match=rf"line 1: .*{said}"):
            load_tasks(str(file))


def test_columns_of_tables_hold_pictures(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = {"type": "image", "text": None}
    row = {
        "prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}],
        "images": [{"bytes": RED.data, "path": None}],
        "target": "red",
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    (task,) = load_tasks(str(tmp_path / "tasks.parquet"))
    assert task.messages[0].media == (RED,) and task.target == "red"
