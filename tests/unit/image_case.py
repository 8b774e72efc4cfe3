"""A tokenizer and a chat template with placeholders of images, a small geometry, and image files."""

import base64
import io
import json
import struct
import zlib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken

from cluster.api.images.geometry import Geometry
from cluster.api.images.medium import Medium
from cluster.api.images.settings import ImageSettings
from cluster.api.tokenizer import ServingTokenizer, load_tokenizer
from scripts.byte_tokenizer import byte_tokenizer, save_tokenizer
from tests.unit.api_fakes import Api, FakeBackend, tiny_checkpoint

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, PAD, VIDEO_PAD = 259, 260, 261, 262
# As Qwen3-VL's: parts one after another, an image or a video as a placeholder between two marks.
TEMPLATE = r"""
{%- macro render(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- else -%}
    {%- for part in content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' + render(message.content) + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()
SMALL = Geometry(patch_size=4, merge_size=2, min_pixels=64, max_pixels=64 * 64)
"""8 x 8 pixels a token, at most 64 tokens."""

_FOLDER = TemporaryDirectory()  # kept to the end: processes of bodies load the tokenizer from there


def add_vision_tokens(
    folder: Path, tokens: tuple[str, ...] = VISION_TOKENS, template: str = TEMPLATE
) -> None:
    """Give a checkpoint with the byte tokenizer the tokens of images and videos, and the template."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in tokens])
    save_tokenizer(folder, tokenizer, 4096)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps(settings))


@cache
def vision_tokenizer() -> ServingTokenizer:
    """Id b < 256 is byte b; START, END, PAD and VIDEO_PAD are those of images and videos."""
    folder = tiny_checkpoint(Path(_FOLDER.name) / "vision")
    add_vision_tokens(folder)
    return load_tokenizer(folder)


def vision_api(backend: FakeBackend, images: dict[str, Any] | None = None, **settings: Any) -> Api:
    """An API that takes images."""
    found = ImageSettings(**{"token_id": PAD, "geometry": SMALL} | (images or {}))
    return Api(backend, vision_tokenizer(), images=found, **settings)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image of random pixels."""
    shape = height, width, 3
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_at(url: str, number: int = 0) -> Medium:
    """An image of a request by its URL."""
    return Medium("image", number, url)


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def png(width: int, height: int) -> bytes:
    """A PNG that has a size of its own choice in its header, and hardly any data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
