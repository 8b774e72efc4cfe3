"""Steps that all ranks run alike before there are requests: to compile, to allocate and to measure memory."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from kernels.attention.base import Attention
from workers.config import SchedulerConfig
from workers.parallel import ParallelDims
from workers.runner.model_runner import ModelRunner
from workers.sampling.logprobs import MAX_LOGITS_ROWS
from workers.scheduler.scheduler import Scheduler
from workers.step.step_sync import StepPlan
from workers.wire.request import NO_OUTPUT, EngineRequest, PoolingParams, SamplingParams

logger = logging.getLogger(__name__)


def bind_beside(attention: Attention, kv_caches: Sequence[torch.Tensor]) -> Future[None]:
    """Bind the caches on a new thread, because attention may compile for minutes. Return its future."""

    def bind() -> None:
        started = time.perf_counter()
        torch.cuda.set_device(kv_caches[0].device)
        attention.bind(kv_caches)
        logger.debug("attention's kernels: %.2f s", time.perf_counter() - started)

    pool = ThreadPoolExecutor(1, thread_name_prefix="compile-attention")
    future = pool.submit(bind)
    pool.shutdown(wait=False)
    return future


# Sampling with most memory beside the logits: sorted logits, counts of seen tokens, and log-probabilities.
_HEAVIEST = SamplingParams(
    max_tokens=2, temperature=1.0, top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=20
)

_HEAVIEST_PROMPT = SamplingParams(max_tokens=1, prompt_logprobs=20)


@dataclass(frozen=True)
class WarmUpSteps:
    """Warm-up steps. Collective: every rank runs one step at one time. `equal_tokens` as in PlanConfig.

    vocab_size  the token ids of prompts are random below it, because equal ids would all go to the same experts
    windows     layers have windows, and so blocks of their own
    num_drafts  drafts of each sequence in the step that samples most
    adapters    rows may have adapters: `prefill` runs without and with their products
    pooling     of a model that makes vectors of prompts: its steps have no decodes and no samples; None: it generates
    """

    dims: ParallelDims
    equal_tokens: bool
    max_model_len: int
    limits: SchedulerConfig
    block_size: int
    vocab_size: int
    windows: bool = False
    num_drafts: int = 0
    pooling: PoolingParams | None = None
    adapters: bool = False

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks that suffices for each of these steps."""
        tokens = -(-2 * self.limits.max_num_batched_tokens // self.block_size)
        per_seq = 1 + -(-self.num_drafts // self.block_size)
        return (1 + self.windows) * (tokens + self.limits.max_num_seqs * per_seq + 2)

    def prefill(self, runner: ModelRunner, scheduler: Scheduler, num_tokens: int) -> None:
        """Run a prefill of about `num_tokens`, and a decode."""
        length = min(num_tokens, self.max_model_len - 2)
        count = min(num_tokens // length, self.limits.max_num_seqs)
        params = SamplingParams(max_tokens=2)
        for adapters in (False, True)[: 1 + self.adapters]:
            self._run(runner, scheduler, count, length, params, adapters=adapters)

    def cut_prompt(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        """Run prompts that exceed a step: the rest of the last one runs beside decodes, and reads cached tokens."""
        budget = self.limits.max_num_batched_tokens
        length = min(-(-3 * budget // 4), self.max_model_len - 2)
        count = min(budget // length + 1, self.limits.max_num_seqs)
        self._run(runner, scheduler, count, length, SamplingParams(max_tokens=2))

    def sample(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        """Run the most sequences at once, with every sampling option that takes memory; then a prompt's logprobs.

        With drafts also one sequence alone: kernels have other forms for few rows.
        """
        heaviest = replace(_HEAVIEST, max_tokens=2 + self.num_drafts)
        self._run(runner, scheduler, self.limits.max_num_seqs, 1, heaviest, self.num_drafts)
        if self.num_drafts:
            one = SamplingParams(max_tokens=2 + self.num_drafts)
            self._run(runner, scheduler, 1, 1, one, self.num_drafts)
        length = min(MAX_LOGITS_ROWS, self.limits.max_num_batched_tokens, self.max_model_len - 2)
        self._run(runner, scheduler, 1, length, _HEAVIEST_PROMPT)

    def _run(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        count: int,
        length: int,
        params: SamplingParams,
        num_drafts: int = 0,
        *,
        adapters: bool = False,
    ) -> None:
        started = time.perf_counter()
        prompts = np.random.default_rng(length).integers(self.vocab_size, size=(count, length))
        for index, prompt in enumerate(prompts.tolist()):
            scheduler.add(
                EngineRequest(
                    request_id=f"warm-up-{index}",
                    ingress_id="",
                    prompt_token_ids=prompt,
                    params=params if self.pooling is None else NO_OUTPUT,
                    pooling=self.pooling,
                )
            )
        with scheduler.cache.off():
            while scheduler.has_work:
                verifies = bool(num_drafts) and self._propose(scheduler, num_drafts)
                batch = scheduler.schedule()
                num_rows = batch.num_tokens
                padded = num_rows if self.equal_tokens else 0
                plan = StepPlan(
                    True,
                    self.dims.equal_counts(num_rows),
                    padded,
                    draft_reads=self.num_drafts > 0,
                    draft_steps=self.num_drafts,  # of a draft model, if the runner has one
                    draft_rows=int(np.count_nonzero(batch.num_logits)),
                    adapters=adapters,
                )
                output = runner.launch(batch, plan)
                scheduler.launched(batch)
                scheduler.commit(batch, output.wait())
                if verifies:  # ranks may draw different tokens, and so confirm different drafts
                    for seq in list(scheduler.running):
                        scheduler.abort(seq.request.request_id)
        seconds = time.perf_counter() - started
        logger.debug("warm-up of %d prompts of %d tokens: %.2f s", count, length, seconds)

    def _propose(self, scheduler: Scheduler, num_drafts: int) -> bool:
        """Draft tokens of the sequences that decode, as many as a step has; return whether there are such sequences."""
        decodes = [seq for seq in scheduler.running if seq.takes_drafts]
        left = self.limits.max_num_batched_tokens - len(decodes)
        for seq in decodes:
            seq.propose([0] * min(num_drafts, left))
            left -= len(seq.draft_token_ids)
        return bool(decodes)
