"""The sequences of a step as the kernels of gated delta nets read them: integers on the device. Prompts have chunks."""

from dataclasses import dataclass

import torch

CHUNK = 64
HEADER = 3


@dataclass(frozen=True, eq=False)
class DecodeTable:
    """The sequences without prompts, the first ones of a step. Launches depend on nothing else than its sizes.

    slots      int64 [B]: a slot with a state, or minus a slot without one, or 0 for none
    starts     int32 [2 + B]: rows of the first sequence in earlier ubatches; the first row of each sequence, and the
               row behind the last; None: each has one row
    most_rows  rows of the sequences, at most
    num_rows   rows of the step, if those behind the sequences get zeros from the decodes' kernel; else 0
    """

    slots: torch.Tensor
    starts: torch.Tensor | None
    most_rows: int
    num_rows: int = 0

    @property
    def starts_or_any(self) -> torch.Tensor:
        """An argument of kernels that read no starts where there are none."""
        return self.slots if self.starts is None else self.starts


@dataclass(frozen=True, eq=False)
class PromptTable:
    """Which rows of a step belong to prompts. Launches depend on nothing else than its limits.

    numbers   int32 [3 + 2 * max_chunks + 3 * max_prompts]: the numbers of chunks, prompts and real rows; the prompt of
              each chunk; its first row; the first row of each prompt; the row behind its last; its first chunk
    slots     int64 [max_prompts]: a slot with a state, or minus a slot without one, or 0 for none
    chunk_programs, prompt_programs   programs of a launch that share the chunks, or the prompts, of one head
    """

    numbers: torch.Tensor
    slots: torch.Tensor
    max_chunks: int
    max_prompts: int
    chunk_programs: int
    prompt_programs: int
