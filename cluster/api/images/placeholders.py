"""Places images in a prompt: a placeholder of the chat template becomes as many tokens as its image has.

A video becomes text with a placeholder for each of its parts, before the text becomes tokens. transformers' processors
repeat all placeholders in the text. The tokens are the same, because no tokenizer joins a special token with its
neighbours.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.api.images.medium import INVALID, MediaKind
from cluster.api.images.opened import OpenedImage
from cluster.api.videos.opened import OpenedVideo, VideoPart
from cluster.errors import BadRequestError

Part = OpenedImage | VideoPart
"""What has tokens side by side."""


@dataclass(frozen=True)
class PlacedImage:
    """An image, or a part of a video, and the place of its first token in the prompt."""

    offset: int
    image: Part

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.offset + self.image.num_tokens


def place_videos(text: str, marker: str, videos: Sequence[OpenedVideo]) -> str:
    """Return a prompt with the texts of videos in the place of their markers. Raises BadRequestError."""
    first, *others = text.split(marker)
    if len(others) != len(videos):
        raise _miscounted(len(others), len(videos), "video")
    texts = ["".join(video.texts) for video in videos]
    return first + "".join(a + b for a, b in zip(texts, others, strict=True))


def place_images(
    token_ids: Sequence[int], ids: Mapping[MediaKind, int], images: Sequence[Part]
) -> tuple["array[int]", tuple[PlacedImage, ...]]:
    """Return the token ids, int32, with all tokens of the images, and where the images are. Raises BadRequestError.

    ids      the placeholder of each kind; `token_ids` have it once for each of `images`
    """
    wanted = [ids[image.kind] for image in images]
    kinds = set(wanted)
    places = [place for place, id_ in enumerate(token_ids) if id_ in kinds]
    found = [token_ids[place] for place in places]
    for kind, id_ in ids.items():
        if id_ in wanted and found.count(id_) != wanted.count(id_):
            raise _miscounted(found.count(id_), wanted.count(id_), kind)
    if found != wanted:
        raise BadRequestError(
            "the chat template of this model changes the order of images and videos",
            param="messages",
            code=INVALID,
        )
    placed: list[PlacedImage] = []
    whole, start = array("i"), 0
    for image, place in zip(images, places, strict=True):
        whole.extend(token_ids[start:place])
        placed.append(PlacedImage(len(whole), image))
        whole.extend([token_ids[place]] * image.num_tokens)
        start = place + 1
    whole.extend(token_ids[start:])
    return whole, tuple(placed)


def _miscounted(found: int, expected: int, kind: MediaKind) -> BadRequestError:
    reason = (
        "the text of a message contains the placeholder itself; remove it"
        if found > expected
        else f"the chat template of this model leaves {kind}s out"
    )
    return BadRequestError(
        f"the prompt has {found} placeholders for {expected} {kind}s: {reason}",
        param="messages",
        code=INVALID,
    )


def keep_last(
    token_ids: "array[int]", images: Sequence[PlacedImage], keep: int
) -> tuple["array[int]", tuple[PlacedImage, ...]]:
    """Return the last `keep` tokens and their images. An image that would be cut is left out as a whole."""
    first = max(0, len(token_ids) - keep)
    for placed in images:
        if placed.offset < first < placed.end:
            first = placed.end
    kept = (PlacedImage(it.offset - first, it.image) for it in images if it.offset >= first)
    return token_ids[first:], tuple(kept)
