"""Bounds of a body that is large because of its images and videos: all else of it has the limit of a body of text."""

from typing import Any

from cluster.errors import BodyTooLargeError

_SEPARATORS = (b",", b"[", b"{")


def check_before_parsing(body: bytes, max_bytes: int) -> None:
    """Raise BodyTooLargeError for a body of more JSON values than one of `max_bytes` can have.

    A value takes up to 60 bytes of memory for two bytes of the body; an image or a video is one value.
    """
    if len(body) > max_bytes < sum(map(body.count, _SEPARATORS)):
        raise _too_large(len(body), max_bytes)


def check_parsed(body: bytes, value: dict[str, Any], max_bytes: int) -> None:
    """Raise BodyTooLargeError if a body has more than `max_bytes` beside its images and videos. `value` is its JSON."""
    if len(body) > max_bytes:
        rest = len(body) - _num_media_bytes(value)
        if rest > max_bytes:
            raise _too_large(rest, max_bytes)


def _num_media_bytes(value: Any) -> int:
    """Return the characters of images and videos in all parts of messages, in the forms of the three APIs."""
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(item)
        elif isinstance(item, dict):
            total += _num_chars(item)
            todo.extend(item.values())
    return total


def _num_chars(part: dict[str, Any]) -> int:
    match part:
        case {"type": "image_url", "image_url": {"url": str(text)}}:
            return len(text)
        case {"type": "image_url" | "input_image", "image_url": str(text)}:
            return len(text)
        case {"type": "video_url", "video_url": {"url": str(text)} | str(text)}:
            return len(text)
        case {"type": "image", "source": {"data": str(text)}}:
            return len(text)
    return 0


def _too_large(num_bytes: int, max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has {num_bytes} bytes beside its images and videos, the limit is {max_bytes}"
    )
