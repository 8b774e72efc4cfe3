"""What a step gives to the host, on its way there: draws, log-probabilities, vectors, counts of experts' rows."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kernels.host.host_copy import HostCopies, StepClock
from workers.models.decoder import DecoderLM
from workers.pooling.head import PoolingHead
from workers.runner.accepted_drafts import AcceptedDrafts
from workers.runner.draft_store import DraftStore
from workers.runner.ran import Forwarded, StepDraft, run_times
from workers.runner.row_logits import prompt_logits
from workers.sampling.logprobs import PromptLogprobs
from workers.sampling.sampler import SampledTokens
from workers.step.forward_batch import ForwardBatch
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import Sequence
from workers.step.step_output import StepOutput, counts_of

ReadOutput = Callable[[ScheduledBatch, StepDraft | None], StepOutput]
"""Reads the output of a launched step: of its batch, with tokens in place of references to drafts, and of the drafts
behind it; None: there are none. Waits for the step, but not for its drafts."""


class StepResults:
    """Belongs to one runner.

    stream   of copies to the host; None on CPU
    """

    def __init__(
        self,
        model: DecoderLM,
        accepted: AcceptedDrafts,
        store: DraftStore | None,
        stream: torch.cuda.Stream | None,
    ):
        self._model, self._accepted, self._store, self._stream = model, accepted, store, stream
        self._prompt_logprobs = PromptLogprobs()
        self._pooling = PoolingHead(model)

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row."""
        self._prompt_logprobs.admit(seq)
        self._pooling.admit(seq)

    def copy(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        forwarded: Forwarded,
        sampled: SampledTokens,
        clock: StepClock,
        prepare: float,
        counts_B: np.ndarray | None,
    ) -> ReadOutput:
        """Start to copy the results of a step to the host; `clock` gets its last moment before.

        prepare    seconds of the host before the forward
        counts_B   how many draws of each sequence count; None: those that equal its drafts, and one more
        """
        hidden_TD, _, _, counts_Ls = forwarded
        # A step that completes a prompt also samples its first token.
        starts, rows = batch.query_start_loc_cpu, partial(prompt_logits, self._model)
        place = starts, batch.seq_lens_cpu, hidden_TD
        prompts = self._prompt_logprobs.collect(scheduled.parts, *place, rows)
        vectors = self._pooling.collect(scheduled, starts, hidden_TD)
        clock.mark()

        copy = HostCopies(self._stream)
        if scheduled.num_verify:
            self._accepted.copy(copy)
        sampled = sampled.to(copy)
        prompts = {name: parts.to(copy) for name, parts in (prompts or {}).items()}
        vectors = None if vectors is None else vectors.to(copy)
        counts_Ls = None if counts_Ls is None else copy(counts_Ls)
        copy.finish()

        def read(resolved: ScheduledBatch, found: StepDraft | None) -> StepOutput:
            copy.wait()
            drawn_L = sampled.token_B.numpy()
            drawn_B = counts_of(resolved, drawn_L, counts_B)
            before, drafts = None, None
            if found is not None:
                assert self._store is not None
                drafts = self._store.drafts_of(found.drafts, found.rows, drawn_B)
                before = found.before
            return StepOutput.of(
                resolved,
                drawn_L,
                sampled.entries(),
                prompt_logprobs={name: parts.lists() for name, parts in prompts.items()} or None,
                vectors=None if vectors is None else vectors.lists(len(resolved.seqs)),
                times=partial(run_times, prepare, clock, before),
                drafts=drafts,
                counts_B=drawn_B,
                expert_counts=None if counts_Ls is None else counts_Ls.numpy(),
            )

        return read
