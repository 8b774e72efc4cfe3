"""The experts' MLP with weights in four bits on GPUs, in two launches of persistent Triton kernels.

R permuted rows, D hidden, I expert width, e local experts.
"""

from functools import partial
from typing import Any

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.grouped_gemm.base import Biases
from kernels.grouped_gemm.four_bit import FourBitGemm
from kernels.grouped_gemm.unfused import activate_used, unfused_mlp
from kernels.host.capability import too_old_gpu
from kernels.host.triton_version import triton_unavailable
from kernels.interface.backend import BackendShape
from kernels.lora.experts import ExpertAdapters
from kernels.pending import can_yield_ubatch, wait_previous_ubatch


class TritonFourBit(FourBitGemm):
    """Products of bfloat16 rows; of float16 and float32 rows slowly, for comparisons."""

    name = "triton_four_bit"
    devices = ("cuda",)
    auto = "the checkpoint's experts are in four bits, and are computed with as they are"
    distributions = ("triton",)
    tiled = True

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """See Backend. Older GPUs have no arithmetic in pairs of bfloat16."""
        return triton_unavailable() or too_old_gpu(device, (9, 0))

    @classmethod
    def step_bytes(cls, shape: BackendShape, num_rows: int) -> int:
        """See GroupedGemm. It copies no rows into expert order, and stores gate and up for adapters alone."""
        width = shape.moe_intermediate_size
        widths = shape.hidden_size + (3 * width if shape.expert_adapters else width)
        return num_rows * widths * shape.dtype.itemsize

    def __init__(
        self, form: FourBitFormat, num_sms: int | None = None, device: torch.device | str = "cuda"
    ):
        super().__init__(form)
        from kernels.triton import four_bit_tiles, grouped_gemm_four_bit, split_depth

        self._kernel, self._tiles = grouped_gemm_four_bit, four_bit_tiles
        self._counters = split_depth.new_counters(device)
        self._all_sms = num_sms or torch.cuda.get_device_properties().multi_processor_count
        self._num_sms = self._all_sms

    def set_num_sms(self, num_sms: int | None) -> None:
        """At most this many SMs from the next call on."""
        assert num_sms is None or num_sms > 0, num_sms
        self._num_sms = min(num_sms or self._all_sms, self._all_sms)

    def __call__(
        self,
        expert_input: ExpertInput,
        w13_e2ID: FourBitWeights,
        w2_eDI: FourBitWeights,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        routing, x = expert_input.device_routing(), expert_input.x_RD
        row_R = routing.row_R if expert_input.routing else None
        b13_e2I, b2_eD = biases or (None, None)
        up, down = self.tiles(routing.mean_rows, x.dtype, *w2_eDI.shape[1:])
        bounds = (routing.starts_e, routing.ends_e, routing.num_permuted)
        product = partial(
            self._kernel.grouped_gemm_four_bit,
            num_sms=self._num_sms,
            expected=routing.expected,
            # Ubatches run on several streams at once.
            counters=None if can_yield_ubatch() else self._counters,
        )
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

    def tiles(self, mean: float, dtype: torch.dtype, hidden: int, width: int) -> tuple[Any, Any]:
        """Return the tiles of the two products for the mean number of rows of an expert."""
        return self._tiles.up_tile(mean, dtype, width), self._tiles.down_tile(mean, dtype, hidden)
