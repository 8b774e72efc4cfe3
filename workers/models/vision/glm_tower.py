"""The vision tower of GLM-4.5V. N patches, M tokens, D hidden, O width of an output."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.gated_activation import gated_activation
from workers.layers.norm import RMSNorm
from workers.models.vision.tower import LayerNorm, Projection, VisionBlock, VisionTower
from workers.specs.vision import GlmVisionSpec

MERGER_EPS = 1e-5


class GlmBlock(VisionBlock):
    """RMS norms, and a gated MLP as wide as an output of the tower."""

    def __init__(self, tower: "GlmTower"):
        super().__init__(tower.spec)
        dim, width = tower.spec.hidden_size, tower.spec.output_size
        self._activation = tower.spec.activation
        self.norm1, self.norm2 = tower.norm(), tower.norm()
        self.qkv = tower.projection(3 * dim, dim, bias=tower.spec.qkv_bias)
        self.out = tower.projection(dim, dim, bias=False)
        self.gate_up = tower.projection(2 * width, dim, bias=False)
        self.down = tower.projection(dim, width, bias=False)

    def mlp(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return down(activation(gate(x)) * up(x))."""
        return _gated(self.gate_up, self.down, x_ND, self._activation)


class GlmMerger:
    """A product, a norm and a gated MLP of each token."""

    def __init__(self, tower: "GlmTower"):
        dim, width = tower.spec.output_size, tower.spec.intermediate_size
        self._activation = tower.spec.activation
        self.proj = tower.projection(dim, dim, bias=False)
        self.norm = LayerNorm(dim, MERGER_EPS, device=tower.device, dtype=tower.dtype)
        self.gate_up = tower.projection(2 * width, dim, bias=False)
        self.down = tower.projection(dim, width, bias=False)

    def __call__(self, x_MO: torch.Tensor) -> torch.Tensor:
        """Return a new tensor [M, O]."""
        x_MO = F.gelu(self.norm(self.proj(x_MO)))
        return _gated(self.gate_up, self.down, x_MO, self._activation)


class GlmTower(VisionTower):
    """A norm before the positions, blocks, a norm, a product that joins neighbouring patches, and a merger."""

    resampling = "cubic"
    spec: GlmVisionSpec

    def __init__(self, spec: GlmVisionSpec, *, device: torch.device, dtype: torch.dtype):
        super().__init__(spec, device=device, dtype=dtype)
        dim = spec.hidden_size
        self.first_norm, self.last_norm = self.norm(), self.norm()
        self.merge = self.projection(spec.output_size, dim * spec.merged, bias=True)
        self.merger = GlmMerger(self)

    def norm(self) -> RMSNorm:
        """Return an uninitialised norm of a patch."""
        shape, eps = (self.spec.hidden_size,), self.spec.norm_eps
        return RMSNorm(shape, eps, device=self.device, dtype=self.dtype)

    def _block(self) -> GlmBlock:
        return GlmBlock(self)

    def _begin(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.first_norm(x_ND)

    def _run(
        self, x_ND: torch.Tensor, through: Callable[[VisionBlock, torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        for block in self.blocks:
            x_ND = through(block, x_ND)
        # The checkpoint's product takes all neighbours of one channel side by side.
        joined = self.last_norm(x_ND).view(-1, self.spec.merged, self.spec.hidden_size)
        return [self.merger(self.merge(joined.transpose(1, 2).flatten(1)))]


def _gated(
    gate_up: Projection, down: Projection, x: torch.Tensor, activation: Activation
) -> torch.Tensor:
    return down(gated_activation(gate_up(x), activation))
