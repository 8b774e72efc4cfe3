"""The ubatches of one epoch: their backends and graphs, and the tuning of the rank's policy where it is still open."""

import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

import torch

from kernels.backends.select import Backends, Selection
from kernels.backends.ubatch import build_ubatch_backends
from kernels.interface.context import BackendContext
from kernels.linear_attention.base import LinearStates
from workers.config import RankConfig
from workers.overlap import cache as overlap_cache
from workers.overlap import tuning
from workers.overlap.policy import OverlapPolicy, too_many_sms
from workers.overlap.rank_overlap import Gather, RankOverlap
from workers.runner.cuda_graphs import Progress, StepGraphs
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.runner.model_runner import ModelRunner
from workers.scheduler.scheduler import Scheduler
from workers.step.step_sync import ForwardMode, GraphMode, StepPlan
from workers.ubatch.wrapper import UbatchModel, UBatchWrapper
from workers.wire.request import PoolingParams

MIN_CONTEXT = 16  # tokens: decodes of shorter ones would outgrow model.max_model_len

logger = logging.getLogger(__name__)


class EpochUbatches:
    """Backends of the ubatches of one epoch; none where `overlap` never cuts a step. Collective.

    overlap       the policy of the rank process; `tune` completes it
    pooling       of a model that makes vectors of prompts, and has no decodes; None: it generates
    graph_bytes   bytes of all captures of ubatched steps. Captures that were only measured count, because they share
                  the memory pool of the graphs of whole steps, which is never freed
    """

    def __init__(
        self,
        overlap: RankOverlap,
        config: RankConfig,
        selection: Selection,
        context: BackendContext,
        whole: Backends,
        gather: Gather,
        *,
        pooling: PoolingParams | None = None,
    ):
        self.overlap, self._pooling = overlap, pooling
        self.graph_bytes = 0
        self._config = config
        self._rank, self._device, self._whole = context.rank, context.device, whole
        self._backends: list[Backends] = []
        self._gather = gather
        overlap.agree(gather)
        if overlap.may_cut:
            count = config.overlap.num_ubatches
            self._backends = build_ubatch_backends(selection, context, whole, count)
            self._check_comm_sms()

    @property
    def policy(self) -> OverlapPolicy:
        """The policy of the rank process."""
        return self.overlap.policy

    def _check_comm_sms(self) -> None:
        """Raise ValueError if overlap.comm_sms leaves no SM to compute; drop it if the all-to-all takes no limit."""
        wanted, all2all = self.policy.comm_sms, self._backends[0].all2all
        if wanted is None:
            return
        if not all2all.sm_choices:
            reason = f"{all2all.name} takes no limit, so overlap.comm_sms is ignored"
            self.overlap.policy = self.policy.with_comm_sms(None, reason)
            return
        problem = too_many_sms(wanted, _num_sms(self._device), all2all.sm_choices)
        if problem is not None:
            raise ValueError(f"overlap.comm_sms: {problem}")

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Bind the caches to the attention of whole steps and of every ubatch."""
        for own in (self._whole, *self._backends):
            own.attention.bind(kv_caches)

    def bind_states(self, states: Sequence[LinearStates]) -> None:
        """Bind the pools of states to the linear attention of whole steps and of every ubatch."""
        for own in (self._whole, *self._backends):
            if own.linear_attention is not None:
                own.linear_attention.bind(states)

    def wrapper(self, model: UbatchModel) -> UBatchWrapper | None:
        """Return the wrapper that runs `model` in ubatches; None if no step is ever cut."""
        if not self._backends:
            return None
        return UBatchWrapper(
            model, self._backends, comm_sms=self.policy.comm_sms, total_sms=_num_sms(self._device)
        )

    def tune(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        facts: Mapping[str, object],
        progress: Progress | None = None,
    ) -> None:
        """Complete the policy, capture the graphs of ubatched steps and run the other ubatched steps once. Collective.

        What the configuration leaves open is measured, or loaded from a start under the same `facts`; a rank process
        does so in its first epoch only. Afterwards no kernel of a ubatch compiles in traffic.
        """
        # With nothing open and nothing to cut, `phalanx check` gives the reason; the start need not log it.
        level = logging.INFO if self._backends else logging.DEBUG
        if self._backends:
            run = self.timer(runner, scheduler, max_model_len)
            largest = self.largest(scheduler, max_model_len)
            measured = self._complete_policy(runner, largest, run, facts)
            if runner.graphs is not None:
                self._capture(runner.graphs, progress)
            if self._device.type == "cuda" and not self.overlap.warm:
                self._warm_up(runner.graphs, largest, run, measured)
        self.overlap.settle(self.policy)
        self.overlap.warm = True
        if not self.policy.enabled:
            runner.drop_ubatches()
            self.close()
        if self._rank == 0:
            for line in self.policy.lines():
                logger.log(level, line)

    def timer(
        self, runner: ModelRunner, scheduler: Scheduler, max_model_len: int
    ) -> tuning.StepTimer:
        """Return a timer of steps that are equal on all ranks. They replay graphs where the rank has graphs.

        Every rank must call the timer alike.
        """
        limits = self._config.scheduler
        return tuning.StepTimer(
            runner,
            scheduler,
            plan=partial(self._plan, runner.graphs),
            max_prompt_len=max_model_len - 2,
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            vocab_size=runner.model.config.vocab_size,
            pooling=self._pooling,
        )

    def largest(self, scheduler: Scheduler, max_model_len: int) -> dict[str, int]:
        """Return the tokens of the largest step of each phase that limits and cache allow."""
        limits = self._config.scheduler
        cache = scheduler.cache
        context = tuning.decode_context(max_model_len - 2)
        # The first decodes grow while the prompts of the last decodes are computed, by less than one context. No
        # sequence may be preempted during the measurement.
        per_decode = cache.demand.blocks(2 * context)
        decodes = min(
            limits.max_num_seqs, limits.max_num_batched_tokens // 2, cache.num_blocks // per_decode
        )
        return {
            "decode": decodes if context >= MIN_CONTEXT and self._pooling is None else 0,
            "prefill": min(
                limits.max_num_batched_tokens,
                cache.demand.tokens(cache.num_blocks) // 2,
                limits.max_num_seqs * (max_model_len - 2),
            ),
        }

    def abort(self) -> None:
        """End all waits of the ubatches' all-to-alls; see AllToAll.abort."""
        for own in list(self._backends):
            own.all2all.abort()

    def close(self) -> None:
        """Release the memory that the ubatches' all-to-alls share with other ranks."""
        backends, self._backends = self._backends, []
        for own in backends:
            if own.all2all is not self._whole.all2all:
                own.all2all.close()

    def _complete_policy(
        self,
        runner: ModelRunner,
        largest: Mapping[str, int],
        run: tuning.Run,
        facts: Mapping[str, object],
    ) -> frozenset[str]:
        """Load or measure what is open; returns the phases that were measured."""
        overlap, choices = self.overlap, self._open_comm_sms()
        if overlap.tuned or not (overlap.unmeasured or choices):
            return frozenset()
        measured_on = {
            "hardware": _hardware(self._device),
            "software": overlap_cache.software(),
            "model": runner.model.config,
            "graphs": runner.graphs is not None,
        }
        path = overlap_cache.cache_path({**facts, **measured_on})
        loaded = overlap_cache.load_policy(path) if self._rank == 0 else None
        kept = self._gather(loaded and asdict(loaded))[0]
        if kept is not None:
            overlap.policy = OverlapPolicy(**kept)
            runner.limit_all2all(self.policy.comm_sms)
            return frozenset()
        if choices:
            self._choose_comm_sms(runner, choices, largest["prefill"], run)
        measured = overlap.unmeasured
        overlap.policy = tuning.tune(self.policy, measured, largest, run, self._gather)
        if self._rank == 0:
            overlap_cache.save_policy(path, self.policy)
        return measured

    def _open_comm_sms(self) -> Sequence[int]:
        """The SM limits to choose from; none where the configuration gives one."""
        is_open = self._config.overlap.comm_sms == "auto"
        return self._backends[0].all2all.sm_choices if is_open else ()

    def _choose_comm_sms(
        self, runner: ModelRunner, choices: Sequence[int], num_tokens: int, run: tuning.Run
    ) -> None:
        limit = runner.limit_all2all
        best = tuning.best_comm_sms(choices, num_tokens, run, self._gather, limit)
        limit(best)
        reason = f"fastest of {choices} and no limit"
        self.overlap.policy = self.policy.with_comm_sms(best, reason)

    def _warm_up(
        self,
        graphs: StepGraphs | None,
        largest: Mapping[str, int],
        run: tuning.Run,
        measured: frozenset[str],
    ) -> None:
        """Run the ubatched steps that replay no graph, in the phases that were not measured just now."""
        sizes = GraphSizes() if graphs is None else graphs.sizes
        for phase, mode in (("decode", ForwardMode.DECODE), ("prefill", ForwardMode.EXTEND)):
            if phase in measured:
                continue
            least = getattr(self.policy, f"min_{phase}_tokens")
            for size in tuning.sizes_to_warm_up(phase, least, largest[phase]):
                if sizes.key(mode, size) is None:
                    run(phase, size, True)

    def _capture(self, graphs: StepGraphs, progress: Progress | None) -> None:
        """Provide the ubatched graphs that the policy can replay and discard all other ubatched ones.

        In `progress` they come after the graphs of whole steps.
        """
        wanted = ubatch_graphs(graphs.sizes, self.policy, self._config.overlap.num_ubatches)
        captured = graphs.captured()
        graphs.discard(key for key in captured if key.ubatch and key not in wanted)
        before = graphs.count(graphs.keys)

        def report_progress(done: int, total: int) -> None:
            if progress is not None:
                progress(before + done, before + total)

        self.graph_bytes += graphs.provide(sorted(wanted - captured), report_progress)
        if self.graph_bytes and self._rank == 0:
            logger.info("captured CUDA graphs of ubatches: %.2f GB", self.graph_bytes / 1e9)

    def _plan(
        self,
        graphs: StepGraphs | None,
        forward_mode: ForwardMode,
        num_tokens: int,
        ubatch: bool,
    ) -> StepPlan:
        """Plan a step of `num_tokens` on every rank; capture the graph that it replays if there is none yet."""
        counts = self._config.dims.equal_counts(num_tokens)
        key = None if graphs is None else graphs.sizes.key(forward_mode, num_tokens, ubatch)
        if graphs is None or key is None:
            equal = ubatch or self._whole.all2all.needs_equal_tokens
            return StepPlan(True, counts, num_tokens if equal else 0, ubatch=ubatch)
        if key not in graphs:
            self.graph_bytes += graphs.capture([key])
        return StepPlan(True, counts, key.rows, key.mode, ubatch)


def ubatch_graphs(sizes: GraphSizes, policy: OverlapPolicy, num_ubatches: int) -> set[GraphKey]:
    """Return all graphs in ubatches that a step can ever replay under this policy."""
    decode, prefill = policy.min_decode_tokens, policy.min_prefill_tokens
    either = min((least for least in (decode, prefill) if least is not None), default=None)
    least = {
        GraphMode.DECODE: decode,
        # Without graphs of decodes, as of a model that makes vectors, sequences of one row replay mixed graphs.
        GraphMode.MIXED: prefill if sizes.decode else either,
        GraphMode.VERIFY: either,
    }
    found = set()
    for key in sizes.whole_steps():
        fewest = least[key.mode]
        if fewest is not None and key.rows >= max(fewest, num_ubatches):
            found.add(key._replace(ubatch=True))
    return found


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
