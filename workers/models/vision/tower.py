"""A vision tower: patches of images become the embeddings of their tokens. Knows nothing of requests and of threads.

N patches of all images of a call, D hidden, H heads, d head dim, P values of a patch, M tokens, X outputs of a token,
O width of an output. Weights are plain tensors, as in `workers.models.layer_stack`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import torch
from torch.nn import functional as F

from workers.layers.rope import norm_and_rotate
from workers.models.vision.grids import Resampling, resample, rotations
from workers.specs.vision import Grid, VisionSpec

Pause = Callable[[], None]


def _go_on() -> None:
    """The tower never waits."""


class Projection:
    """x @ weight.T + bias in the tower's dtype; weight [outputs, inputs]."""

    def __init__(
        self, outputs: int, inputs: int, *, bias: bool, device: torch.device, dtype: torch.dtype
    ):
        self.weight = torch.empty(outputs, inputs, device=device, dtype=dtype)
        self.bias = torch.empty(outputs, device=device, dtype=dtype) if bias else None

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [T, outputs]."""
        return F.linear(x_TK, self.weight, self.bias)


class LayerNorm:
    """Norm of mean and deviation over the last dim. load_scale: as of RMSNorm."""

    load_scale = 1.0

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype):
        self.weight = torch.empty(size, device=device, dtype=dtype)
        self.bias = torch.empty(size, device=device, dtype=dtype)
        self._eps = eps

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of x's shape and dtype."""
        return F.layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self._eps)


class VisionBlock(ABC):
    """One layer of a tower: attention inside each frame, then an MLP, each behind a norm and added.

    A subclass allocates norm1, qkv, out and norm2.
    """

    qkv: Projection
    out: Projection
    norm1: Callable[[torch.Tensor], torch.Tensor]
    norm2: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, spec: VisionSpec):
        self._heads, self._head_dim = spec.num_heads, spec.head_dim

    @abstractmethod
    def mlp(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [N, D]."""

    def forward(
        self, x_ND: torch.Tensor, rotation_N1r: torch.Tensor, frames: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return x after the layer, in x's memory. frames: (how many follow each other, patches of each)."""
        x_ND += self.out(self._attend(self.norm1(x_ND), rotation_N1r, frames))
        x_ND += self.mlp(self.norm2(x_ND))
        return x_ND

    def _attend(
        self, x_ND: torch.Tensor, rotation_N1r: torch.Tensor, frames: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        heads, dim = self._heads, self._head_dim
        qkv_NHd = self.qkv(x_ND).view(-1, 3 * heads, dim)
        qk_NHd = norm_and_rotate(None, qkv_NHd[:, : 2 * heads], rotation_N1r)
        parts = qk_NHd[:, :heads], qk_NHd[:, heads:], qkv_NHd[:, 2 * heads :]
        start, found = 0, []
        for count, length in frames:
            end = start + count * length
            q, k, v = (
                torch.unflatten(it[start:end], 0, (count, length)).transpose(1, 2) for it in parts
            )
            attended = F.scaled_dot_product_attention(q, k, v)
            found.append(attended.transpose(1, 2).reshape(end - start, heads * dim))
            start = end
        return found[0] if len(found) == 1 else torch.cat(found)


class VisionTower(ABC):
    """Patches, positions, blocks and the output of a tower, on one device. `load_weights` fills it.

    A subclass makes the blocks, and the output of their results.
    """

    resampling: Resampling

    def __init__(self, spec: VisionSpec, *, device: torch.device, dtype: torch.dtype):
        self.spec, self.device, self.dtype = spec, device, dtype
        self.patches = self.projection(spec.hidden_size, spec.patch_dim, bias=True)
        self.table_GD = torch.empty(spec.grid_side**2, spec.hidden_size, device=device, dtype=dtype)
        self.blocks = [self._block() for _ in range(spec.depth)]
        # The scale of the first channel stands for all values of the patch that have it, and so on.
        scale, repeats = spec.scale, spec.patch_dim // spec.channels
        mean, std = (torch.tensor(it).repeat_interleave(repeats) for it in (scale.mean, scale.std))
        self._shift_P, self._spread_P = ((it / scale.factor).to(device) for it in (mean, std))

    def projection(self, outputs: int, inputs: int, *, bias: bool) -> Projection:
        """Return an uninitialised projection."""
        return Projection(outputs, inputs, bias=bias, device=self.device, dtype=self.dtype)

    @abstractmethod
    def _block(self) -> VisionBlock:
        """Return an uninitialised layer."""

    def _begin(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the embedded patches as positions are added to them."""
        return x_ND

    @abstractmethod
    def _run(
        self, x_ND: torch.Tensor, through: Callable[[VisionBlock, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the X outputs of all tokens, each [M, O]; `through` runs a block."""

    @torch.inference_mode()
    def forward(
        self, pixels_NP: torch.Tensor, grids: Sequence[Grid], pause: Pause = _go_on
    ) -> torch.Tensor:
        """Return the outputs of the tokens of all images, [M, X, O] in the tower's dtype.

        pixels   uint8, as of ImageInput, on the tower's device
        grids    of the images, one behind the other
        pause    is called before each block
        """
        x_ND = self._begin(self.patches(self._scaled(pixels_NP)))
        x_ND += self._positions(grids)
        rotation_N1r, frames = self._rotations(grids), _frames(grids)

        def through(block: VisionBlock, x_ND: torch.Tensor) -> torch.Tensor:
            pause()
            return block.forward(x_ND, rotation_N1r, frames)

        return torch.stack(self._run(x_ND, through), 1)

    def _scaled(self, pixels_NP: torch.Tensor) -> torch.Tensor:
        return ((pixels_NP.float() - self._shift_P) / self._spread_P).to(self.dtype)

    def _positions(self, grids: Iterable[Grid]) -> torch.Tensor:
        merge = self.spec.merge_size
        return torch.cat(
            [
                resample(self.table_GD, h, w, merge, self.resampling).repeat(t, 1)
                for t, h, w in grids
            ]
        )

    def _rotations(self, grids: Iterable[Grid]) -> torch.Tensor:
        spec = self.spec
        of_head = spec.head_dim, spec.rope_theta, self.device
        return torch.cat(
            [rotations(h, w, spec.merge_size, *of_head).repeat(t, 1, 1) for t, h, w in grids]
        )


def _frames(grids: Iterable[Grid]) -> list[tuple[int, int]]:
    """Return (number, patches of each) of frames of equal size that follow each other."""
    sizes = [h * w for t, h, w in grids for _ in range(t)]
    return [(len(list(equal)), size) for size, equal in groupby(sizes)]
