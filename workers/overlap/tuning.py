"""Measures at the start from which step sizes on ubatches are faster than whole steps.

Collective: every rank times the same steps, and the slowest rank's time counts.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from workers.overlap.policy import OverlapPolicy, Sample, threshold, with_measured
from workers.overlap.rank_overlap import Gather
from workers.runner.model_runner import ModelRunner
from workers.scheduler.scheduler import Scheduler
from workers.step.step_sync import ForwardMode, StepPlan
from workers.wire.request import NO_OUTPUT, EngineRequest, PoolingParams, SamplingParams

BUDGET_S = 30.0  # sizes that are not measured by then are not cut
REPEATS = 3
PROMPT_LEN = 1024  # tokens of a prompt in measured prefills
CONTEXT_LEN = 128  # tokens before measured decodes
SMALLEST = {"decode": 16, "prefill": 128}
_OF_PHASE: dict[str, Callable[[ForwardMode], bool]] = {
    "decode": ForwardMode.is_decode,
    "prefill": lambda mode: not mode.is_idle(),
}

# Returns the seconds of this rank's step: phase, tokens, whether in ubatches.
Run = Callable[[str, int, bool], float]


def sizes_to_measure(phase: str, largest: int) -> list[int]:
    """Return the powers of two from the phase's smallest size to below `largest`, then `largest`."""
    sizes, size = [], SMALLEST[phase]
    while size < largest:
        sizes.append(size)
        size *= 2
    return [*sizes, largest] if largest >= SMALLEST[phase] else []


def sizes_to_warm_up(phase: str, least: int | None, largest: int) -> list[int]:
    """Return the measured sizes that cover all steps of `least` tokens and more; none if `least` is None."""
    if least is None:
        return []
    return [size for size in sizes_to_measure(phase, largest) if 2 * size > least]


def tune(
    policy: OverlapPolicy,
    phases: Iterable[str],
    largest: Mapping[str, int],
    run: Run,
    gather: Gather,
    budget_s: float = BUDGET_S,
) -> OverlapPolicy:
    """Return `policy` with measured thresholds of `phases`, the same on all ranks.

    largest   tokens of the largest step of each phase

    Measures from the largest size down to the first size at which ubatches do not win, because smaller sizes cannot
    change the threshold.
    """
    started = time.monotonic()
    for phase in sorted(phases):
        samples: list[Sample] = []
        for size in reversed(sizes_to_measure(phase, largest[phase])):
            mine = run(phase, size, False), run(phase, size, True), time.monotonic() - started
            whole_s, ubatched_s, spent_s = (
                max(column) for column in zip(*gather(mine), strict=True)
            )
            samples.insert(0, Sample(size, whole_s, ubatched_s))
            if spent_s > budget_s or threshold(samples) != size:
                break
        policy = with_measured(policy, phase, samples)
    return policy


def best_comm_sms(
    choices: Sequence[int],
    num_tokens: int,
    run: Run,
    gather: Gather,
    limit: Callable[[int | None], None],
) -> int | None:
    """Return the SMs of the all-to-all, set by `limit`, at which a ubatched prefill is fastest; None = no limit."""
    seconds = {}
    for choice in (None, *choices):
        limit(choice)
        seconds[choice] = max(gather(run("prefill", num_tokens, True)))
    return min(seconds, key=lambda choice: seconds[choice])


def decode_context(max_prompt_len: int) -> int:
    """Return the tokens of each sequence before its measured decodes."""
    return max(1, min(CONTEXT_LEN, max_prompt_len // 2))


def steps_of_prompts(num_seqs: int, length: int, max_num_tokens: int) -> int:
    """Return the steps that compute `num_seqs` prompts of `length` tokens; each sequence then decodes in every step."""
    computed = steps = 0
    while computed < num_seqs * length:
        computed += max_num_tokens - computed // length
        steps += 1
    return steps


class StepTimer:
    """Times real steps of one rank's runner; a `Run`.

    pooling   of a model that makes vectors of prompts, and has no decodes; None: it generates
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        *,
        plan: Callable[[ForwardMode, int, bool], StepPlan],
        max_prompt_len: int,
        max_num_seqs: int,
        max_num_tokens: int,
        vocab_size: int,
        pooling: PoolingParams | None = None,
    ):
        self._runner, self._scheduler, self._plan = runner, scheduler, plan
        self._max_prompt_len, self._max_num_seqs = max_prompt_len, max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._vocab_size, self._pooling = vocab_size, pooling

    def __call__(self, phase: str, num_tokens: int, ubatch: bool) -> float:
        """Return the seconds of one step: the median of REPEATS steps after a first one."""
        found = []
        if phase == "decode":
            length = decode_context(self._max_prompt_len)
            # The first sequences decode while the prompts of the last sequences are computed.
            before = steps_of_prompts(num_tokens, length, self._max_num_tokens)
            lengths = [length] * num_tokens
            found = self._steps(lengths, before + 1 + REPEATS, phase, num_tokens, ubatch)
        else:
            for _ in range(1 + REPEATS):
                found += self._steps(self._prompts(num_tokens), 1, phase, num_tokens, ubatch)
        return statistics.median(found[1 : 1 + REPEATS])

    def _prompts(self, num_tokens: int) -> list[int]:
        """Return lengths of prompts that fill one step."""
        length = max(PROMPT_LEN, -(-num_tokens // self._max_num_seqs))
        length = min(length, self._max_prompt_len)
        full, rest = divmod(num_tokens, length)
        return [length] * full + [rest] * bool(rest)

    def _steps(
        self, lengths: list[int], max_tokens: int, phase: str, num_tokens: int, ubatch: bool
    ) -> list[float]:
        """Run requests to their end; return the seconds of this phase's steps of `num_tokens`, which may be cut."""
        generator = np.random.default_rng(num_tokens)
        for index, length in enumerate(lengths):
            request = EngineRequest(
                request_id=f"measure-{index}",
                ingress_id="",
                prompt_token_ids=generator.integers(0, self._vocab_size, length).tolist(),
                params=NO_OUTPUT
                if self._pooling
                else SamplingParams(max_tokens=max_tokens, temperature=0.0),
                pooling=self._pooling,
            )
            refused = self._scheduler.add(request)
            assert refused is None, refused
        with self._scheduler.cache.off():
            return self._run(phase, num_tokens, ubatch)

    def _run(self, phase: str, num_tokens: int, ubatch: bool) -> list[float]:
        """Run the open requests to their end; see `_steps`."""
        found: list[float] = []
        while self._scheduler.has_work:
            batch = self._scheduler.schedule()
            counts = _OF_PHASE[phase](batch.forward_mode) and batch.num_tokens == num_tokens
            plan = self._plan(batch.forward_mode, batch.num_tokens, ubatch and counts)
            output = self._runner.launch(batch, plan)
            self._scheduler.launched(batch)
            result = output.wait()
            self._scheduler.commit(batch, result)
            if counts:
                # An asynchronous engine prepares a step while the step before computes, so preparation costs nothing.
                times = result.times()
                prepare = 0.0 if self._runner.asynchronous else times.prepare
                found.append(prepare + times.forward)
        return found
