"""Image files of clients: formats by content, what becomes of colours and turns, and files that cannot be read."""

import io

import numpy as np
import pytest
from PIL import Image

from cluster.api.images.geometry import Geometry
from cluster.api.images.opened import open_image
from cluster.errors import BadRequestError
from tests.unit.image_case import SMALL, as_file, image_at, noise, png

PLAIN = Geometry(patch_size=1, merge_size=1, frames=1, min_pixels=1, max_pixels=2**22)
"""One pixel a token, so that patches are the pixels of the file."""
LIMIT = 2**20


def pixels_of(data: bytes) -> np.ndarray:
    """The pixels [height, width, 3] as the model gets them."""
    found = open_image(image_at("", 3), data, PLAIN, LIMIT).read(0)
    rows, columns = found.grid_thw[1:]
    return np.frombuffer(found.pixels, np.uint8).reshape(rows, columns, 3)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95})],
)
def test_formats(kind: str, options: dict[str, object]) -> None:
    image = noise(17, 9)
    data = as_file(image, kind, **options)
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(pixels_of(data), expected)
    if kind != "JPEG":
        assert np.array_equal(pixels_of(data), np.asarray(image))


def test_colours() -> None:
    grey = np.linspace(0, 65535, 12, dtype=np.uint16).reshape(3, 4)
    found = pixels_of(as_file(Image.fromarray(grey)))  # 16 bits
    assert np.array_equal(found, np.repeat((grey >> 8)[..., None], 3, 2))
    image = noise(6, 5)
    cmyk = as_file(image.convert("CMYK"), "JPEG", quality=95)
    assert np.array_equal(pixels_of(cmyk), np.asarray(Image.open(io.BytesIO(cmyk)).convert("RGB")))
    palette = image.quantize(16)
    assert np.array_equal(pixels_of(as_file(palette)), np.asarray(palette.convert("RGB")))
    bits = Image.fromarray(np.eye(4, dtype=bool))
    assert np.array_equal(pixels_of(as_file(bits))[..., 0], 255 * np.eye(4))


def test_transparent_parts_become_white() -> None:
    image = noise(4, 4).convert("RGBA")
    image.putalpha(Image.fromarray(np.array([[0, 255] * 2] * 4, np.uint8)))
    found = pixels_of(as_file(image))
    assert (found[:, ::2] == 255).all()
    assert np.array_equal(found[:, 1::2], np.asarray(image)[:, 1::2, :3])
    palette = noise(4, 4).quantize(4)
    see_through = pixels_of(as_file(palette, transparency=0))
    assert (see_through[np.asarray(palette) == 0] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_by_exif(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = noise(5, 3)
    found = pixels_of(as_file(image, exif=exif))
    assert found.shape == ((5, 3, 3) if orientation > 4 else (3, 5, 3))
    assert sorted(map(tuple, found.reshape(-1, 3))) == sorted(
        map(tuple, np.asarray(image).reshape(-1, 3))
    )
    if orientation == 6:  # a quarter turn
        assert np.array_equal(found, np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = as_file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (pixels_of(data) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is no PNG"),
        (b"hello, I am no image", "is no PNG, JPEG, WEBP, GIF, BMP"),
        (as_file(noise(4, 4), "TIFF"), "is no PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
        (as_file(noise(40, 40))[:200], "cannot be read"),
        (as_file(noise(40, 40), "JPEG")[:700], "truncated"),
        (as_file(noise(40, 40), "WEBP")[:100], "is no PNG|cannot be read"),
        (as_file(noise(40, 40), "GIF")[:60], "cannot be read|is no PNG|truncated"),
        (as_file(noise(40, 40), "BMP")[:100], "truncated"),
        (as_file(noise(40, 40)).replace(b"IDAT", b"IDAX"), "is no PNG"),
        (png(4_000, 4_000), "has 4000 x 4000 pixels, more than 1048576"),
        (png(40_000, 40_000), "has 40000 x 40000 pixels|exceeds limit"),
        (png(100, 100), "truncated|cannot be read"),
        (png(0, 5), "is no PNG|cannot be read"),
        (as_file(noise(1, 201)), "1 x 201 pixels; one side may be 200 times"),
    ],
)
def test_files_that_cannot_be_read(data: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as error:
        open_image(image_at("", 7), data, SMALL, LIMIT).read(0)
    assert error.value.message.startswith("image 7: it ") and error.value.param == "messages"


def test_the_digest_is_of_pixels_and_grid() -> None:
    image = noise(16, 8)
    first = open_image(image_at("", 0), as_file(image), SMALL, LIMIT).read(5)
    again = open_image(image_at("", 1), as_file(image, "BMP"), SMALL, LIMIT).read(9)
    assert first.digest == again.digest and (first.offset, again.offset) == (5, 9)
    assert first.num_tokens * SMALL.bytes_of_token == len(first.pixels)
    others = [
        open_image(image_at("", 0), as_file(it), SMALL, LIMIT).read(5).digest
        for it in (noise(16, 8, 1), image.transpose(Image.Transpose.ROTATE_90), noise(24, 8))
    ]
    smaller = SMALL.within(None, 64)
    others.append(open_image(image_at("", 0), as_file(image), smaller, LIMIT).read(5).digest)
    white = [Image.new("RGB", size, "white") for size in ((16, 8), (8, 16))]
    others += [
        open_image(image_at("", 0), as_file(it), SMALL, LIMIT).read(5).digest for it in white
    ]
    assert len({first.digest, *others}) == 7
