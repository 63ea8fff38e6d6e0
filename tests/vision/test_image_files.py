"""Images from clients, files and tools: bounds, formats, and hostile bytes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter
from typer.testing import CliRunner
from vision_models import image, noise

from ludus.cli.main import app
from ludus.core.failures import ConfigError
from ludus.core.images import (
    MOST_BYTES,
    ImageError,
    image_of_part,
    image_of_url,
)
from ludus.core.messages import IMAGE_MARK, Media, Message
from ludus.core.task import Task
from ludus.model.image_files import check_image, decode_image, video_frames
from ludus.rollouts.tasksets import load_tasks, undecodable_images
from ludus.training.data.conversations import read_conversations


def url(media: Media) -> str:
    return "data:image/png;base64," + base64.b64encode(media.data or b"").decode()


RED = image("red")
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
def test_a_message_has_images_in_their_places(form: str) -> None:
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
        ({"type": "image_url"}, "no image in it"),
        ({"type": "input_image", "file_id": "f"}, "no image in it"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(part: dict[str, Any], said: str) -> None:
    with pytest.raises(ImageError, match=said):
        image_of_part(part)
    with pytest.raises(ValueError, match=said):
        Message.parse({"role": "user", "content": [part]})


def wrapped(text: str) -> str:
    return "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))


@pytest.mark.parametrize(
    "form", [wrapped, lambda text: text.rstrip("="), lambda text: f"\n {wrapped(text)} "]
)
def test_base64_may_be_wrapped_and_unpadded(form: Any) -> None:
    for size in (100, 101, 102):
        data = bytes(range(size))
        text = form(base64.b64encode(data).decode())
        assert image_of_url(f"data:image/png;base64,{text}").data == data
        source = {"type": "base64", "media_type": "image/png", "data": text}
        assert image_of_part({"type": "image", "source": source}).data == data


@pytest.mark.parametrize(
    "text",
    ["A", "AAAAA", "AA=A", "A===", "AA-_", "AAAA!AAA", "\N{CYRILLIC CAPITAL LETTER A}AAA"],
)
def test_garbage_is_no_base64(text: str) -> None:
    with pytest.raises(ImageError, match="not base64"):
        image_of_url(f"data:image/png;base64,{text}")


@pytest.mark.parametrize("side", [7_000, 10_000, 65_000])
def test_a_bomb_is_our_error_and_no_warning(side: int) -> None:
    """Whether Pillow says nothing, warns, or refuses it."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(ImageError, match="at most 40,000,000 are decoded"):
            decode_image(png(side, zlib.compress(b"\0" * 100)))
    assert not seen


