"""The sizes of a rank's CUDA graphs, and the rank's vote by them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.backends.select import Selection
from workers.config import SchedulerConfig
from workers.section import Auto
from workers.speculation.step_times import StepSeconds
from workers.step.draft_budget import DraftBudget
from workers.step.step_sync import GRAPH_ROWS, ForwardMode, GraphMode

# Rows up to which a step with prompts is bound by reading weights, so that one size an octave is enough.
FINE_MIXED_ROWS = 512
SMALLEST_MIXED_ROWS = 16


NO_PROMPTS = "the attention captures no prompts, and the model has no decodes"


class GraphsUnavailableError(ValueError):
    """scheduler.cuda_graphs is true, but a chosen backend has no CUDA graphs."""


class GraphKey(NamedTuple):
    """A captured forward: the steps it serves, its rows, and whether it runs in ubatches.

    drafts   0: the forward of the model; 1: the first pass of a draft model behind it. Of mode DRAFT: tokens that the
             draft model's passes draft of each row
    adapters  it adds the products of adapters
    """

    mode: GraphMode
    rows: int
    ubatch: bool = False
    drafts: int = 0
    adapters: bool = False


@dataclass(frozen=True)
class GraphSizes:
    """Rows of the graphs that every rank has, ascending, of DECODE, MIXED and VERIFY steps.

    draft         sequences in the graphs of a draft model's further passes, behind its first pass over all rows
    draft_tokens  most tokens that these graphs draft of each sequence
    adapters      each graph of a forward exists without and with the products of adapters
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    verify: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    draft_tokens: int = 0
    adapters: bool = False

    def __bool__(self) -> bool:
        return bool(self.decode or self.mixed)

    def __str__(self) -> str:
        parts = []
        if self.decode:
            parts.append(f"up to {self.decode[-1]} decodes ({_count(self.decode)})")
        if self.verify:
            parts.append(f"{self.verify[-1]} rows of decodes with drafts ({_count(self.verify)})")
        if self.mixed:
            parts.append(f"steps of up to {self.mixed[-1]} tokens ({_count(self.mixed)})")
        text = " and ".join(parts)
        return f"{text}, without and with adapters" if self.adapters else text

    @property
    def largest(self) -> int:
        """Rows of the largest graph."""
        return max((*self.decode, *self.mixed, *self.verify))

    @property
    def most_logits(self) -> int:
        """Rows of the largest graph with logits; 0 without any."""
        return max((*self.decode, *self.verify), default=0)

    def whole_steps(self) -> list[GraphKey]:
        """Return the keys of all graphs of whole steps."""
        decodes = [GraphKey(GraphMode.DECODE, rows) for rows in self.decode]
        verify = [GraphKey(GraphMode.VERIFY, rows) for rows in self.verify]
        found = [*decodes, *verify, *(GraphKey(GraphMode.MIXED, rows) for rows in self.mixed)]
        return found + [key._replace(adapters=True) for key in found if self.adapters]

    def further_passes(self) -> list[GraphKey]:
        """Return the keys of the graphs of a draft model's further passes, for each number of drafts up to four."""
        return [
            GraphKey(GraphMode.DRAFT, rows, drafts=count)
            for count in self._draft_counts
            for rows in self.draft
        ]

    @property
    def _draft_counts(self) -> list[int]:
        """Numbers of drafts with graphs, ascending: each one up to four, then powers of two and the most."""
        most = self.draft_tokens
        return [it for it in range(1, most + 1) if it <= 4 or it == most or it & (it - 1) == 0]

    def further_key(self, num_rows: int, num_drafts: int) -> GraphKey | None:
        """Return the graph that drafts so many tokens, or a few more, of the sequences of a rank; None: no graph."""
        rows = _smallest(self.draft, num_rows) if num_rows else 0
        count = _smallest(self._draft_counts, num_drafts) if num_drafts else 0
        return GraphKey(GraphMode.DRAFT, rows, drafts=count) if rows and count else None

    def key(
        self, forward_mode: ForwardMode, num_tokens: int, ubatch: bool = False
    ) -> GraphKey | None:
        """Return the graph of a step without drafts in which all ranks have `num_tokens` tokens; None: no graph."""
        vote = self.vote(forward_mode, num_tokens)
        for mode, name in GRAPH_ROWS.items():
            if vote[name]:
                return GraphKey(mode, vote[name], ubatch)
        return None

    def vote(
        self, forward_mode: ForwardMode, num_tokens: int, *, prompts: bool = True
    ) -> dict[str, int]:
        """Return the rows of graphs of a rank's Vote. prompts: sequences with several rows may be prompts."""
        single_rows = forward_mode.is_decode_or_idle()
        verifies = single_rows or not prompts
        return {
            "decode_rows": _smallest(self.decode, num_tokens) if single_rows else 0,
            "verify_rows": _smallest(self.verify, num_tokens) if verifies else 0,
            "mixed_rows": _smallest(self.mixed, num_tokens),
        }

    def draft_budget(self, measured: StepSeconds | None) -> DraftBudget:
        """Return the budget of drafts of a group with these graphs and the times that all its ranks agree on."""
        known = measured is not None and bool(measured.decode)
        return DraftBudget(self.verify, self.decode, measured if known else None)


