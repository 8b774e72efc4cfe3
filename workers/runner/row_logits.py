"""Logits of chosen rows of a forward, with the adapters of these rows where the head takes adapters.

L rows with logits, N rows of one sequence, D hidden, V vocabulary.
"""

import torch

from kernels.lora.rows import AdapterRows
from workers.models.decoder import DecoderLM
from workers.step.forward_batch import ForwardBatch


def batch_logits(
    model: DecoderLM, hidden_TD: torch.Tensor, batch: ForwardBatch
) -> torch.Tensor | None:
    """Return the float32 logits [L, V] of batch.logits_indices; None without any."""
    if not len(batch.logits_indices):
        return None
    hidden_LD = hidden_TD[batch.logits_indices]
    if batch.adapters is None or not model.head_takes_adapters:
        return model.compute_logits(hidden_LD)
    adapters = batch.adapters.take(batch.logits_indices)
    return model.compute_logits(hidden_LD, adapters=adapters)


def prompt_logits(model: DecoderLM, hidden_ND: torch.Tensor, adapter_slot: int) -> torch.Tensor:
    """Return the float32 logits [N, V] of rows of one sequence, of which the adapter is in `adapter_slot`."""
    if not adapter_slot or not model.head_takes_adapters:
        return model.compute_logits(hidden_ND)
    adapters = AdapterRows.of_one(adapter_slot, len(hidden_ND), hidden_ND.device)
    return model.compute_logits(hidden_ND, adapters=adapters)
