"""How many KV blocks a GPU has room for beside weights, the largest steps and CUDA graphs. Knows nothing of ranks.

All of it is measured, not estimated: the caller runs the largest step and the one that samples most (see
WarmUpSteps), and some of the largest graphs are captured once to be thrown away.
"""

from dataclasses import dataclass

import torch

from workers.engine.scheduler import Scheduler
from workers.rank.device_memory import memory_for, size
from workers.rank.warm_up_steps import WarmUpSteps
from workers.runner.graph_sizes import GraphSizes
from workers.runner.model_runner import ModelRunner

_MARGIN = 1.1  # of what the graphs were measured to take


@dataclass(frozen=True)
class OwnBytes:
    """What a rank takes at most beside its KV cache; `steps` is its buffers and the largest step's rows."""

    weights: int
    steps: int
    graphs: int

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.graphs

    def __str__(self) -> str:
        return (
            f"weights take {size(self.weights)}, buffers and the largest step {size(self.steps)}, "
            f"CUDA graphs {size(self.graphs)}"
        )


def own_bytes(
    steps: WarmUpSteps,
    runner: ModelRunner,
    scheduler: Scheduler,
    graph_sizes: GraphSizes,
    *,
    weight_bytes: int,
    kv_bytes: int,
) -> OwnBytes:
    """Measure it, with weights and a KV cache of these sizes. Collective; the runner is of no use afterwards."""
    torch.cuda.reset_peak_memory_stats()
    with memory_for("a step"):
        steps.sample(runner, scheduler)
        steps.prefill(runner, scheduler, steps.limits.max_num_batched_tokens)
    peak = torch.cuda.max_memory_allocated()
    with memory_for("CUDA graphs"):
        graphs = graph_bytes(runner, graph_sizes)
    return OwnBytes(weight_bytes, peak - weight_bytes - kv_bytes, graphs)


def graph_bytes(runner: ModelRunner, sizes: GraphSizes) -> int:
    """What graphs of these sizes will take, with those of slices. Collective; the runner is of no use afterwards.

    They share a pool that the largest ones, whole and in slices, fill; each further one takes what one of the next size
    takes, with as many slices as many times that.
    """
    if not sizes:
        return 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    graphs = runner.make_graphs(sizes)
    keys = sorted(sizes.whole_steps(), key=lambda key: (key.rows, key.mode), reverse=True)
    graphs.capture(keys[:1])
    count = graphs.count(keys)
    if runner.ubatches is not None:
        sliced = [key._replace(ubatch=True) for key in keys]
        graphs.capture(sliced[:1])
        count += runner.ubatches.num_ubatches * graphs.count(sliced)
    largest = free - torch.cuda.mem_get_info()[0]
    each = graphs.capture(keys[1:2]) / max(1, graphs.count(keys[1:2]))
    graphs.close()
    return int(_MARGIN * (largest + max(0, each) * (count - 1)))


def blocks_that_fit(
    device: torch.device, memory_fraction: float, *, block_bytes: int, own_bytes: int
) -> int:
    """KV blocks in what `memory_fraction` of the GPU leaves when `own_bytes` and other programs are taken off."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (int(total * memory_fraction) - others - own_bytes) // block_bytes


def check_room(num_blocks: int, max_model_len: int, block_size: int, own: OwnBytes) -> None:
    """Raises ValueError, with what to change, when the longest request does not fit into what `own` leaves."""
    need = -(-max_model_len // block_size)
    if num_blocks < need:
        raise ValueError(
            f"the GPU has room for {max(0, num_blocks)} KV blocks, one request of model.max_model_len "
            f"{max_model_len} needs {need}; {own}. Lower model.max_model_len, scheduler.max_num_batched_tokens or "
            "scheduler.max_num_seqs, raise cache.memory_fraction, or take more ranks (cluster.ranks)"
        )
