"""Places images in a prompt: a placeholder of the chat template becomes as many tokens as its image has.

transformers' processors repeat the placeholder in the text. The tokens are the same, because no tokenizer joins a
special token with its neighbours.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.api.images.opened import OpenedImage
from cluster.errors import BadRequestError


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the place of its first token in the prompt."""

    offset: int
    image: OpenedImage

    @property
    def end(self) -> int:
        """The place behind its last token."""
        return self.offset + self.image.num_tokens


def place_images(
    token_ids: Sequence[int], token_id: int, images: Sequence[OpenedImage]
) -> tuple["array[int]", tuple[PlacedImage, ...]]:
    """Return the token ids, int32, with all tokens of the images, and where the images are. Raises BadRequestError.

    token_id   the placeholder; `token_ids` have it once for each image
    """
    found = list(token_ids).count(token_id)
    if found != len(images):
        reason = (
            "the text of a message contains the placeholder itself; remove it"
            if found > len(images)
            else "the chat template of this model leaves images out"
        )
        raise BadRequestError(
            f"the prompt has {found} placeholders for {len(images)} images: {reason}",
            param="messages",
            code="invalid_image",
        )
    placed: list[PlacedImage] = []
    whole, start = array("i"), 0
    for image in images:
        end = token_ids.index(token_id, start)
        whole.extend(token_ids[start:end])
        placed.append(PlacedImage(len(whole), image))
        whole.extend([token_id] * image.num_tokens)
        start = end + 1
    whole.extend(token_ids[start:])
    return whole, tuple(placed)


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
