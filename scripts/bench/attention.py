"""Time attention and the fused operators around it on one GPU, beside torch's and beside their floors.

    python -m scripts.bench.attention --out docs/results/gpu-attention

Qwen3-30B-A3B's shapes in bfloat16. Times are medians, in us a layer, of CUDA graphs of CALLS calls over caches too
large for the GPU's own cache; `sdpa`, which is not made for graphs, is timed by events around the same calls.

T tokens, H query heads, h KV heads, d head dim, B sequences.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from kernels.attention.base import Attention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.fused import fused_kernels
from kernels.interface.attention_spec import AttentionSpec
from scripts.bench.inputs import need_gpus
from scripts.bench.results import add_options, origin, save
from scripts.bench.timing import alternate, repeated

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, EXPERTS, TOP_K = 2048, 32, 4, 128, 16, 128, 8
SPEC = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
LAYERS, CALLS, ROUNDS, EPS = 4, 24, 30, 1e-6  # a graph has CALLS calls, in turn on the layers
MEMORY_BYTES_PER_US, FLOP_PER_US = 4.0e6, 750e6  # what this GPU reaches at best
DTYPE = torch.bfloat16
Seqs = list[tuple[int, int]]  # (tokens after this forward, new ones), decodes first
Row = dict[str, Any]


def attention_cases() -> dict[str, Seqs]:
    """Label to sequences."""
    random = np.random.default_rng(1)

    def decodes(count: int) -> Seqs:
        return [(int(length), 1) for length in random.integers(1024, 2049, count)]

    return {
        **{f"{count} decodes at 1024-2048": decodes(count) for count in (16, 64, 128, 256)},
        "126 decodes at 512, 2 at 32768": [(512, 1)] * 126 + [(32768, 1)] * 2,
        "1 prompt of 4096": [(4096, 4096)],
        "4 prompts of 1024": [(1024, 1024)] * 4,
        "4096 tokens after 4096": [(8192, 4096)],
        "128 decodes, prompts of 2048 and 1024": [*decodes(128), (2048, 2048), (1024, 1024)],
    }


class Case:
    """A batch of random sequences with caches, on the GPU."""

    def __init__(self, seqs: Seqs):
        lens = np.array([length for length, _ in seqs], dtype=np.int32)
        new = np.array([count for _, count in seqs], dtype=np.int32)
        blocks = -(-lens // BLOCK_SIZE)
        num_blocks = int(blocks.sum())
        pages = torch.randperm(num_blocks).numpy()
        table = np.zeros((len(seqs), blocks.max()), dtype=np.int64)
        for seq, last in enumerate(np.cumsum(blocks)):
            table[seq, : blocks[seq]] = pages[last - blocks[seq] : last]
        slots = [
            table[seq, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            for seq, at in enumerate(map(np.arange, lens - new, lens))
        ]
        self.batch = SimpleNamespace(
            num_tokens=int(new.sum()),
            num_seqs=len(seqs),
            num_single_rows=int((new == 1).sum()),
            query_start_loc_cpu=np.cumsum([0, *new], dtype=np.int32),
            seq_lens_cpu=lens,
            block_table=torch.from_numpy(table).cuda(),
            slot_mapping=torch.from_numpy(np.concatenate(slots)).cuda(),
        )
        shape = (2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = [randn(*shape) for _ in range(LAYERS)]
        self.qkv = randn(self.batch.num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
        heads = (HEADS, KV_HEADS, KV_HEADS)
        self.q, self.k, self.v = self.qkv.split(heads, dim=1)

    def layer(self, attention: Attention) -> Callable[[int], object]:
        """One layer or another, after a plan."""
        return lambda call: attention(self.q, self.k, self.v, call % LAYERS)

    def floor_us(self) -> float:
        """Time to read what must be read or to multiply what must be multiplied, whichever is longer."""
        lens = self.batch.seq_lens_cpu.astype(np.int64)
        new = np.diff(self.batch.query_start_loc_cpu).astype(np.int64)
        kv_bytes = int(lens.sum()) * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        qo_bytes = 2 * self.q.numel() * DTYPE.itemsize
        pairs = int((new * (lens - new) + new * (new + 1) // 2).sum())
        flop = 4 * HEADS * HEAD_DIM * pairs
        return max((kv_bytes + qo_bytes) / MEMORY_BYTES_PER_US, flop / FLOP_PER_US)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def device_us(call: Callable[[int], object], *, graph: bool = True) -> float:
    """Median of a call on the device; CALLS of them are timed together."""
    runs = {"us": repeated(call, CALLS, graph=graph)}
    return alternate(runs, ROUNDS, CALLS, torch.device("cuda"), digits=2)["us"]


def host_us(run: Callable[[], object]) -> float:
    """Median of `run` on the host, the device being idle."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e6)
    return round(statistics.median(times), 1)


