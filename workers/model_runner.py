"""One forward of one rank: tensors in, model, sampling, a StepOutput out. Knows nothing of votes or requests' fate."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from kernels.select import Kernels
from workers.forward_batch import ForwardBatch, ForwardBatchBuilder
from workers.grammar_mask import GrammarMasks, PendingMask
from workers.logprobs import CompletePrompts, PromptLogprobs
from workers.models.qwen3_moe import Qwen3MoeForCausalLM
from workers.scheduler import ScheduledBatch
from workers.sequence import SequenceTable
from workers.step_output import StepOutput
from workers.step_sync import StepPlan
from workers.token_picker import TokenPicker


@dataclass
class RunTimes:
    """Seconds of the last forward, by part."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0


class ModelRunner:
    """Runs the model over the sequences of a SequenceTable, whose KV caches the attention holds."""

    def __init__(
        self,
        model: Qwen3MoeForCausalLM,
        kernels: Kernels,
        table: SequenceTable,
        *,
        rank: int,
        max_num_tokens: int,
        max_num_seqs: int,
        num_threads: int,
        device: torch.device,
    ):
        self.model = model
        self.times = RunTimes()
        self._attention = kernels.attention
        self._rank = rank
        self._table = table
        self._picker = TokenPicker(table, max_num_seqs, model.config.vocab_size, device)
        self._prompt_logprobs = PromptLogprobs()
        self._masks = GrammarMasks(model.config.vocab_size, num_threads)
        self._met_grammar = False
        self._builder = ForwardBatchBuilder(table, max_num_tokens, max_num_seqs, device)

    @torch.inference_mode()
    def execute(self, scheduled: ScheduledBatch, plan: StepPlan) -> StepOutput:
        """Run this rank's part of a step.

        Called on every rank in every step that runs, with tokens or without.
        """
        started = time.perf_counter()
        for seq in scheduled.admitted:
            self._picker.admit(seq)
            self._prompt_logprobs.admit(seq)
            self._met_grammar |= seq.grammar is not None
        batch = self._builder.build(
            scheduled, plan.tokens_to_run(self._rank), plan.num_tokens_across_dp
        )
        self._attention.plan(batch)
        mask = self._start_mask(scheduled) if self._met_grammar else None
        prepared = time.perf_counter()
        hidden_TD = self.model.forward(batch)
        if len(batch.logits_indices) == 0:
            self._collect_prompts(scheduled, batch, hidden_TD)
            self.times = RunTimes(prepared - started, time.perf_counter() - prepared)
            return StepOutput([])
        logits_LV = self.model.compute_logits(hidden_TD[batch.logits_indices])
        forwarded = time.perf_counter()
        rows, positions = self._sampling_keys(scheduled)
        allowed = None if mask is None else mask.wait()
        token_ids, logprobs = self._picker.pick(logits_LV, rows, positions, allowed)
        prompts = self._collect_prompts(scheduled, batch, hidden_TD)
        done = time.perf_counter()
        self.times = RunTimes(prepared - started, forwarded - prepared, done - forwarded)
        return StepOutput(token_ids, logprobs, prompts)

    def _start_mask(self, scheduled: ScheduledBatch) -> PendingMask | None:
        """Begin to compute what the sampling sequences with a grammar may say."""
        pairs = zip(scheduled.seqs, scheduled.samples.tolist(), strict=True)
        return self._masks.start(seq.grammar for seq, samples in pairs if samples)

    def _collect_prompts(
        self, scheduled: ScheduledBatch, batch: ForwardBatch, hidden_TD: torch.Tensor
    ) -> CompletePrompts | None:
        """What this step completed. A step that completes a prompt also samples its first token."""
        return self._prompt_logprobs.collect(
            scheduled.seqs, batch.query_start_loc_cpu, hidden_TD, self.model.compute_logits
        )

    def _sampling_keys(self, scheduled: ScheduledBatch) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the sampling sequences and the position that each one's new token will have."""
        count = len(scheduled.seqs)
        rows = np.fromiter((seq.row for seq in scheduled.seqs), dtype=np.int64, count=count)
        positions = self._table.num_computed[rows] + scheduled.num_new_tokens
        return rows[scheduled.samples], positions[scheduled.samples]
