"""Packs matrices in four bits as checkpoints have them: compressed-tensors, GPTQ, AWQ and MXFP4.

N rows, K columns, G columns of a group.
"""

import zlib
from typing import Any

import torch

from kernels.four_bit import FourBitMatrix, quantise_four_bit
from workers.specs.four_bit import FourBitForm, Packing
from workers.specs.weight_map import WeightEntry

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _compressed(**weights: Any) -> dict[str, Any]:
    """Return the `quantization_config` of llm-compressor."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "actorder": None,
                    **weights,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _gptq(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "damp_percent": 0.01,
        "checkpoint_format": "gptq",
        **fields,
    }


FOUR_BITS: dict[str, dict[str, Any]] = {
    "int4": _compressed(),
    "int4-64": _compressed(group_size=64),
    "int4-zeros": _compressed(symmetric=False),
    "int4-ordered": _compressed(actorder="group", symmetric=False),
    "gptq": _gptq(),
    "gptq-zeros": _gptq(sym=False),
    "gptq-ordered": _gptq(desc_act=True, group_size=64),
    "gptq-v2": _gptq(sym=False, checkpoint_format="gptq_v2"),
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["mlp.gate"],
    },
}


def pack(entry: WeightEntry, values: torch.Tensor, form: FourBitForm) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix [N, K] of any floating dtype by name, each value rounded to the nearest."""
    order = torch.arange(values.shape[1])
    if form.format.ordered:  # equal for gate and up, as calibration with equal rows gives it
        seed = zlib.crc32(f"{entry.parameter}/{entry.expert}".encode())
        order = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(seed))
    matrix = quantise_four_bit(values[:, order], form.format)
    group_K = torch.empty(len(order), dtype=torch.int32)
    group_K[order] = torch.arange(len(order), dtype=torch.int32) // form.format.group
    codes = torch.empty_like(matrix.codes)
    codes[:, order] = matrix.codes
    found = _PACKERS[form.packing](form, codes, matrix, group_K)
    names = form.tensors(entry.name, *values.shape)
    tensors = {name: found[_end(name)] for name in names}
    if form.packing == Packing.COMPRESSED:
        tensors[f"{entry.name}_shape"] = torch.tensor(values.shape)
    return tensors


def _end(name: str) -> str:
    """Return what the tensor holds, by the end of its name."""
    ends = ("blocks", "scales", "packed", "scale", "zero_point", "g_idx", "qweight", "qzeros")
    return next(end for end in ends if name.endswith((f"_{end}", f".{end}")))


def _zeros(matrix: FourBitMatrix) -> torch.Tensor:
    return torch.full(matrix.scales.shape, 8) if matrix.zeros is None else matrix.zeros


def _words(codes: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    """Return int32 [..., W] of codes [..., 8 W]; place i of a word has the code of column order[i]."""
    places = torch.unflatten(codes.long(), -1, (-1, 8))[..., order or list(range(8))]
    words = sum(places[..., place] << 4 * place for place in range(8))
    return torch.as_tensor(words).to(torch.int32).contiguous()


def _pack_mxfp4(form: FourBitForm, codes: torch.Tensor, matrix: FourBitMatrix, _: Any) -> Any:
    blocks = codes[:, ::2] + 16 * codes[:, 1::2]
    return {"blocks": torch.unflatten(blocks, 1, (-1, 16)), "scales": matrix.scales}


def _pack_compressed(
    form: FourBitForm, codes: torch.Tensor, matrix: FourBitMatrix, group_K: torch.Tensor
) -> Any:
    return {
        "packed": _words(codes),
        "scale": matrix.scales,
        "zero_point": _words(_zeros(matrix).t()).t().contiguous(),
        "g_idx": group_K,
    }


def _pack_gptq(
    form: FourBitForm, codes: torch.Tensor, matrix: FourBitMatrix, group_K: torch.Tensor
) -> Any:
    less = 0x11111111 if form.packing == Packing.GPTQ else 0  # of the word as a whole
    return {
        "qweight": _words(codes).t().contiguous(),
        "scales": matrix.scales.t().contiguous(),
        "qzeros": _words(_zeros(matrix).t()) - less,
        "g_idx": group_K,
    }


def _pack_awq(form: FourBitForm, codes: torch.Tensor, matrix: FourBitMatrix, _: Any) -> Any:
    return {
        "qweight": _words(codes.t(), AWQ_ORDER),
        "scales": matrix.scales.t().contiguous(),
        "qzeros": _words(_zeros(matrix).t(), AWQ_ORDER),
    }


_PACKERS = {
    Packing.MXFP4: _pack_mxfp4,
    Packing.COMPRESSED: _pack_compressed,
    Packing.GPTQ: _pack_gptq,
    Packing.GPTQ_V2: _pack_gptq,
    Packing.AWQ: _pack_awq,
}
