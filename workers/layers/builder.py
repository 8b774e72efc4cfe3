"""What the blocks of a model are built from: device, dtype, backends and this rank's experts. Knows no model."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from kernels.backends.select import Backends
from kernels.block_fp8 import BlockWeights
from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.routing.expert_map import ExpertMap
from kernels.routing.forced_routing import ForcedRouting
from workers.layers.linear import DenseLinear, FourBitLinear, Fp8Linear, Linear
from workers.layers.norm import RMSNorm

Copies = Literal["auto", "one", "all"]


@dataclass(frozen=True)
class Placement:
    """How a model may place its experts.

    movable   the map may change while the layers serve, so routing reads a table even where slots are experts
    copies    which copy of an expert rows take: one = the first; all = all in turn; auto = all in forwards with prompts
    """

    movable: bool = False
    copies: Copies = "auto"


STILL = Placement()
"""The map of a process stays while it serves."""


@dataclass(frozen=True, kw_only=True)
class LayerBuilder:
    """Allocates parameters and gives each block its backends.

    forced_routing   makes the replacement of a layer's router; None: routers choose
    path             begins the names of a layer's parameters: "layers.3."
    fp8              names of the parameters that are held in FP8
    four_bit         names of the parameters that are held in four bits, to their formats
    norm_offset      ModelConfig.norm_offset
    placement        how experts may be placed, and which copy of an expert a row takes
    """

    hidden_size: int
    norm_eps: float
    backends: Backends
    expert_map: ExpertMap
    rank: int
    device: torch.device
    dtype: torch.dtype
    forced_routing: Callable[..., ForcedRouting] | None = None
    path: str = ""
    fp8: Container[str] = frozenset()
    four_bit: Mapping[str, FourBitFormat] = field(default_factory=dict)
    norm_offset: float = 0.0
    placement: Placement = STILL

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised parameter, of the model's dtype unless another is given."""
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def holds_fp8(self, name: str) -> bool:
        """Return whether the weight of the linear layer `name` of this layer is held in FP8."""
        return f"{self.path}{name}.weight" in self.fp8

    def linear(self, name: str, outputs: int, inputs: int, *, bias: bool = False) -> Linear:
        """Return an uninitialised linear layer, in four bits or in FP8 where its `name` is held so."""
        form = self.four_bit.get(f"{self.path}{name}.weight")
        if form is not None:
            tiled = self.device.type == "cuda"
            packed = FourBitWeights.empty(form, outputs, inputs, device=self.device, tiled=tiled)
            return FourBitLinear(packed, self.empty(outputs) if bias else None)
        if not self.holds_fp8(name):
            return self.dense(outputs, inputs, bias=bias)
        weight = BlockWeights.empty(outputs, inputs, device=self.device)
        return Fp8Linear(weight, self.empty(outputs) if bias else None)

    def dense(self, outputs: int, inputs: int, *, bias: bool = False) -> DenseLinear:
        """Return an uninitialised linear layer of the model's dtype."""
        return DenseLinear(self.empty(outputs, inputs), self.empty(outputs) if bias else None)

    def norm(self, *shape: int, eps: float | None = None, centred: bool = True) -> RMSNorm:
        """Return a norm over the last dim of `shape`, with the layer's eps unless another is given.

        centred   `norm_offset` is added to its weights, which are then float32: 16 bits would round the sum
        """
        eps = self.norm_eps if eps is None else eps
        dtype = torch.float32 if centred and self.norm_offset else self.dtype
        return RMSNorm(shape, eps, device=self.device, dtype=self.dtype, weight_dtype=dtype)
