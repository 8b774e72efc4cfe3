"""A rank's ubatches, from its configuration to the policy that its engine votes by. Free where they are off."""

import logging
import platform
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from kernels.backends.select import BackendContext, Backends, Selection
from kernels.backends.ubatch import build_ubatch_backends
from workers.config import RankConfig
from workers.engine.scheduler import Scheduler
from workers.engine.step_sync import ForwardMode, GraphMode, StepPlan
from workers.rank import process_group
from workers.runner.cuda_graphs import Progress, StepGraphs
from workers.runner.graph_sizes import GraphKey, GraphSizes
from workers.runner.model_runner import ModelRunner
from workers.ubatch import cache as overlap_cache
from workers.ubatch import tuning as overlap_tuning
from workers.ubatch.policy import PHASES, OverlapPolicy, configured, too_many_sms
from workers.ubatch.wrapper import UbatchModel, UBatchWrapper

MIN_CONTEXT = 16  # tokens: decodes of shorter ones would outgrow model.max_model_len

logger = logging.getLogger(__name__)


class RankUbatches:
    """The kernels of a rank's slices, and when it wants its steps cut (`policy`).

    graph_bytes   what captures of steps in slices took, those included that were only measured: they share the pool of
                  whole steps' graphs, which keeps its memory
    """

    def __init__(
        self, config: RankConfig, selection: Selection, context: BackendContext, whole: Backends
    ):
        self._config = config
        self._rank, self._device, self._whole = context.rank, context.device, whole
        self.policy, self._unknown = configured(config.overlap, selection.all2all.name)
        self._slices: list[Backends] = []
        self.graph_bytes = 0
        if self.policy.enabled or self._unknown:
            count = config.overlap.num_ubatches
            self._slices = build_ubatch_backends(selection, context, whole, count)
            self._check_comm_sms()

    def _check_comm_sms(self) -> None:
        """Raises ValueError where overlap.comm_sms leaves nothing to the compute."""
        wanted, all2all = self.policy.comm_sms, self._slices[0].all2all
        if wanted is None:
            return
        if not all2all.sm_choices:
            reason = f"{all2all.name} takes no limit, so overlap.comm_sms is ignored"
            self.policy = self.policy.with_comm_sms(None, reason)
        elif reason := too_many_sms(wanted, _num_sms(self._device), all2all.sm_choices):
            raise ValueError(f"overlap.comm_sms: {reason}")

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """The caches of all attention: of whole steps and of slices."""
        for own in (self._whole, *self._slices):
            own.attention.bind(kv_caches)

    def wrapper(self, model: UbatchModel) -> UBatchWrapper | None:
        """What runs `model` in slices, if that may ever happen."""
        if not self._slices:
            return None
        return UBatchWrapper(
            model, self._slices, comm_sms=self.policy.comm_sms, total_sms=_num_sms(self._device)
        )

    def tune(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        facts: Mapping[str, object],
        progress: Progress | None = None,
    ) -> None:
        """Collective: measure what is open, or take over what a start under the same `facts` has measured.

        Either way slices have then run at all sizes, or were captured at all that replay them, so that nothing of
        theirs compiles in traffic.
        """
        # Where nothing was open and nothing will be cut, `phalanx check` says why; a start need not.
        level = logging.INFO if self._slices else logging.DEBUG
        if self._slices:
            self._tune(runner, scheduler, max_model_len, facts, progress)
        if not self.policy.enabled:
            runner.drop_ubatches()
            self.close()
        if self._rank == 0:
            for line in self.policy.lines():
                logger.log(level, line)

    def timer(
        self, runner: ModelRunner, scheduler: Scheduler, max_model_len: int
    ) -> overlap_tuning.StepTimer:
        """What times steps that are alike on all ranks, in graphs where there are some; every rank calls it alike."""
        limits = self._config.scheduler
        return overlap_tuning.StepTimer(
            runner,
            scheduler,
            plan=partial(self._plan, runner.graphs),
            max_prompt_len=max_model_len - 2,
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            vocab_size=runner.model.config.vocab_size,
        )

    def close(self) -> None:
        """Release what slices' exchanges share with other ranks."""
        slices, self._slices = self._slices, []
        for own in slices:
            if own.all2all is not self._whole.all2all:
                own.all2all.close()

    def _tune(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        max_model_len: int,
        facts: Mapping[str, object],
        progress: Progress | None,
    ) -> None:
        run = self.timer(runner, scheduler, max_model_len)
        largest = self.largest(scheduler, max_model_len)
        choices: Sequence[int] = ()
        measured: frozenset[str] = frozenset()
        if self._config.overlap.comm_sms == "auto":
            choices = self._slices[0].all2all.sm_choices
        if self._unknown or choices:
            measured_on = {
                "hardware": _hardware(self._device),
                "software": overlap_cache.software(),
                "model": runner.model.config,
                "graphs": runner.graphs is not None,
            }
            path = overlap_cache.cache_path({**facts, **measured_on})
            kept = self._gather(overlap_cache.load_policy(path) if self._rank == 0 else None)[0]
            if kept is None:
                self._measure(runner, choices, largest, run)
                measured = self._unknown
                if self._rank == 0:
                    overlap_cache.save_policy(path, self.policy)
            else:
                self.policy = kept
                runner.limit_exchange(kept.comm_sms)
        if runner.graphs is not None:
            self._capture(runner.graphs, progress)
        if self._device.type == "cuda":
            self._warm_up(runner.graphs, largest, run, measured)

    def _warm_up(
        self,
        graphs: StepGraphs | None,
        largest: Mapping[str, int],
        run: overlap_tuning.Run,
        measured: frozenset[str],
    ) -> None:
        """Run the steps that will be cut and replay no graph, in phases that were not measured just now."""
        for phase in PHASES:
            replayed = graphs is not None and (phase == "decode" or graphs.sizes.mixed)
            if replayed or phase in measured:
                continue
            least = getattr(self.policy, f"min_{phase}_tokens")
            for size in overlap_tuning.sizes_to_warm_up(phase, least, largest[phase]):
                run(phase, size, True)

    def _capture(self, graphs: StepGraphs, progress: Progress | None) -> None:
        """The graphs in slices that the policy asks for, and no others; they come after whole steps' in `progress`."""
        wanted = sliced_graphs(graphs.sizes, self.policy, self._config.overlap.num_ubatches)
        captured = graphs.captured()
        graphs.discard(key for key in captured if key.ubatch and key not in wanted)
        before = graphs.count(graphs.sizes.whole_steps())

        def tell(done: int, total: int) -> None:
            if progress is not None:
                progress(before + done, before + total)

        self.graph_bytes += graphs.capture(sorted(wanted - captured), tell)
        if self.graph_bytes and self._rank == 0:
            logger.info("captured CUDA graphs of slices: %.2f GB", self.graph_bytes / 1e9)

    def _measure(
        self,
        runner: ModelRunner,
        choices: Sequence[int],
        largest: Mapping[str, int],
        run: overlap_tuning.Run,
    ) -> None:
        if choices:
            self._choose_comm_sms(runner, choices, largest["prefill"], run)
        self.policy = overlap_tuning.tune(self.policy, self._unknown, largest, run, self._gather)

    def _gather(self, value: object) -> Sequence:
        """`value` of every rank."""
        return process_group.gather_objects(value) if self._config.num_ranks > 1 else [value]

    def _plan(
        self,
        graphs: StepGraphs | None,
        forward_mode: ForwardMode,
        num_tokens: int,
        ubatch: bool,
    ) -> StepPlan:
        """A step of so many tokens on every rank. What it replays is captured first, if need be."""
        counts = (num_tokens,) * self._config.num_ranks
        key = None if graphs is None else graphs.sizes.key(forward_mode, num_tokens, ubatch)
        if graphs is None or key is None:
            equal = ubatch or self._whole.all2all.needs_equal_tokens
            return StepPlan(True, counts, num_tokens if equal else 0, ubatch=ubatch)
        if key not in graphs:
            self.graph_bytes += graphs.capture([key])
        return StepPlan(True, counts, key.rows, key.mode, ubatch)

    def _choose_comm_sms(
        self,
        runner: ModelRunner,
        choices: Sequence[int],
        num_tokens: int,
        run: overlap_tuning.Run,
    ) -> None:
        limit = runner.limit_exchange
        best = overlap_tuning.best_comm_sms(choices, num_tokens, run, self._gather, limit)
        limit(best)
        self.policy = self.policy.with_comm_sms(best, f"fastest of {choices} and no limit")

    def largest(self, scheduler: Scheduler, max_model_len: int) -> dict[str, int]:
        """The biggest step of each phase that limits and cache allow."""
        limits, block_size = self._config.scheduler, self._config.cache.block_size
        num_blocks = scheduler.pool.num_blocks
        context = overlap_tuning.decode_context(max_model_len - 2)
        # Measured decodes grow while the last ones' prompts are computed, by less than their context; none may preempt.
        per_decode = -(-2 * context // block_size)
        decodes = min(
            limits.max_num_seqs, limits.max_num_batched_tokens // 2, num_blocks // per_decode
        )
        return {
            "decode": decodes if context >= MIN_CONTEXT else 0,
            "prefill": min(
                limits.max_num_batched_tokens,
                num_blocks * block_size // 2,
                limits.max_num_seqs * (max_model_len - 2),
            ),
        }


def sliced_graphs(sizes: GraphSizes, policy: OverlapPolicy, num_ubatches: int) -> set[GraphKey]:
    """All graphs in slices that a step can ever replay under this policy."""
    least = {
        GraphMode.DECODE: policy.min_decode_tokens,
        GraphMode.MIXED: policy.min_prefill_tokens,
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
