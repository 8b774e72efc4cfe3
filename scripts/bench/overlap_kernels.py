"""What overlap.py runs on GPUs besides an engine: rows without an all-to-all, and kernels to compile before.

N gathered rows, D hidden, K experts per token, W bytes of a row.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels import dense_fp8
from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.base import ExpertInput
from kernels.all2all.payload import Gathered, permute_local, quantise
from kernels.block_fp8 import BlockWeights
from kernels.grouped_gemm.base import GroupedGemm
from kernels.interface.registry import backend_class
from kernels.pending import Pending
from kernels.routing.device_routing import route_on_device
from scripts.bench.processes import Report
from workers.models.registry import load_model_config
from workers.specs.model import ModelConfig

COMPILERS = 32


class ResidentRows(AllGatherAllToAll):
    """Rows of all ranks that lie here from the start, with experts chosen uniformly; nothing travels either way.

    The product and the sums of its rows are those of an all-to-all that brings every row to every rank. Experts in FP8
    need quantised rows with or without an all-to-all, so this rank's rows are quantised.
    """

    max_num_tokens = num_experts = 0  # tokens of a rank, experts of all; set before any is built
    _rows: torch.Tensor | None = None

    def dispatch(
        self, x_TD: torch.Tensor, topk_idx_TK: torch.Tensor, topk_weights_TK: torch.Tensor
    ) -> Pending[ExpertInput]:
        if self._rows is None:
            self._rows = self._draw(x_TD.device)
        if self._format.fp8:
            quantise(x_TD)
        rows = self._rows[: self._num_ranks * len(x_TD)]
        return Pending(
            lambda: permute_local(*self._format.fields(rows), self._permutation, len(x_TD))
        )

    def combine(self, y_RD: torch.Tensor, handle: Gathered) -> Pending[torch.Tensor]:
        begin = self._group.rank() * handle.origin
        own_TD = handle.partial_sums(y_RD)[begin : begin + handle.origin]
        return Pending(lambda: own_TD)

    def _draw(self, device: torch.device) -> torch.Tensor:
        """uint8 [N, W], as an all-gather would leave them."""
        num_rows, form = self._num_ranks * self.max_num_tokens, self._format
        generator = torch.Generator().manual_seed(0)
        chance = torch.rand(num_rows, self.num_experts, generator=generator)
        ids = chance.topk(form.top_k).indices.to(device)
        x = torch.randn(num_rows, form.hidden_size, dtype=form.dtype, device=device)
        return form.pack(x, ids, torch.full(ids.shape, 1 / form.top_k, device=device))


@torch.inference_mode()
def compile_some(
    index: int,
    _report: Report,
    _folder: Path,
    model: str,
    gemm: str,
    num_ranks: int,
    rows: Sequence[int],
    comm_sms: Sequence[int | None],
) -> None:
    """Run one process's share of the products of `rows` tokens of a rank, beside these numbers of SMs."""
    torch.cuda.set_device(index % torch.cuda.device_count())
    all_sms = torch.cuda.get_device_properties().multi_processor_count
    product, config = backend_class("grouped_gemm", gemm)(), load_model_config(model)
    dense = projections(config) if product.fp8_dense else []
    cells = list(itertools.product(comm_sms, rows, (None, *dense)))
    for sms, size, shape in cells[index::COMPILERS]:
        product.set_num_sms(None if sms is None else all_sms - sms)
        if shape is None:
            multiply_experts(product, config, num_ranks, size)
        else:
            x = torch.zeros(size, shape[1], dtype=torch.bfloat16, device="cuda")
            dense_fp8.multiply(dense_fp8.quantise(x), BlockWeights.empty(*shape, device="cuda"))
    torch.cuda.synchronize()


def projections(config: ModelConfig) -> list[tuple[int, int]]:
    """Return the shapes of the projections before and behind attention."""
    attention, hidden = config.attention_specs[0], config.hidden_size
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    width = heads * attention.head_dim
    return [(width + 2 * kv_heads * attention.head_dim, hidden), (hidden, width)]


def multiply_experts(
    product: GroupedGemm, config: ModelConfig, num_ranks: int, num_tokens: int
) -> None:
    """Run the experts of a rank on the rows of all ranks."""
    hidden, moe = config.hidden_size, config.moe
    num_local, num_rows = moe.num_experts // num_ranks, num_ranks * num_tokens
    new: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    ids = torch.rand(num_rows, moe.num_experts, device="cuda").topk(moe.router.top_k).indices
    routing = route_on_device(
        ids,
        range(num_local),
        num_experts=moe.num_experts,
        alignment=product.row_alignment,
        unaligned_rows=product.unaligned_rows,
    )
    shapes = (
        (num_local, 2 * moe.intermediate_size, hidden),
        (num_local, hidden, moe.intermediate_size),
    )
    weights = [product.empty_weights(*shape, **new) for shape in shapes]
    rows = ExpertInput(torch.zeros(num_rows, hidden, **new), routing.offs_e, None, routing)
    product(rows, *weights)
