"""Launches of the kernels that count on a number of programs an SM, with that number.

D width of rows, E experts.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.routing.device_routing import DeviceRouting
from tests.triton import launches_four_bit, launches_fp8
from tests.triton.attention_launches import decodes, latent_decodes, shared_decodes, warp_decodes
from tests.triton.device import DEVICE, FOR_HOPPER
from tests.triton.launch_inputs import EXPERTS, Inputs
from tests.triton.launches import there_and_back
from tests.triton.symm_ranks import build_ranks


def _tiles(rows_per_expert: float, activation: Activation = "silu") -> list[int]:
    """Launch the products of Qwen3-30B-A3B's experts of one rank of four; how many programs an SM shall hold."""
    expected = int(EXPERTS * rows_per_expert)
    none = torch.zeros(max(expected, EXPERTS), dtype=torch.int32, device=DEVICE)
    routing = DeviceRouting(none.view(-1, 1), none, *(none[:EXPERTS],) * 3, 1, expected)
    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    x, gemm = torch.empty(expected, 2048, **new), TritonGroupedGemm(num_sms=132, hopper=FOR_HOPPER)
    weights = torch.empty(EXPERTS, 1536, 2048, **new), torch.empty(EXPERTS, 2048, 768, **new)
    gemm(ExpertInput(x, routing.offs_e, None, routing), *weights, activation)
    return [tile.programs_per_sm for tile in gemm._tiles(routing, x, routing.row_R)]


def _pushes(num_ranks: int, num_sms: int | None, *, fp8: bool = False) -> list[int]:
    """Launch both kernels of the exchange; all programs of the second wait, so as many as there are must fit."""
    row_format = RowFormat(2048, 8, torch.bfloat16, fp8)
    exchange = build_ranks(num_ranks, 128, row_format, 512, device=DEVICE, num_sms=132)[0]
    exchange.set_num_sms(num_sms)
    there_and_back(exchange, Inputs(DEVICE, 512, 0), 2048)
    return [-(-exchange._limit // 132)] * 2


def _decode_programs() -> list[int]:
    """Launch both forms of decodes; how many programs an SM shall hold."""
    from kernels.triton.paged_decode import E4M3, HALF

    for cut in (False, True):
        for fp8 in (False, True):
            decodes(Inputs(DEVICE, 16, 0), cut=cut, fp8=fp8)
    return [HALF.programs_per_sm, E4M3.programs_per_sm] * 2


def _warp_decode_programs() -> list[int]:
    from kernels.triton.paged_decode import E4M3_WARPS

    for cut in (False, True):
        warp_decodes(Inputs(DEVICE, 16, 0), cut=cut)
    return [E4M3_WARPS.programs_per_sm] * 2


def _shared_programs(head_dim: int) -> list[int]:
    """Launch both tiles of decodes with shared keys; how many programs an SM shall hold."""
    from kernels.attention.shared_chunks import TILES

    for rows, _ in TILES:
        for fp8 in (False, True):
            shared_decodes(Inputs(DEVICE, 16, 0), tile_rows=rows // 8, head_dim=head_dim, fp8=fp8)
    return [count for _, count in TILES for _ in range(2)]


def _latent_decode_programs() -> list[int]:
    """Launch decodes over latents of 16 and of more heads, in each form; a program has an SM alone."""
    for num_heads in (16, 20, 128):
        latent_decodes(Inputs(DEVICE, 16, 0), cut=True, num_heads=num_heads)
    return [1, 1, 1]


def _expert_lora(rank: int) -> list[int]:
    """Launch both products of adapters of this rank for few rows an expert and for many; none spills registers."""
    from kernels.lora.experts import tile_columns
    from kernels.triton.expert_lora_expand import expert_lora_expand
    from kernels.triton.expert_lora_shrink import expert_lora_shrink
    from kernels.triton.expert_lora_tiles import expert_lora_tiles

    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    a_SEQK, b_SENr = torch.empty(1, 1, rank, 2048, **new), torch.empty(1, 1, 1536, rank, **new)
    for num_rows in (EXPERTS, 100 * EXPERTS):
        none = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
        tiles = expert_lora_tiles(none, none, none[:EXPERTS], none[:EXPERTS])
        x, out = torch.empty(num_rows, 2048, **new), torch.empty(num_rows, 1536, **new)
        h_ZRQ = expert_lora_shrink(x, a_SEQK, tiles, none, rank, gathered=True)
        columns = none[:3].view(1, 3), tile_columns(rank, torch.bfloat16)
        expert_lora_expand(out, h_ZRQ, b_SENr, tiles, none, *columns)
    return [1] * 4


LAUNCHES: dict[str, Callable[[], list[int]]] = {
    **{f"{rows}_rows_an_expert": partial(_tiles, rows) for rows in (0.25, 8, 40, 80, 400, 1000)},
    "1000_rows_an_expert_with_gelu": partial(_tiles, 1000, "gelu"),
    "1000_rows_an_expert_with_gelu_tanh": partial(_tiles, 1000, "gelu_tanh"),
    **launches_fp8.LAUNCHES,
    **launches_four_bit.LAUNCHES,
    **{f"push_{ranks}_ranks": partial(_pushes, ranks, None) for ranks in (2, 4, 8)},
    "push_fp8": partial(_pushes, 4, None, fp8=True),
    "push_fp8_on_8_sms": partial(_pushes, 4, 8, fp8=True),
    **{f"push_on_{sms}_sms": partial(_pushes, 4, sms) for sms in (8, 32)},
    "decodes": _decode_programs,
    "latent_decodes": _latent_decode_programs,
    "decodes_by_warps": _warp_decode_programs,
    **{f"expert_lora_of_rank_{rank}": partial(_expert_lora, rank) for rank in (16, 64, 128)},
    **{f"shared_decodes_of_{dim}": partial(_shared_programs, dim) for dim in (64, 128, 256)},
}
