"""The prompts of a step as the kernels of gated delta nets read them: cut into chunks, as integers on the device."""

from dataclasses import dataclass

import torch

CHUNK = 64
HEADER = 3


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
