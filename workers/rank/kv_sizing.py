"""Bytes of weights, the largest steps and CUDA graphs, beside which the KV cache must fit. Knows nothing of ranks.

All sizes are measured: the caller runs the largest step and the step that samples most (see WarmUpSteps), and the
largest graphs are captured once and discarded.
"""

from dataclasses import dataclass

import torch

from workers.kv_cache.demand import KVDemand
from workers.rank.device_memory import memory_for, size
from workers.rank.warm_up_steps import WarmUpSteps
from workers.runner.graph_sizes import GraphSizes
from workers.runner.model_runner import ModelRunner
from workers.scheduler.scheduler import Scheduler

_MARGIN = 1.1  # factor on the measured bytes of graphs


@dataclass(frozen=True)
class OwnBytes:
    """Peak bytes of a rank beside its KV cache; `steps` is buffers and the rows of the largest step.

    states   of linear attention: running sequences and snapshots have slots of constant size
    images   of the vision tower's largest call, and of its outputs that are kept
    """

    weights: int
    steps: int
    graphs: int
    states: int = 0
    images: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.steps + self.graphs + self.states + self.images

    def __str__(self) -> str:
        states = f", states of linear attention {size(self.states)}" if self.states else ""
        images = f", images {size(self.images)}" if self.images else ""
        return (
            f"weights take {size(self.weights)}, buffers and the largest step {size(self.steps)}, "
            f"CUDA graphs {size(self.graphs)}{states}{images}"
        )


def own_bytes(
    steps: WarmUpSteps,
    runner: ModelRunner,
    scheduler: Scheduler,
    graph_sizes: GraphSizes,
    *,
    weight_bytes: int,
    kv_bytes: int,
    state_bytes: int = 0,
    image_bytes: int = 0,
) -> OwnBytes:
    """Measure a rank with weights, a KV cache and states of these sizes, and images that take `image_bytes` beside.

    Collective; the runner cannot be used afterwards.
    """
    torch.cuda.reset_peak_memory_stats()
    with memory_for("a step"):
        steps.sample(runner, scheduler)
        steps.prefill(runner, scheduler, steps.limits.max_num_batched_tokens)
    peak = torch.cuda.max_memory_allocated()
    with memory_for("CUDA graphs"):
        graphs = graph_bytes(runner, graph_sizes)
    steps_bytes = peak - weight_bytes - kv_bytes - state_bytes
    return OwnBytes(weight_bytes, steps_bytes, graphs, state_bytes, image_bytes)


def graph_bytes(runner: ModelRunner, sizes: GraphSizes) -> int:
    """Return the bytes that torch reserves for graphs of these sizes. Collective; ends the use of the runner.

    All graphs share a memory pool, which the largest graphs of whole steps and of ubatches fill: the one with adapters
    too, because its products have temporaries of their own. Each further graph takes the bytes of a graph of the next
    size; a step of n ubatches has n graphs. Those of a draft model have a layer for each of its passes.

    Only torch's allocator of this process is read. CUDA's own memory for the executable of a graph is not counted,
    because only the device's free memory shows it, and other processes change that too. It has to fit into the part of
    the GPU that `cache.memory_fraction` leaves.
    """
    if not sizes:
        return 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs = runner.make_graphs(sizes)
    keys = sorted(sizes.whole_steps(), key=lambda key: (key.rows, key), reverse=True)
    # a size has its graph with adapters next to its graph without them
    of_size = 2 if sizes.adapters else 1
    graphs.capture(keys[:of_size])
    count = graphs.count(keys)
    if runner.ubatches is not None:
        cut = [key._replace(ubatch=True) for key in keys]
        graphs.capture(cut[:of_size])
        count += runner.ubatches.num_ubatches * graphs.count(cut)
    if sizes.draft:
        layers = graphs.count(keys) + sum(key.drafts for key in sizes.further_passes())
        count += -(-layers // runner.model.config.num_layers)
    largest = torch.cuda.memory_reserved() - before
    further = keys[of_size : 2 * of_size]
    each = graphs.capture(further) / max(1, graphs.count(further))
    graphs.close()
    return int(_MARGIN * (largest + max(0, each) * (count - 1)))


def free_bytes(device: torch.device, memory_fraction: float, own_bytes: int) -> int:
    """Return `memory_fraction` of the GPU less `own_bytes` and memory of other programs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * memory_fraction) - others - own_bytes


def check_longest_request_fits(
    num_blocks: int, max_model_len: int, demand: KVDemand, own: OwnBytes
) -> None:
    """Raise ValueError, with the settings to change, if the longest request needs more than `num_blocks`."""
    need = demand.blocks(max_model_len)
    if num_blocks < need:
        raise ValueError(
            f"the GPU has room for {max(0, num_blocks)} KV blocks, one request of model.max_model_len "
            f"{max_model_len} needs {need}; {own}. Lower model.max_model_len, scheduler.max_num_batched_tokens"
            f"{', cache.state_snapshots' if own.states else ''}"
            f"{', scheduler.max_image_tokens' if own.images else ''} or scheduler.max_num_seqs, "
            "raise cache.memory_fraction, or take more ranks (cluster.ranks)"
        )