def png(side: int, pixels: bytes) -> bytes:
    """A PNG of right checksums with this as its compressed pixels: a bomb, or one that does not decode."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def saved(kind: str) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(noise(3, (60, 60)).data or b"")).save(file, format=kind)
    return file.getvalue()


def test_bytes_and_pixels_are_bounded() -> None:
    long = base64.b64encode(b"x" * (MOST_BYTES + 3)).decode()
    with pytest.raises(ImageError, match="MiB"):
        image_of_url(f"data:image/png;base64,{long}")
    with pytest.raises(ImageError, match="MiB"):
        decode_image(b"x" * (MOST_BYTES + 1))
    with pytest.raises(ImageError, match=r"pixels|decoded"):
        decode_image(png(65_000, zlib.compress(b"\0" * 100)))


@given(st.binary(max_size=300), st.integers(0, 60))
def test_broken_bytes_are_a_image_error_and_nothing_else(noise_: bytes, place: int) -> None:
    whole = RED.data or b""
    for data in (noise_, whole[:place], whole[:place] + noise_ + whole[place + len(noise_) :]):
        with contextlib.suppress(ImageError):
            assert decode_image(data).mode == "RGB"


def test_transparency_is_white_and_other_modes_are_rgb() -> None:
    def saved(image: Image.Image, kind: str) -> bytes:
        file = BytesIO()
        image.save(file, format=kind)
        return file.getvalue()

    clear = decode_image(saved(Image.new("RGBA", (2, 2), (0, 0, 0, 0)), "PNG"))
    assert clear.getpixel((0, 0)) == (255, 255, 255)
    for mode, kind in (("L", "PNG"), ("1", "PNG"), ("P", "GIF"), ("CMYK", "JPEG"), ("I;16", "PNG")):
        assert decode_image(saved(Image.new(mode, (3, 2)), kind)).size == (3, 2)
    with pytest.raises(ImageError, match="no format"):
        decode_image(saved(Image.new("RGB", (2, 2)), "TIFF"))


def test_task_files_name_images_by_path_url_and_column(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    one, two = noise(1), noise(2)
    (tmp_path / "images" / "one.png").write_bytes(one.data or b"")
    by_path = {"type": "image", "path": "images/one.png"}
    text = {"type": "text", "text": "what is this?"}
    rows = [
        {"prompt": [{"role": "user", "content": [by_path, text]}], "target": "a"},
        {"messages": [{"role": "user", "content": [text, {"type": "image", "image": url(two)}]}]},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, text]}],
            "images": ["images/one.png"],
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
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for part, said in (
        ({"type": "image", "path": "gone.png"}, r"gone\.png cannot be read"),
        ({"type": "image", "path": "images"}, "images cannot be read: it is not a file"),
        ({"type": "image", "path": "pipe"}, "pipe cannot be read: it is not a file"),
        ({"type": "image", "path": "loop"}, "loop"),
        ({"type": "image", "path": "a\0b"}, "null"),
        ({"type": "image", "path": "http://x/y.png"}, "not fetched"),
        ({"type": "image"}, "has no image"),
    ):
        file.write_text(json.dumps({"prompt": [{"role": "user", "content": [part]}]}))
        with pytest.raises(ConfigError, match=rf"line 1: .*{said}"):
            load_tasks(str(file))


def test_columns_of_tables_hold_images(tmp_path: Path) -> None:
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


KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
BROKEN = {
    "no image": b"hello, this is text",
    "bomb": png(65_000, zlib.compress(b"\0" * 100)),
    "empty": b"",
    **{f"half a {kind}": saved(kind)[: len(saved(kind)) // 2] for kind in KINDS},
    "damaged png": saved("PNG")[:200] + b"\0\0\0\0" + saved("PNG")[204:],
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("form", ["path", "image", "image_url"])
def test_a_broken_image_of_a_file_is_told_when_it_is_read(tmp_path: Path, name: str, form: str) -> None:
    (tmp_path / "good.png").write_bytes(RED.data or b"")
    (tmp_path / "bad.png").write_bytes(BROKEN[name])
    data = url(Media.image(BROKEN[name]))
    bad = {"type": "image", form: "bad.png" if form == "path" else data}
    bad = {"type": "image_url", "image_url": {"url": data}} if form == "image_url" else bad
    rows = [[{"type": "image", "path": "good.png"}], [bad]]
    file = tmp_path / "tasks.jsonl"
    lines = [json.dumps({"prompt": [{"role": "user", "content": row}]}) for row in rows]
    file.write_text("\n\n".join(lines))
    with pytest.raises(ConfigError) as told:
        load_tasks(str(file))
    assert "tasks.jsonl, line 3: " in str(told.value)
    assert name == "empty" or "save it again" in str(told.value)
    assert form != "path" or name == "empty" or "bad.png" in str(told.value)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("kind", KINDS)
@given(cut=st.integers(0, 40), more=st.binary(max_size=20))
def test_what_can_be_decoded_is_not_refused(kind: str, cut: int, more: bytes) -> None:
    data = saved(kind)
    data = data[: len(data) - cut] + more
    try:
        decode_image(data)
    except ImageError:
        return
    check_image(data)


def test_images_that_look_whole_and_are_not_have_their_file_and_line(tmp_path: Path) -> None:
    hidden = Media.image(png(64, b"no deflate stream"))
    part = {"type": "image", "image": url(hidden)}
    file = tmp_path / "tasks.jsonl"
    row = {"prompt": [{"role": "user", "content": [part]}]}
    file.write_text("\n" + json.dumps(row) + "\n" + json.dumps(row))
    tasks = load_tasks(str(file))  # decoding a thousand of them would take too long
    told = list(undecodable_images([message for task in tasks for message in task.messages]))
    assert len(told) == 1 and "tasks.jsonl, line 2: an image: an image cannot be decoded" in told[0]
    assert "origin" not in TypeAdapter(Task).dump_json(tasks[0]).decode()


def test_check_recipe_decodes_every_image(tmp_path: Path) -> None:
    hidden = Media.image(png(64, b"no deflate stream"))
    rows = [{"prompt": [{"role": "user", "content": [{"type": "image", "image": url(one)}]}], "target": "red"}
            for one in (RED, noise(1))]  # fmt: skip
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'rewards = ["exact_match"]\n[model.scratch]\nlayers = 1\nwidth = 32\n'
        '[tasks]\ntrain = "tasks.jsonl"\n[rl]\nsteps = 1\n'
    )
    done = CliRunner().invoke(app, ["check", "recipe", str(recipe)])
    assert done.exit_code == 0 and "the images of 2 messages can be decoded" in done.output
    rows[1]["prompt"][0]["content"][0]["image"] = url(hidden)
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = CliRunner().invoke(app, ["check", "recipe", str(recipe)])
    assert done.exit_code == 1 and "tasks.jsonl, line 2: " in " ".join(done.output.split())


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_frames_of_an_animation_are_images(form: str) -> None:
    frames = [Image.new("RGB", (8, 8), (number * 25, 0, 255 - number * 25)) for number in range(10)]
    file = BytesIO()
    more: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    frames[0].save(file, form, save_all=True, append_images=frames[1:], duration=100, **more)
    for most, places in ((3, [0, 4, 9]), (1, [0]), (20, list(range(10)))):
        found = video_frames(file.getvalue(), most)
        shown = [decode_image(one.data or b"").getpixel((3, 3)) for one in found]
        assert shown == [frames[place].getpixel((3, 3)) for place in places]
    assert video_frames(RED.data or b"")[0].is_image
    with pytest.raises(ImageError, match="no format that is read"):
        video_frames(b"\0\0\0\x20ftypisom")
    with pytest.raises(ValueError, match="at least one frame"):
        video_frames(RED.data or b"", 0)
