"""An image or a video of a request, by its place there. Knows nothing of files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from cluster.errors import BadRequestError

INVALID = "invalid_image"
"""Code of errors of what an image or a video is."""
MediaKind = Literal["image", "video"]


class Medium(NamedTuple):
    """An image or a video of a request. number: among those of its kind, from 0."""

    kind: MediaKind
    number: int
    url: str


class UnreadImages(ValueError):
    """Images or videos of a body that cannot be read here: in an event loop, or before their URLs were fetched.

    remote   those that must be fetched
    """

    def __init__(self, remote: list[Medium]) -> None:
        super().__init__(remote)
        self.remote = remote


@contextmanager
def numbered(medium: Medium) -> Iterator[None]:
    """Raise errors of the client as errors of an image or a video of the request."""
    try:
        yield
    except BadRequestError as error:
        message = f"{medium.kind} {medium.number}: {error.message}"
        raise BadRequestError(message, param="messages", code=error.code) from None
