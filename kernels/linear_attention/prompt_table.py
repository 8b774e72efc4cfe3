"""Tables of prompts that the Triton kernels of gated delta nets read, of one step or for CUDA graphs."""

from dataclasses import replace

import numpy as np
import torch

from kernels.host.host_copy import fill, to_device
from kernels.linear_attention.chunks import MAX_CHUNK
from kernels.triton.delta_table import HEADER, PromptTable

MAX_CHUNK_PROGRAMS = 32  # programs of a captured launch beyond one a chunk of full prompts
MAX_PROMPT_PROGRAMS = 8  # programs of a launch that share the prompts of one head


def step_table(starts: np.ndarray, slots: torch.Tensor) -> PromptTable:
    """Return the table of one step: prompts from starts[i] to starts[i + 1], at least one."""
    num_chunks, num_prompts = int((-(-np.diff(starts) // MAX_CHUNK)).sum()), len(slots)
    numbers = to_device(_numbers(starts, num_chunks, num_prompts), slots.device)
    programs = min(num_prompts, MAX_PROMPT_PROGRAMS)
    return PromptTable(numbers, slots, num_chunks, num_prompts, num_chunks, programs)


def graph_table(max_rows: int, max_seqs: int, device: torch.device) -> PromptTable:
    """Return a table without a prompt for graphs of up to `max_rows` rows; its addresses stay."""
    max_prompts = min(max_rows, max_seqs)
    max_chunks = max_rows // MAX_CHUNK + max_prompts
    size = HEADER + 2 * max_chunks + 3 * max_prompts
    table = PromptTable(
        torch.zeros(size, dtype=torch.int32, device=device),
        torch.zeros(max_prompts, dtype=torch.int64, device=device),
        max_chunks,
        max_prompts,
        max_chunks,
        max_prompts,
    )
    return with_rows(table, max_rows)


def with_rows(table: PromptTable, num_rows: int) -> PromptTable:
    """Return the table for the launches of a graph of `num_rows` rows: programs for full prompts and for some tails.

    Where a step has more chunks or prompts than programs, programs take several.
    """
    prompts, whole = min(num_rows, table.max_prompts), num_rows // MAX_CHUNK
    return replace(
        table,
        chunk_programs=whole + min(prompts, MAX_CHUNK_PROGRAMS),
        prompt_programs=min(prompts, MAX_PROMPT_PROGRAMS),
    )


def fill_table(table: PromptTable, starts: np.ndarray, slots: torch.Tensor) -> None:
    """Write the prompts of the next step, none included; starts has the number of the step's real rows at its end."""
    assert len(slots) <= table.max_prompts, (len(slots), table.max_prompts)
    numbers = _numbers(starts, table.max_chunks, table.max_prompts)
    fill(table.numbers, numbers)
    table.slots[: len(slots)].copy_(slots)


def _numbers(starts: np.ndarray, max_chunks: int, max_prompts: int) -> np.ndarray:
    counts = -(-np.diff(starts) // MAX_CHUNK)
    prompt = np.repeat(np.arange(len(counts)), counts)
    first_chunk = np.cumsum(counts) - counts
    first_row = starts[prompt] + (np.arange(len(prompt)) - first_chunk[prompt]) * MAX_CHUNK
    numbers = np.zeros(HEADER + 2 * max_chunks + 3 * max_prompts, dtype=np.int32)
    numbers[:HEADER] = len(prompt), len(counts), starts[-1]
    chunks = numbers[HEADER : HEADER + 2 * max_chunks].reshape(2, max_chunks)
    prompts = numbers[HEADER + 2 * max_chunks :].reshape(3, max_prompts)
    chunks[:, : len(prompt)] = prompt, first_row
    prompts[:, : len(counts)] = starts[:-1], starts[1:], first_chunk
    return numbers
