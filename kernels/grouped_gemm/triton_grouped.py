"""The experts' MLP in two launches of our own persistent Triton kernel: no library, any float dtype.

Rows are fetched where they lie, and gate and up never reach memory. Tile shapes were measured on one H200 with
Qwen3-30B-A3B's experts (hidden 2048, width 768, 32 of them); see docs/results/gpu-experts.md.

R places, D hidden, I expert width, e local experts.
"""

import torch

from kernels.all2all.base import ExpertInput
from kernels.device_routing import DeviceRouting
from kernels.grouped_gemm.base import GroupedGemm


class TritonGroupedGemm(GroupedGemm):
    """bfloat16, float16 and (slowly, for comparisons) float32 on GPUs."""

    name = "triton"

    def __init__(self, num_sms: int | None = None):
        from kernels.triton import grouped_gemm

        self._kernel = grouped_gemm
        self._all_sms = num_sms or torch.cuda.get_device_properties().multi_processor_count
        self._num_sms = self._all_sms

    def set_num_sms(self, num_sms: int | None) -> None:
        """At most this many SMs from the next call on."""
        assert num_sms is None or num_sms > 0, num_sms
        self._num_sms = min(num_sms or self._all_sms, self._all_sms)

    def __call__(
        self, expert_input: ExpertInput, w13_e2ID: torch.Tensor, w2_eDI: torch.Tensor
    ) -> torch.Tensor:
        routing, x = expert_input.places(), expert_input.x_RD
        up, down = self._tiles(routing, x.dtype)
        bounds = (routing.starts_e, routing.ends_e, routing.num_places)
        row_R = routing.row_R if expert_input.routing else None
        h_RI = self._kernel.grouped_gemm(
            x, row_R, w13_e2ID, *bounds, gated=True, tile=up, num_sms=self._num_sms
        )
        return self._kernel.grouped_gemm(
            h_RI, None, w2_eDI, *bounds, gated=False, tile=down, num_sms=self._num_sms
        )

    def _tiles(self, routing: DeviceRouting, dtype: torch.dtype):
        """Tile shapes of the two products, by how many rows an expert has."""
        TileShape = self._kernel.TileShape
        if dtype == torch.float32:
            tile = TileShape(16, 32, 32, num_warps=4, num_stages=2)
            return tile, tile
        mean = routing.expected / max(1, len(routing.ends_e))
        if mean <= 10:
            return TileShape(16, 64, 128, 4, 3, 2), TileShape(16, 64, 128, 4, 3, 3)
        if mean <= 48:
            return TileShape(64, 64, 64, 4, 3, 3), TileShape(64, 64, 128, 4, 3, 2)
        if mean <= 96:
            return TileShape(64, 64, 64, 4, 3, 3), TileShape(128, 128, 64, 4, 3, 2)
        down = TileShape(128, 128, 64, 8, 3, 2)
        if mean <= 768:
            return TileShape(128, 64, 64, 4, 3, 2), down
        return TileShape(128, 128, 64, 8, 3), down
