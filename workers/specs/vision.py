"""The vision tower of a model as plain data: which tower, its sizes, and how pixels become its inputs. Needs no torch.

As specs of layers do, a spec names the class and the weight map of its tower.
"""

from dataclasses import dataclass
from typing import ClassVar

from kernels.activation import Activation
from workers.wire.request import ImageInput

Grid = tuple[int, int, int]
"""Patches along time, height and width."""


@dataclass(frozen=True, kw_only=True)
class PixelScale:
    """Inputs of the tower from pixels of 0 to 255: (pixel * factor - mean) / std, by channel."""

    factor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """A vision transformer over the patches of images. Patches of one frame of one image see each other.

    channels, patch_size, temporal_patch_size   of a patch: colours, pixels a side, frames
    merge_size    merge_size x merge_size neighbouring patches become one row of the output, which follow each other
    output_size   width of a row of the output, that of the decoder
    grid_side     side of the square table of positions, which is resampled to the grid of an image
    deepstack     blocks with outputs of their own, which are added behind the first layers of the decoder, in order
    most_pixels   of an image behind the checkpoint's processor, as the processor counts them
    """

    tower: ClassVar[str]
    weights: ClassVar[str]

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    output_size: int
    grid_side: int
    norm_eps: float
    activation: Activation
    rope_theta: float
    scale: PixelScale
    most_pixels: int
    deepstack: tuple[int, ...] = ()

    @property
    def head_dim(self) -> int:
        """Values of a head; all are rotated, a half by the row of a patch and a half by its column."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values of a patch: channels, then frames, rows and columns."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """Patches of a token."""
        return self.merge_size**2

    @property
    def counted_frames(self) -> int:
        """How often the limits of the processor count each pixel of an image."""
        return 1

    @property
    def token_pixels(self) -> int:
        """Pixels of a token of an image, as the limits of the processor count them."""
        return self.counted_frames * (self.patch_size * self.merge_size) ** 2

    @property
    def largest(self) -> int:
        """Most tokens of an image that the checkpoint's processor makes."""
        return max(1, self.most_pixels // self.token_pixels)

    @property
    def mlp_weights(self) -> int:
        """Weights of the MLP of a block."""
        return 2 * self.hidden_size * self.intermediate_size

    def patch_flops(self, num_patches: int) -> int:
        """Return the FLOPs of a patch in a block, in products and in attention to the patches of its frame."""
        dim = self.hidden_size
        return 2 * (4 * dim**2 + self.mlp_weights) + 4 * num_patches * dim

    @property
    def num_outputs(self) -> int:
        """Outputs of a token: an embedding, and what layers of the decoder add to it."""
        return 1 + len(self.deepstack)

    def num_tokens(self, grid: Grid) -> int:
        """Return the tokens of an image."""
        frames, height, width = grid
        return frames * height * width // self.merged

    def problem(self, image: ImageInput) -> str | None:
        """Return what is wrong with an image; None: nothing."""
        grid, merge = image.grid_thw, self.merge_size
        if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            return f"grid_thw is {grid}; expected positive numbers, height and width multiples of {merge}"
        if image.num_tokens != self.num_tokens(grid):
            return f"num_tokens is {image.num_tokens}; grid_thw {grid} has {self.num_tokens(grid)}"
        num_bytes = image.num_tokens * self.merged * self.patch_dim
        if len(image.pixels) != num_bytes:
            return f"it has {len(image.pixels)} bytes of pixels; grid_thw {grid} has {num_bytes}"
        return None


@dataclass(frozen=True, kw_only=True)
class QwenVisionSpec(VisionSpec):
    """The tower of Qwen3-VL, Qwen3.5 and Qwen3.6: layer norms, MLPs without a gate, biases."""

    tower: ClassVar[str] = "workers.models.vision.qwen_tower:QwenTower"
    weights: ClassVar[str] = "workers.models.vision.weights:qwen_weights"


@dataclass(frozen=True, kw_only=True)
class GlmVisionSpec(VisionSpec):
    """The tower of GLM-4.5V: RMS norms, gated MLPs of the width `output_size`, few biases.

    intermediate_size   of the MLP behind the blocks
    qkv_bias            biases of q, k and v
    """

    tower: ClassVar[str] = "workers.models.vision.glm_tower:GlmTower"
    weights: ClassVar[str] = "workers.models.vision.weights:glm_weights"

    qkv_bias: bool = False

    @property
    def mlp_weights(self) -> int:
        """Weights of the gated MLP of a block."""
        return 3 * self.hidden_size * self.output_size

    @property
    def counted_frames(self) -> int:
        """Limits count the copies of an image that fill the frames of a patch."""
        return self.temporal_patch_size
