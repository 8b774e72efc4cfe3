"""Which kernel computes decodes over pages that a plan cuts into chunks. Knows no plan.

Programs of one warp (`kernels.triton.warp_decode_fp8`) read K and V in e4m3 faster where many rows have many keys: 128
rows of 1,536 keys 71 us against 83 by the other kernel, 32 of 8,192 89 against 120; but 4 of 8,192 31 against 24, one
of 32,768 39 against 32 (H200, docs/results/gpu-decode-forms.json). Rows of up to 512 keys stay whole, and with the
other kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.interface.attention_spec import AttentionSpec

WARP_ROWS = 24


class DecodeForms:
    """The forms of one backend's layers, which have groups of query heads of one size.

    fast   the GPU has the instructions of the kernel by warps
    """

    def __init__(
        self, specs: Sequence[AttentionSpec], block_size: int, num_sms: int, *, fast: bool
    ):
        from kernels.triton.paged_decode import E4M3, E4M3_WARPS, HALF

        fp8 = any(spec.fp8_cache for spec in specs)
        self._usual: Any = E4M3 if fp8 else HALF
        by_warps = fast and all(_by_warps(spec, block_size) for spec in specs)
        self._many = E4M3_WARPS if by_warps else self._usual
        self._kv_heads = min((spec.num_kv_heads for spec in specs), default=1)
        self._num_sms = num_sms

    def of(self, num_rows: int, *, shares: bool) -> Any:
        """Return the `DecodeForm` of `num_rows` rows in chunks. shares: leading keys of rows are read once."""
        return self._many if num_rows >= WARP_ROWS and not shares else self._usual

    def programs(self, num_rows: int, *, shares: bool) -> int:
        """Return how many programs of one KV head the GPU runs at a time."""
        per_sm: int = self.of(num_rows, shares=shares).programs_per_sm
        return per_sm * self._num_sms // self._kv_heads


def _by_warps(spec: AttentionSpec, block_size: int) -> bool:
    from kernels.triton.warp_decode_fp8 import takes

    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return spec.fp8_cache and not spec.sinks and takes(*heads, block_size)


def multiprocessors(device: torch.device) -> int:
    """Return the SMs of a GPU; of a CPU 1."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