def _count(sizes: Sequence[int]) -> str:
    return f"{len(sizes)} size{'s' * (len(sizes) != 1)}"


def _smallest(sizes: Sequence[int], num_tokens: int) -> int:
    return next((size for size in sizes if num_tokens <= size), 0)


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Return rows of graphs for 1 to `max_rows` decodes, ascending: every number up to 8, then four an octave.

    Padding to the next size wastes less than 9 % on average, whatever the maximum.
    """
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        size += 1 << max(0, size.bit_length() - 3)
    return (*sizes, max_rows)


def mixed_sizes(max_rows: int) -> tuple[int, ...]:
    """Return rows of graphs for steps with prompts, ascending: powers of two, then four an octave."""
    sizes, size = [], SMALLEST_MIXED_ROWS
    while size < max_rows:
        sizes.append(size)
        size += size if size < FINE_MIXED_ROWS else 1 << (size.bit_length() - 3)
    return (*sizes, max_rows)


def graphs_to_capture(
    scheduler: SchedulerConfig,
    selection: Selection,
    device: torch.device,
    *,
    mixed: bool,
    rows_per_seq: int = 1,
    decodes: bool = True,
    drafts: bool = False,
    adapters: bool = False,
    max_rows: int | None = None,
) -> GraphSizes:
    """Return the sizes of a rank's graphs; none where graphs are off or unavailable.

    mixed          whether the attention can be captured with prompts
    rows_per_seq   most rows of a sequence that decodes, its drafts included; from 2 on there are VERIFY graphs
    decodes        whether the model decodes
    drafts         whether all passes of a draft model can be captured
    adapters       whether sequences may have adapters
    max_rows       most rows of a step that the all-to-all can be captured with; None: of any step

    Raises GraphsUnavailableError if the configuration demands graphs that are unavailable.
    """
    if graphs_off(scheduler.cuda_graphs, selection, device.type) is not None:
        return GraphSizes()
    sizes, max_tokens = scheduler.cuda_graph_sizes, scheduler.max_num_batched_tokens
    if max_rows is not None:
        max_tokens = min(max_tokens, max_rows)
    max_decodes = min(scheduler.max_num_seqs, max_tokens)
    max_verify = min(max_decodes * rows_per_seq, max_tokens) if mixed and rows_per_seq > 1 else 0
    if sizes == "auto":
        decode, all_steps = decode_sizes(max_decodes), mixed_sizes(max_tokens)
        verify = decode_sizes(max_verify) if max_verify else ()
    else:
        decode, all_steps = _cut(sizes, max_decodes), _cut(sizes, max_tokens)
        verify = _cut(sizes, max_verify) if max_verify else ()
    if not decodes:
        decode = verify = ()
    draft, draft_tokens = (decode, rows_per_seq - 1) if drafts and decode else ((), 0)
    steps = all_steps if mixed else ()
    return GraphSizes(decode, steps, verify, draft, draft_tokens, adapters)


def _cut(sizes: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """Return `sizes` ascending, with `max_rows` in place of larger ones."""
    return tuple(sorted({min(size, max_rows) for size in sizes}))


def graphs_off(wanted: Auto | bool, selection: Selection, device: str) -> str | None:
    """Return why no steps become CUDA graphs, or None if steps do.

    wanted   scheduler.cuda_graphs
    device   device type
    Raises GraphsUnavailableError, with the reason, if `wanted` is true and there can be none.
    """
    unsupported_reason = selection.graph_unsupported_reason
    if device != "cuda":
        unsupported_reason = f"cluster.device is {device}"
    if unsupported_reason is None:
        return "scheduler.cuda_graphs is false" if wanted is False else None
    if wanted is True:
        raise GraphsUnavailableError(
            f"scheduler.cuda_graphs is true, but {unsupported_reason}; expected auto or false"
        )
    return unsupported_reason
