"""The vision tower of Qwen3-VL, Qwen3.5 and Qwen3.6. N patches, M tokens, D hidden, O width of an output."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from kernels.activation import Activation
from workers.models.vision.tower import LayerNorm, VisionBlock, VisionTower
from workers.specs.vision import QwenVisionSpec


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of an MLP without a gate."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class QwenBlock(VisionBlock):
    """Layer norms, and an MLP of two products."""

    def __init__(self, tower: "QwenTower"):
        super().__init__(tower.spec)
        dim, width = tower.spec.hidden_size, tower.spec.intermediate_size
        self._activation = tower.spec.activation
        self.norm1, self.norm2 = tower.norm(dim), tower.norm(dim)
        self.qkv = tower.projection(3 * dim, dim, bias=True)
        self.out = tower.projection(dim, dim, bias=True)
        self.up = tower.projection(width, dim, bias=True)
        self.down = tower.projection(dim, width, bias=True)

    def mlp(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return down(activation(up(x)))."""
        return self.down(activate(self.up(x_ND), self._activation))


class QwenMerger:
    """Joins neighbouring patches to tokens. after: the norm is over the joined values, not over those of a patch."""

    def __init__(self, tower: "QwenTower", *, after: bool):
        spec = tower.spec
        self._size, self._after = spec.hidden_size * spec.merged, after
        self.norm = tower.norm(self._size if after else spec.hidden_size)
        self.up = tower.projection(self._size, self._size, bias=True)
        self.down = tower.projection(spec.output_size, self._size, bias=True)

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [M, O]."""
        normed = self.norm(x_ND.view(-1, self._size) if self._after else x_ND)
        return self.down(F.gelu(self.up(normed.view(-1, self._size))))


class QwenTower(VisionTower):
    """Blocks, then a merger; with deepstack, mergers behind some blocks too.

    mergers   of the last block, then of the blocks of `spec.deepstack`
    """

    resampling = "linear"
    spec: QwenVisionSpec

    def __init__(self, spec: QwenVisionSpec, *, device: torch.device, dtype: torch.dtype):
        super().__init__(spec, device=device, dtype=dtype)
        self.mergers = [QwenMerger(self, after=number > 0) for number in range(spec.num_outputs)]

    def norm(self, size: int) -> LayerNorm:
        """Return an uninitialised norm."""
        return LayerNorm(size, self.spec.norm_eps, device=self.device, dtype=self.dtype)

    def _block(self) -> QwenBlock:
        return QwenBlock(self)

    def _run(
        self, x_ND: torch.Tensor, through: Callable[[VisionBlock, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        mergers = dict(zip(self.spec.deepstack, self.mergers[1:], strict=True))
        found: dict[int, torch.Tensor] = {}
        for number, block in enumerate(self.blocks):
            x_ND = through(block, x_ND)
            if number in mergers:
                found[number] = mergers[number](x_ND)
        return [self.mergers[0](x_ND), *(found[number] for number in self.spec.deepstack)]
