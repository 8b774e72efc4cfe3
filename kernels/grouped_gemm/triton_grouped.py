"""The experts' MLP in two launches of persistent Triton kernels: no library, any float dtype.

The kernels read gathered rows through the routing; gate and up never reach memory. Tile shapes were measured on one
H200 with 32 experts of hidden 2048 and width 768; see docs/results/gpu-experts.md.

R permuted rows, D hidden, I expert width, e local experts.
"""

from functools import partial
from typing import Any

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.grouped_gemm.base import Biases, GroupedGemm, unaligned_reason
from kernels.grouped_gemm.unfused import activate_used, unfused_mlp
from kernels.host.capability import too_old_gpu
from kernels.host.hopper import on_hopper
from kernels.host.triton_version import triton_unavailable
from kernels.interface.backend import BackendShape
from kernels.lora.experts import ExpertAdapters
from kernels.pending import wait_previous_ubatch
from kernels.routing.device_routing import DeviceRouting

# Mean rows of an expert up to which most experts have none. With 64 of 128 experts on an H200, top-8, the first product
# takes 10.5 us for one row (13.3 with the next tile), 27.1 for four (30.3), 43.3 for eight (42.1).
FEW_ROWS = 0.25


class TritonGroupedGemm(GroupedGemm):
    """bfloat16, float16 and (slowly, for comparisons) float32 on GPUs."""

    name = "triton"
    devices = ("cuda",)
    # docs/results/gpu-experts.md
    auto = (
        "the fastest in bfloat16 on an H200 at any size of step: 92 us a layer for 998 rows, "
        "335 us for 16,347 (deepgemm 127 and 377, torch_grouped 137 and 424)"
    )
    distributions = ("triton",)
    adds_biases = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return triton_unavailable() or too_old_gpu(device, (8, 0))

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        return unaligned_reason(shape, cls.name)

    @classmethod
    def step_bytes(cls, shape: BackendShape, num_rows: int) -> int:
        """See GroupedGemm. It copies no rows into expert order, and stores gate and up for adapters alone."""
        width = shape.moe_intermediate_size
        widths = shape.hidden_size + (3 * width if shape.expert_adapters else width)
        return num_rows * widths * shape.dtype.itemsize

    def __init__(self, num_sms: int | None = None, *, hopper: bool | None = None):
        """hopper: use the kernels for Hopper where many rows are multiplied; None: if this GPU is a Hopper."""
        from kernels.triton import grouped_gemm

        self._kernel = grouped_gemm
        self._hopper: Any = None
        hopper = on_hopper() if hopper is None else hopper
        if hopper:
            from kernels.triton import hopper_gemm

            self._hopper = hopper_gemm
        self._all_sms = num_sms or torch.cuda.get_device_properties().multi_processor_count
        self._num_sms = self._all_sms

    def set_num_sms(self, num_sms: int | None) -> None:
        """At most this many SMs from the next call on."""
        assert num_sms is None or num_sms > 0, num_sms
        self._num_sms = min(num_sms or self._all_sms, self._all_sms)

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: torch.Tensor,
        w2_eDI: torch.Tensor,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        routing, x = expert_input.device_routing(), expert_input.x_RD
        row_R = routing.row_R if expert_input.routing else None
        b13_e2I, b2_eD = biases or (None, None)
        no_terms = biases is None and adapters is None
        up, down = self._tiles(routing, x, row_R, hopper=no_terms)
        bounds = (routing.starts_e, routing.ends_e, routing.num_permuted)
        product = partial(self._kernel.grouped_gemm, num_sms=self._num_sms)
        plain = partial(product, activation=None, tile=down)
        if adapters is not None and len(routing.ends_e):
            return unfused_mlp(
                expert_input,
                adapters,
                up=lambda: plain(x, row_R, w13_e2ID, *bounds, bias=b13_e2I),
                activate=lambda h_R2I: activate_used(h_R2I, routing.ends_e, activation),
                down=lambda h_RI: plain(h_RI, None, w2_eDI, *bounds, bias=b2_eD),
            )
        h_RI = product(*(x, row_R, w13_e2ID, *bounds), activation=activation, tile=up, bias=b13_e2I)
        wait_previous_ubatch()
        return plain(h_RI, None, w2_eDI, *bounds, bias=b2_eD)

    def _tiles(
        self,
        routing: DeviceRouting,
        x: torch.Tensor,
        row_R: torch.Tensor | None,
        *,
        hopper: bool = True,
    ) -> tuple[Any, Any]:
        """Return the tiles of the two products for the mean number of rows of an expert.

        hopper   allow the kernels for Hopper, which add no biases
        """
        mean = routing.expected / max(1, len(routing.ends_e))
        up, down = self._tiles_of_any_gpu(mean, x.dtype)
        if hopper and self._hopper is not None and x.dtype != torch.float32:
            if mean <= FEW_ROWS:  # tiles are fewer than SMs: each program reads further ahead
                up = self._kernel.TileShape(16, 64, 128, 4, 5, 1, early=True)
            if mean > 768 and self._hopper.takes(x, row_R):
                up = self._hopper.HopperTile(columns=128, stages=4)
            if mean > 192:
                down = self._hopper.HopperTile(columns=256, stages=3)
        return up, down

    def _tiles_of_any_gpu(self, mean: float, dtype: torch.dtype) -> tuple[Any, Any]:
        TileShape = self._kernel.TileShape
        if dtype == torch.float32:
            tile = TileShape(16, 32, 32, num_warps=4, num_stages=2)
            return tile, tile
        if mean <= 10:
            few = partial(TileShape, 16, 64, 128, 4, 3, early=True)
            return few(2), few(3)
        if mean <= 48:
            return TileShape(64, 64, 64, 4, 3, 3), TileShape(64, 64, 128, 4, 3, 2)
        if mean <= 96:
            return TileShape(64, 64, 64, 4, 3, 3), TileShape(128, 128, 64, 4, 3, 2)
        return TileShape(128, 64, 64, 4, 3, 2), TileShape(128, 128, 64, 8, 3, 2)
