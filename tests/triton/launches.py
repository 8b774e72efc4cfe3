"""Launches of every Triton kernel: steps of any size whose slices begin anywhere, and the largest of a real model.

N rows, D their width, K experts per row, E experts, B sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.activation import Activation
from kernels.all2all.base import AllToAll, ExpertInput
from kernels.all2all.payload import RowFormat
from kernels.attention.batch import AttentionBatch
from kernels.block_fp8 import BlockWeights
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.routing.device_routing import route_on_device
from tests.triton import launches_four_bit, launches_fp8
from tests.triton.attention_launches import (
    copy_pieces_there_and_back,
    decodes,
    expand_fp8,
    latent_decodes,
    latents,
    list_pages,
    norm_rotate_store,
    prompts,
    shared_decodes,
    store_fp8,
    store_kv,
    warp_decodes,
)
from tests.triton.device import FOR_HOPPER
from tests.triton.launch_inputs import (
    EXPERTS,
    HEAD_DIM,
    HEADS,
    SIZES,
    TOP_K,
    WIDTH,
    Inputs,
)
from tests.triton.symm_ranks import build_ranks


def _norm(at: Inputs) -> None:
    from kernels.triton.norm import add_rms_norm, add_rms_norm_fp8

    x, weight = at.rows(WIDTH), at.rows(WIDTH)[0]
    add_rms_norm(x, at.rows(WIDTH), weight, 1e-6)
    add_rms_norm_fp8(at.rows(256), None, at.rows(256)[0], 1e-6)
    add_rms_norm_fp8(at.rows(256), None, at.rows(256)[0], 1e-6, torch.empty_like(at.rows(256)))
    parts, wide = at.rows(2, WIDTH).view(2, at.size, WIDTH), at.rows(2 * WIDTH)
    add_rms_norm(x, parts, weight, 1e-6, wide[:, :WIDTH])
    gate = weight, at.rows(1)
    add_rms_norm(x, None, weight, 1e-6, gate=gate)
    add_rms_norm_fp8(at.rows(256), None, at.rows(256)[0], 1e-6, gate=(at.rows(256)[0], at.rows(1)))


def _gates(at: Inputs) -> None:
    from kernels.triton.gated_norm import output_gate, output_gate_fp8
    from kernels.triton.gated_sum import gated_sum

    wide = torch.zeros(at.offset + at.size, 400, dtype=torch.bfloat16, device=at.device)[
        at.offset :
    ]
    output_gate(at.rows(256), wide[:, :256])
    output_gate_fp8(at.rows(256), wide[:, :256])
    gated_sum(at.rows(WIDTH), at.rows(WIDTH), wide.flatten()[: at.size])


def _linear_attention(
    at: Inputs, *, prompts: bool, states: str = "float32", drafts: int = 0
) -> None:
    """Rows of a projection that holds the gates too, as they are in a model; then the gated norm."""
    from kernels.interface.linear_attention_spec import LinearAttentionSpec
    from kernels.linear_attention.triton_delta import TritonLinearAttention
    from kernels.triton.gated_norm import gated_rms_norm, gated_rms_norm_fp8

    spec = LinearAttentionSpec(2, HEADS, HEAD_DIM, HEAD_DIM, 4, states, drafts)
    subject, new = TritonLinearAttention([spec]), 65 if prompts else 1 + drafts
    device = torch.device(at.device)
    subject.bind(subject.allocate([spec], 2, torch.bfloat16, device))
    batch = AttentionBatch.dummy_decodes(at.size, device)
    starts = new * batch.query_start_loc_cpu
    counts = {
        "num_tokens": new * at.size,
        "num_single_rows": at.size if new == 1 else 0,
        "num_verify": at.size if drafts else 0,
    }
    subject.plan(
        replace(
            batch,
            **counts,
            query_start_loc_cpu=starts,
            seq_lens_cpu=np.full(at.size, 2 * new, dtype=np.int32),
            state_slots=at.slice(),
        )
    )
    width = spec.channels + 2 * HEADS
    whole = torch.zeros(at.offset + new * at.size, width, dtype=torch.bfloat16, device=device)
    mixed, a, b = whole[at.offset :].split([spec.channels, HEADS, HEADS], 1)
    weight, gates = whole.new_zeros(spec.channels, 4), torch.zeros(HEADS, device=device)
    out = subject(mixed, a, b, 0, weight, gates, gates)
    gate = whole[at.offset :, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
    gated_rms_norm(out, gate, weight.view(-1)[:HEAD_DIM], 1e-6)
    heads = whole[at.offset :, :256].unflatten(1, (2, 128))
    gated_rms_norm_fp8(heads.contiguous(), heads, gates.new_zeros(128), 1e-6)


def _handover(at: Inputs) -> None:
    """Gates, states and tails of prompts around a library's kernel."""
    from kernels.triton.delta_handover import read_states, store_tails, token_gates, write_states

    whole = torch.zeros(at.offset + at.size, 72, dtype=torch.bfloat16, device=at.device)
    mixed, a, b = whole[at.offset :].split([64, HEADS, HEADS], 1)
    gates = torch.zeros(HEADS, device=at.device)
    token_gates(a, b, gates, gates)
    pool = torch.zeros(2, HEADS, HEAD_DIM, HEAD_DIM, device=at.device)
    write_states(pool, at.slice(), read_states(pool, at.slice()))
    starts = torch.zeros(at.size + 1, dtype=torch.int64, device=at.device)
    store_tails(mixed, starts, at.slice(), mixed.new_zeros(2, 3, 64))


