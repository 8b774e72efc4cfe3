"""Which drafts of a step count, computed on the device: the next forward finds its tokens without the host.

The host finds the same numbers when it reads the draws (`workers.step.step_output.count_verified`). Here nothing waits
but `read`: where attention takes no lengths of the device, the host needs the numbers before the next forward.

B sequences, S sequences with rows with logits, L rows with logits, R rows of the InputBatch.
"""

import numpy as np
import torch

from kernels.host.host_copy import HostCopies, to_device
from kernels.linear_attention.base import LinearAttention
from workers.step.forward_batch import ForwardBatch, resolve_pending
from workers.step.scheduled_batch import ScheduledBatch


class AcceptedDrafts:
    """What the last launched forwards leave on the device for the next one. Belongs to one runner.

    last_tokens   int64 [R + R * K]: the last token drawn in each row, of those that count, then up to K drafts behind
                  each; None: the host reads the tokens of a step before the next step
    rejected_R    int64 [R]: how many drafts of the row's last step do not count
    fused         one kernel in place of many operators; on a GPU
    """

    def __init__(
        self,
        num_rows: int,
        num_drafts: int,
        device: torch.device,
        linear_attention: LinearAttention | None = None,
        *,
        asynchronous: bool = True,
    ):
        """num_drafts: K."""
        self.fused = device.type == "cuda"
        self.last_tokens: torch.Tensor | None = None
        if asynchronous:
            size = num_rows * (1 + num_drafts)
            self.last_tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.rejected_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._on_host = HostCopies(None), torch.zeros(num_rows, dtype=torch.int64)
        self._linear_attention = linear_attention

    def enter(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        token_L: torch.Tensor,
        counts_B: np.ndarray | None,
    ) -> None:
        """Enter the draws of a forward, on the stream of the forward.

        token_L    int64, the draws on the device; negative where no token could be drawn
        counts_B   how many draws of each sequence count; None: those that equal its drafts, and one more
        """
        if scheduled.draft_token_ids is None:
            if self.last_tokens is not None and len(token_L):
                self.last_tokens.index_copy_(0, batch.sampling_rows, token_L.clamp(min=0))
            if self._linear_attention is not None:
                self._linear_attention.accept(_slots(batch))
            return
        if self.fused:
            accepted_B = self._launch(scheduled, batch, token_L, counts_B)
        else:
            if counts_B is None:
                accepted_B = count_accepted(scheduled, token_L, self.last_tokens)
            else:
                accepted_B = torch.from_numpy(np.maximum(counts_B - 1, 0))
            if self.last_tokens is not None:
                self._keep_last(self.last_tokens, scheduled, batch, token_L, accepted_B)
        if self._linear_attention is not None:
            self._linear_attention.accept(_slots(batch), accepted_B)

    def _launch(
        self,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        token_L: torch.Tensor,
        counts_B: np.ndarray | None,
    ) -> torch.Tensor:
        """As `count_accepted` and `_keep_last`, in one kernel."""
        from kernels.triton.drafts_behind import NOT_GIVEN, enter_draws

        num_logits, num_seqs = scheduled.num_logits, len(scheduled.seqs)
        given_B = np.full(num_seqs, NOT_GIVEN) if counts_B is None else counts_B
        seqs_3B = np.stack((num_logits.cumsum() - num_logits, num_logits, given_B))
        drafts = scheduled.compared_drafts if counts_B is None else num_logits[:0]
        packed = to_device(np.concatenate((seqs_3B.reshape(-1), drafts)), token_L.device)
        verify = slice(scheduled.num_single_rows, scheduled.num_single_rows + scheduled.num_verify)
        return enter_draws(
            packed[: 3 * num_seqs].view(3, num_seqs),
            packed[3 * num_seqs :],
            token_L,
            batch.sampling_rows,
            self.last_tokens,
            self.rejected_R,
            int(num_logits[verify].max(initial=1)),
        )

    def _keep_last(
        self,
        last_tokens: torch.Tensor,
        scheduled: ScheduledBatch,
        batch: ForwardBatch,
        token_L: torch.Tensor,
        accepted_B: torch.Tensor,
    ) -> None:
        seqs = scheduled.drawing_seqs
        arrays = seqs, scheduled.first_logits, scheduled.num_logits[seqs] - 1
        seq_S, first_S, drafts_S = to_device(np.stack(arrays), token_L.device)
        accepted_S = accepted_B.index_select(0, seq_S)
        last_S = first_S + accepted_S
        rows_S = batch.sampling_rows.index_select(0, last_S)
        # Tokens that follow an invalid token are discarded with it.
        last_tokens.index_copy_(0, rows_S, token_L.index_select(0, last_S).clamp_(min=0))
        self.rejected_R.index_copy_(0, rows_S, drafts_S - accepted_S)

    def copy(self, copies: HostCopies) -> None:
        """Start to copy what `enter` has entered to the host, before a draft model keeps the device busy."""
        self._on_host = copies, copies(self.rejected_R)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return how many drafts of the last step of these rows do not count, int64. Waits for the device."""
        copies, rejected_R = self._on_host
        copies.wait()
        found: np.ndarray = rejected_R.numpy()[rows]
        return found


def _slots(batch: ForwardBatch) -> torch.Tensor:
    assert batch.state_slots is not None, "the model has linear attention"
    return batch.state_slots


def count_accepted(
    scheduled: ScheduledBatch, token_L: torch.Tensor, last_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return int64 [B]: the drafts of each sequence before the first that differs from its draw.

    last_tokens   where the device finds drafts that the batch only refers to; None: there are none
    """
    drafts_L = scheduled.compared_drafts
    arrays = drafts_L, scheduled.logits_places, scheduled.logits_seqs
    draft_L, place_L, seq_L = to_device(np.stack(arrays), token_L.device)
    if last_tokens is not None and (drafts_L < 0).any():
        draft_L = resolve_pending(draft_L, last_tokens)
    # No draw equals the entry behind the last draft, so the first that differs exists. Sequences without logits have 0.
    place_L = torch.where(token_L == draft_L, len(token_L), place_L)
    accepted_B = token_L.new_zeros(len(scheduled.seqs))
    return accepted_B.scatter_reduce_(0, seq_L, place_L, "amin", include_self=False)
