"""Times single steps, the all-to-all of one layer and an empty step on one rank. Runs in the process of a rank.

T tokens of this rank, D hidden, K experts per token.
"""

import statistics
import time
from collections.abc import Callable

import torch

from cluster.experiments.workload_section import StepWorkload
from kernels.all2all.base import MaskedInput, sum_partials
from workers.rank.backend_choice import forced_routing
from workers.rank.epoch import Epoch
from workers.step.step_sync import ForwardMode

ROUNDS = 5  # of which the median counts
EMPTY_STEPS = 20
MODES = {"prefill": ForwardMode.EXTEND, "decode": ForwardMode.DECODE}


def time_steps(epoch: Epoch, workload: StepWorkload, seed: int) -> dict[str, float]:
    """Return the times of this rank. Collective: every rank calls it alike, with a started engine without requests."""
    process, tokens = epoch.process, workload.tokens
    largest = epoch.ubatches.largest(epoch.scheduler, process.max_model_len)[workload.phase]
    if tokens > largest:
        raise ValueError(
            f"workload.tokens is {tokens}, a {workload.phase} step of this configuration has at most {largest} "
            "(scheduler.max_num_batched_tokens, scheduler.max_num_seqs and the KV cache)"
        )
    timer = epoch.ubatches.timer(epoch.runner, epoch.scheduler, process.max_model_len)
    cut = epoch.runner.ubatches is not None and epoch.ubatches.policy.wants(
        MODES[workload.phase], tokens
    )
    return {
        "step_ms": 1e3 * timer(workload.phase, tokens, cut),
        "exchange_us": 1e6 * _exchange_s(epoch, tokens, workload.exchanges, seed),
        "empty_step_us": 1e6 * _median(epoch.engine.step, EMPTY_STEPS, epoch.process.device),
    }


def _exchange_s(epoch: Epoch, tokens: int, repeats: int, seed: int) -> float:
    """Return the seconds of a dispatch and a combine of the all-to-all of whole steps, without the experts.

    On a GPU from a CUDA graph if the all-to-all can be captured, because launches take longer than small exchanges.
    """
    process, all2all = epoch.process, epoch.backends.all2all
    x_TD, topk_idx_TK, topk_weights_TK = _draw(epoch, tokens, seed)
    routed = all2all.dispatch(x_TD, topk_idx_TK, topk_weights_TK).wait()
    like = routed.x_eMD if isinstance(routed, MaskedInput) else routed.permuted_rows()
    y = torch.randn(like.shape, dtype=process.dtype, device=process.device)
    sum_partials(all2all.combine(y, routed.handle).wait())

    def exchanges() -> None:
        for _ in range(repeats):
            found = all2all.dispatch(x_TD, topk_idx_TK, topk_weights_TK).wait()
            sum_partials(all2all.combine(y, found.handle).wait())

    in_graph = process.device.type == "cuda" and all2all.graph
    return _median(_captured(exchanges) if in_graph else exchanges, 1, process.device) / repeats


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of `call`, which runs once before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def _draw(epoch: Epoch, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows [T, D], their experts [T, K] by model.routing, uniform for the model's router, and weights [T, K]."""
    process, model = epoch.process, epoch.process.model_config
    generator = torch.Generator().manual_seed(1000 * seed + process.rank)
    x_TD = torch.randn(tokens, model.hidden_size, generator=generator)
    law = forced_routing(process.config, model, process.rank, process.device)
    if law is not None:
        ids_T = torch.randint(model.vocab_size, (tokens,), generator=generator)
        positions_T = torch.arange(tokens)
        idx_TK, weights_TK = law(layer=0)(
            ids_T.to(process.device), positions_T.to(process.device), tokens
        )
    else:
        scores = torch.rand(tokens, model.num_experts, generator=generator)
        idx_TK = scores.topk(model.top_k, dim=-1).indices.to(process.device)
        weights_TK = torch.full(idx_TK.shape, 1 / model.top_k, device=process.device)
    return x_TD.to(process.device, process.dtype), idx_TK, weights_TK


def _median(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Return the seconds of one call: the median of rounds of `repeats` calls."""
    found = []
    for _ in range(ROUNDS + 1):
        _finish(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        _finish(device)
        found.append((time.perf_counter() - started) / repeats)
    return statistics.median(found[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