def _route(at: Inputs, *, on_device: bool) -> None:
    from kernels.triton.route import route_top_k

    route_top_k(at.rows(EXPERTS), TOP_K, True, at.slice()[:1] if on_device else at.size)


def _route_groups(at: Inputs, *, on_device: bool) -> None:
    from kernels.triton.route_groups import route_groups

    route_groups(
        at.rows(EXPERTS, dtype=torch.float32),
        torch.zeros(EXPERTS, device=at.device),
        TOP_K,
        at.slice()[:1] if on_device else at.size,
        num_groups=8,
        topk_group=4,
        group_score="top2",
        norm_topk_prob=True,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
    )


def _forced_route(at: Inputs) -> None:
    from kernels.triton.forced_route import forced_route

    weights = torch.zeros(EXPERTS, device=at.device)
    noise = torch.zeros(2**16, device=at.device)
    forced_route(
        *(at.slice(), at.slice(), weights, noise),
        in_turn=False,
        layer=at.offset,
        top_k=TOP_K,
        num_tokens=at.size,
    )


def _experts(at: Inputs) -> None:
    """Rows to expert order, quantised too, and back."""
    from kernels.triton.gated_activation import gated_activation
    from kernels.triton.permute_pairs import permute_pairs
    from kernels.triton.quantise_rows import empty_rows
    from kernels.triton.scatter_fp8 import scatter_fp8
    from kernels.triton.scatter_rows import scatter_rows
    from kernels.triton.weighted_sum import weighted_sum

    aligned = 128 * EXPERTS
    for alignment, num_permuted in ((1, at.size * TOP_K), (128, aligned)):
        routed = at.ids(), range(EXPERTS), num_permuted, alignment
        x_ND = at.rows(256)
        permute_pairs(*routed, (x_ND, empty_rows(x_ND)))
        permuted_idx_NK, _, bounds_3e = permute_pairs(*routed)
        y_RD = scatter_rows(at.rows(WIDTH), permuted_idx_NK, num_permuted)
        gated_activation(y_RD.unsqueeze(0), bounds_3e[1, EXPERTS - 1 :], "silu")
        weights_NK = at.rows(TOP_K, dtype=torch.float32)
        out_ND = weighted_sum(y_RD, permuted_idx_NK, weights_NK)
        weighted_sum(y_RD, permuted_idx_NK, weights_NK, (at.size // 2, at.size, out_ND))
    scatter_fp8(at.rows(256), permuted_idx_NK, aligned)
    values, scales = at.rows(256, dtype=torch.float8_e4m3fn), at.rows(4, dtype=torch.float32)
    scatter_fp8(values, permuted_idx_NK, aligned, scales[:, :2])


def _exchange(at: Inputs) -> None:
    """Rows packed at this rank's place among those of two, also those that lie there."""
    from kernels.triton.pack_rows import pack_rows

    row_format = RowFormat(WIDTH, TOP_K, torch.bfloat16)
    gathered = torch.zeros(2, at.size, row_format.row_bytes, dtype=torch.uint8, device=at.device)
    weights = at.rows(TOP_K, dtype=torch.float32)
    fields = row_format.fields(gathered[1])
    pack_rows(at.rows(WIDTH), at.ids(), weights, fields)
    pack_rows(fields[0], at.ids(), weights, fields)
    row_format = RowFormat(256, TOP_K, torch.bfloat16, fp8=True)
    gathered = torch.zeros(2, at.size, row_format.row_bytes, dtype=torch.uint8, device=at.device)
    pack_rows(at.rows(256), at.ids(), weights, row_format.fields(gathered[1]))


def _penalise(at: Inputs) -> None:
    from kernels.triton.penalise import penalise

    logits = torch.zeros(32, 5000, device=at.device)
    values = at.rows(3, dtype=torch.float32).T.unsqueeze(2)
    seen = torch.zeros(32, 5000, dtype=torch.int32, device=at.device)
    penalise(logits, at.rows(1, dtype=torch.int64), seen, at.rows(1, dtype=torch.int64), values)


def _mark_invalid(at: Inputs) -> None:
    from kernels.triton.mark_invalid import mark_invalid

    mark_invalid(at.rows(dtype=torch.float32), at.rows(dtype=torch.int64), invalid=-1, forbidden=-2)


def _drafts_behind(at: Inputs) -> None:
    from kernels.triton.drafts_behind import enter_draws, step_back

    numbers, tokens = at.rows(dtype=torch.int64), at.slice()
    seqs_3B = torch.zeros(3, at.size, dtype=torch.int64, device=at.device)
    places = numbers, numbers.clone(), numbers.clone()
    enter_draws(seqs_3B, tokens, tokens, *places, 4)
    table = torch.zeros(at.size, 3 + at.offset, dtype=torch.int64, device=at.device)
    ropes = torch.zeros(at.size, 3, dtype=torch.int64, device=at.device)
    for rope_positions in (None, ropes):
        step_back(seqs_3B, numbers, places[1], rope_positions, table, places[2], 16)


def _grouped_gemm(
    at: Inputs,
    *,
    expected: int = EXPERTS,
    activation: Activation = "silu",
    biases: bool = False,
) -> None:
    """`expected` rows, whatever their number, as the choice of kernels goes by."""
    routing = route_on_device(at.ids(), range(EXPERTS), num_experts=EXPERTS)
    routing = replace(routing, expected=expected)
    weights = torch.zeros(EXPERTS, 2 * WIDTH, WIDTH, dtype=torch.bfloat16, device=at.device)
    routed = ExpertInput(at.rows(WIDTH), routing.offs_e, None, routing)
    gemm = TritonGroupedGemm(num_sms=4, hopper=FOR_HOPPER)
    bias = torch.zeros(EXPERTS, 2 * WIDTH, dtype=torch.bfloat16, device=at.device)
    added = (bias, bias[:, :WIDTH].contiguous()) if biases else None
    gemm(routed, weights, weights[:, :WIDTH].contiguous(), activation, added)


def there_and_back(exchange: AllToAll, at: Inputs, width: int) -> None:
    routed = exchange.dispatch(at.rows(width), at.ids(), at.rows(TOP_K, dtype=torch.float32)).wait()
    y_RD = torch.zeros(
        routed.device_routing().num_permuted, width, dtype=torch.bfloat16, device=at.device
    )
    exchange.combine(y_RD, routed.handle).wait()


def _push(at: Inputs) -> None:
    """The exchange of a rank with itself."""
    row_format = RowFormat(WIDTH, TOP_K, torch.bfloat16)
    (exchange,) = build_ranks(1, EXPERTS, row_format, max(SIZES), device=at.device)
    there_and_back(exchange, at, WIDTH)
    row_format = RowFormat(256, TOP_K, torch.bfloat16, fp8=True)
    (exchange,) = build_ranks(1, EXPERTS, row_format, max(SIZES), device=at.device)
    there_and_back(exchange, at, 256)


def _skinny_linear(at: Inputs, *, fp8: bool) -> None:
    from kernels.triton.skinny_linear import skinny_linear

    weights = torch.zeros(256, 256, dtype=torch.bfloat16, device=at.device)
    blocks = BlockWeights.empty(256, 256, device=at.device)
    for num_rows in (1, 2, 3, 4, 9):
        x = at.rows(256)[:1].expand(num_rows, 256)
        skinny_linear(x.contiguous(), blocks if fp8 else weights)


def _lora(at: Inputs) -> None:
    """Two slots of two parts, for rows of which a slice of the batch names the slots."""
    from kernels.lora.product import LoraWeights
    from kernels.triton.lora_expand import lora_expand
    from kernels.triton.lora_shrink import lora_shrink

    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": at.device}
    a_SQK, b_SNr = torch.zeros(2, 32, WIDTH, **new), torch.zeros(2, 3 * WIDTH, 16, **new)
    weights = LoraWeights(a_SQK, b_SNr, ((0, WIDTH, 0), (WIDTH, 3 * WIDTH, 1)))
    h_ZTQ = lora_shrink(at.rows(WIDTH), a_SQK, at.slice(), weights.rank)
    tiles = torch.zeros(3, 3, dtype=torch.int32, device=at.device)
    lora_expand(at.rows(3 * WIDTH), h_ZTQ, b_SNr, at.slice(), tiles)


def _lora_of_experts(at: Inputs) -> None:
    """As `_lora`, of two experts."""
    from kernels.triton.expert_lora_expand import expert_lora_expand
    from kernels.triton.expert_lora_shrink import expert_lora_shrink
    from kernels.triton.expert_lora_tiles import expert_lora_tiles

    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": at.device}
    a_SeQK, b_SeNr = torch.zeros(2, 2, 32, WIDTH, **new), torch.zeros(2, 2, 2 * WIDTH, 16, **new)
    none = torch.zeros(2, dtype=torch.int32, device=at.device)
    tiles = expert_lora_tiles(at.slice(), at.rows(dtype=torch.int32), none, none)
    h_ZRQ = expert_lora_shrink(at.rows(WIDTH), a_SeQK, tiles, none, 16, gathered=True)
    columns = torch.zeros(2, 3, dtype=torch.int32, device=at.device)
    expert_lora_expand(at.rows(2 * WIDTH), h_ZRQ, b_SeNr, tiles, none, columns, WIDTH)


CASES: dict[str, Callable[[Inputs], None]] = {
    "list_pages": partial(list_pages, padded=False),
    "list_pages_for_graphs": partial(list_pages, padded=True),
    "store_kv": store_kv,
    "store_fp8": store_fp8,
    "expand_fp8": expand_fp8,
    "norm_rotate_store": partial(norm_rotate_store, norm=True, rotary_dim=HEAD_DIM),
    "norm_rotate_store_fp8": partial(norm_rotate_store, norm=True, rotary_dim=HEAD_DIM, fp8=True),
    "rotate_store": partial(norm_rotate_store, norm=False, rotary_dim=HEAD_DIM),
    "rotate_part_store": partial(norm_rotate_store, norm=False, rotary_dim=HEAD_DIM // 2),
    "latents": partial(latents, fp8=False),
    "latents_fp8": partial(latents, fp8=True),
    "latent_decodes": partial(latent_decodes, cut=False),
    "latent_decodes_in_chunks": partial(latent_decodes, cut=True),
    "latent_decodes_of_many_heads": partial(latent_decodes, cut=True, num_heads=128),
    "copy_pieces": copy_pieces_there_and_back,
    "norm": _norm,
    "linear_attention_of_decodes": partial(_linear_attention, prompts=False),
    "linear_attention_of_drafts": partial(_linear_attention, prompts=False, drafts=2),
    "linear_attention_of_prompts": partial(_linear_attention, prompts=True),
    "linear_attention_of_decodes_bf16": partial(
        _linear_attention, prompts=False, states="bfloat16"
    ),
    "linear_attention_of_prompts_bf16": partial(_linear_attention, prompts=True, states="bfloat16"),
    "linear_attention_handed_over": _handover,
    "gates": _gates,
    "route": partial(_route, on_device=False),
    "route_in_graphs": partial(_route, on_device=True),
    "route_groups": partial(_route_groups, on_device=False),
    "route_groups_in_graphs": partial(_route_groups, on_device=True),
    "forced_route": _forced_route,
    "experts": _experts,
    "exchange": _exchange,
    "grouped_gemm": _grouped_gemm,
    "grouped_gemm_of_few": partial(_grouped_gemm, expected=EXPERTS // 4),
    "grouped_gemm_of_many": partial(_grouped_gemm, expected=EXPERTS * 1000),
    "grouped_gemm_with_gelu": partial(_grouped_gemm, activation="gelu"),
    "grouped_gemm_with_biases": partial(_grouped_gemm, activation="clamped_swiglu", biases=True),
    **launches_fp8.CASES,
    **launches_four_bit.CASES,
    "skinny_linear": partial(_skinny_linear, fp8=False),
    "skinny_linear_fp8": partial(_skinny_linear, fp8=True),
    "lora": _lora,
    "lora_of_experts": _lora_of_experts,
    "push": _push,
    "penalise": _penalise,
    "drafts_behind": _drafts_behind,
    "mark_invalid": _mark_invalid,
    "decodes": partial(decodes, cut=False),
    "decodes_without_sinks": partial(decodes, cut=False, sinks=False),
    "decodes_in_chunks": partial(decodes, cut=True),
    "decodes_fp8": partial(decodes, cut=False, sinks=False, fp8=True),
    "decodes_fp8_in_chunks": partial(decodes, cut=True, sinks=False, fp8=True),
    "decodes_fp8_by_warps": partial(warp_decodes, cut=False),
    "decodes_fp8_by_warps_in_chunks": partial(warp_decodes, cut=True),
    "shared_decodes": partial(shared_decodes, tile_rows=8),
    "shared_decodes_fp8": partial(shared_decodes, tile_rows=16, fp8=True),
    "prompts_fp8": partial(prompts, window=None, fp8=True),
    "prompts": partial(prompts, window=None),
    "prompts_with_a_window": partial(prompts, window=128),
}
