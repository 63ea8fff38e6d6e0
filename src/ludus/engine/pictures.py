"""From the bytes of a picture to its pixels. Whoever sent them may be hostile."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from ludus.core.failures import MissingExtraError
from ludus.core.pictures import FORMATS, MOST_BYTES, MOST_PIXELS, PictureError, too_large

if TYPE_CHECKING:
    from PIL.Image import Image


def decode_picture(data: bytes) -> Image:
    """The pixels, in RGB; what is transparent is white."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingExtraError("pillow", "vision", "a picture that a model is shown") from None
    if len(data) > MOST_BYTES:
        raise too_large()
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            if width * height > MOST_PIXELS:  # nothing is decoded yet
                raise PictureError(
                    f"a picture has {width} x {height} pixels, and at most {MOST_PIXELS:,} are decoded"
                )
            picture = ImageOps.exif_transpose(opened)
            if "A" in picture.getbands() or "transparency" in picture.info:
                layered = picture.convert("RGBA")
                picture = Image.new("RGB", layered.size, "white")
                picture.paste(layered, mask=layered.getchannel("A"))
            return picture.convert("RGB")
    except PictureError:
        raise
    except UnidentifiedImageError:
        raise PictureError(f"a picture is in no format that is read ({', '.join(FORMATS)})") from None
    except Exception as error:  # noqa: BLE001 - decoders raise whatever broken bytes make of them
        raise PictureError(
            f"a picture cannot be decoded: {type(error).__name__}: {error!s:.200}"
        ) from None