def time_attention(label: str, seqs: Seqs) -> Row:
    """One case with both backends."""
    case = Case(seqs)
    row: Row = {"case": label, "floor_us": round(case.floor_us(), 1)}
    flashinfer = FlashInferAttention([SPEC] * LAYERS, BLOCK_SIZE)
    flashinfer.bind(case.caches)
    flashinfer.plan(case.batch)
    row["flashinfer_us"] = device_us(case.layer(flashinfer))
    row["plan_host_us"] = host_us(lambda: flashinfer.plan(case.batch))
    if case.batch.num_single_rows == len(seqs):
        flashinfer.reserve_graphs(len(seqs), len(seqs), case.batch.block_table.shape[1])
        form = flashinfer.form(case.batch, len(seqs), prompts=False)
        flashinfer.plan_graph(case.batch, len(seqs), form)
        row["flashinfer_graph_us"] = device_us(case.layer(flashinfer))
        row["plan_graph_host_us"] = host_us(
            lambda: flashinfer.plan_graph(case.batch, len(seqs), form)
        )
    sdpa = SdpaAttention([SPEC] * LAYERS, BLOCK_SIZE)
    sdpa.bind(case.caches)
    sdpa.plan(case.batch)
    row["sdpa_us"] = device_us(case.layer(sdpa), graph=False)
    return row


def time_fused(num_tokens: int) -> list[Row]:
    """Every fused operator beside the operators of torch that it replaces."""
    fused = fused_kernels("cuda")
    assert fused is not None
    case = Case([(num_tokens, num_tokens)])
    attention = FlashInferAttention([SPEC] * LAYERS, BLOCK_SIZE)
    attention.bind(case.caches)
    attention.plan(case.batch)
    num_qk = HEADS + KV_HEADS
    x, delta, weight = randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN) * 1e-3, randn(HIDDEN)
    qk_weight = randn(num_qk, HEAD_DIM)
    angles = torch.randn(num_tokens, 1, HEAD_DIM // 2, device="cuda")
    rotation = torch.polar(torch.ones_like(angles), angles)
    logits = randn(num_tokens, EXPERTS)
    slots = case.batch.slot_mapping

    def torch_qk(layer: int) -> None:
        normed = F.rms_norm(case.qkv[:, :num_qk], (HEAD_DIM,), None, EPS).mul_(qk_weight).float()
        normed.view(torch.complex64).mul_(rotation)
        qk = normed.to(DTYPE)
        for new, cache in ((qk[:, HEADS:], case.caches[layer][0]), (case.v, case.caches[layer][1])):
            cache.view(-1, KV_HEADS * HEAD_DIM).index_copy_(0, slots, new.flatten(1))

    def torch_route() -> None:
        best, _ = torch.topk(logits.float(), TOP_K)
        torch.softmax(best, dim=-1)

    pairs: dict[str, tuple[Callable[[int], object], Callable[[int], object]]] = {
        "residual add and norm": (
            lambda _: F.rms_norm(x.add_(delta), (HIDDEN,), weight, EPS),
            lambda _: fused.add_rms_norm(x, delta, weight, EPS),
        ),
        "head norms, rotary embedding, KV write": (
            torch_qk,
            lambda layer: attention.store(case.qkv, layer, rotation, qk_weight, EPS),
        ),
        "choice of experts": (
            lambda _: torch_route(),
            lambda _: fused.route_top_k(logits, TOP_K, True, num_tokens),
        ),
    }

    def time_layers(operator: Callable[[int], object]) -> float:
        return device_us(lambda call: operator(call % LAYERS))

    return [
        {
            "operator": label,
            "tokens": num_tokens,
            "torch_us": time_layers(before),
            "fused_us": time_layers(after),
        }
        for label, (before, after) in pairs.items()
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, drawn=False)
    args = parser.parse_args()
    need_gpus(1)
    report: Row = {**origin(1, args.commit), "attention": [], "fused": []}
    torch.manual_seed(0)
    for label, seqs in attention_cases().items():
        report["attention"].append(time_attention(label, seqs))
        print(report["attention"][-1], flush=True)
    for num_tokens in (1, 32, 128, 256, 512, 4096):
        report["fused"] += time_fused(num_tokens)
        for row in report["fused"][-3:]:
            print(row, flush=True)
    save(args.out, report)


if __name__ == "__main__":
    main()
