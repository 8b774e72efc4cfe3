"""One request on a rank, and the arrays of all running sequences, one row each. Knows no scheduling and no model."""

import sys
from dataclasses import dataclass, field

import numpy as np

from workers.step.grammar import Grammar
from workers.wire.request import EngineRequest, FinishReason


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and its progress.

    The K and V of tokens `[0, num_computed_tokens)` are in the cache, or will be when the launched steps are done.
    Later launches find them there.

    row                row in the InputBatch while it runs, -1 while it waits
    order              (priority, arrival); smaller comes first
    max_num_tokens     prompt and output tokens at which the sequence ends
    window_ids         blocks of layers with a window, without those that the window has left behind
    window_first       the first of them has the tokens of block_ids[window_first]
    block_keys         keys of the first full blocks, as far as they were needed
    next_full          number of computed tokens at which another block is full and gets its key
    num_cached_tokens  tokens found in the prefix cache when the sequence first ran
    grammar            grammar of the output and its state; None = any output
    num_pending        tokens that launched steps draw and that the host does not have yet
    needs_last_token   its logits processors or its grammar read the last token on the host
    finished           the request has ended; outputs of launched steps are dropped
    """

    request: EngineRequest
    token_ids: list[int]
    num_computed_tokens: int = 0
    row: int = -1
    block_ids: list[int] = field(default_factory=list)
    window_ids: list[int] = field(default_factory=list)
    window_first: int = 0
    num_preemptions: int = 0
    order: tuple[int, int] = (0, 0)
    max_num_tokens: int = sys.maxsize
    block_keys: list[bytes] = field(default_factory=list)
    next_full: int = sys.maxsize
    num_cached_tokens: int = 0
    grammar: Grammar | None = None
    num_pending: int = 0
    needs_last_token: bool = False
    finished: bool = False

    @classmethod
    def from_request(cls, request: EngineRequest, max_model_len: int = sys.maxsize) -> "Sequence":
        """Return a sequence without computed tokens: prompt and emitted tokens are known."""
        longest = len(request.prompt_token_ids) + request.params.max_tokens
        known = request.prompt_token_ids + request.emitted_token_ids
        return cls(request, known, max_num_tokens=min(longest, max_model_len))

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output that the host has."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens without K and V in the cache, pending tokens included."""
        return len(self.token_ids) + self.num_pending - self.num_computed_tokens

    @property
    def ends_with_pending(self) -> bool:
        """Whether the pending token is the last token, whichever it is."""
        return (
            self.num_pending > 0 and len(self.token_ids) + self.num_pending >= self.max_num_tokens
        )

    def finish_reason(self) -> FinishReason | None:
        """Return the reason why the token just appended is the last token, or None."""
        if self.token_ids[-1] in self.request.params.stop_token_ids:
            return "stop"
        if self.grammar is not None and self.grammar.complete:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_num_tokens else None


class InputBatch:
    """Tokens and blocks of the running sequences, one row each, so that a batch is gathered without Python loops.

    token_ids int32 [rows, max_model_len]; block_table int64 [rows, max_blocks]; num_computed_tokens int64 [rows].
    window_table, of the shape of block_table, has the blocks of layers with a window, with anything in place of blocks
    that the window has left behind; None: no layer has a window.
    states: layers have a state a sequence; row r has slot r + 1 of their pools, because slot 0 is that of padding.

    In place of a pending token, token_ids holds -1 - row: a forward finds the token on the device by that number.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        *,
        windows: bool = False,
        states: bool = False,
    ):
        self.block_size = block_size
        self.states = states
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self.window_table = np.zeros_like(self.block_table) if windows else None
        self.num_computed_tokens = np.zeros(num_rows, dtype=np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Assign a row to `seq` and copy its tokens and blocks there."""
        seq.row = self._free_rows.pop()
        self.token_ids[seq.row, : seq.num_tokens] = seq.token_ids
        self.block_table[seq.row, : len(seq.block_ids)] = seq.block_ids
        if self.window_table is not None:
            first, end = seq.window_first, seq.window_first + len(seq.window_ids)
            self.window_table[seq.row, first:end] = seq.window_ids
        self.num_computed_tokens[seq.row] = seq.num_computed_tokens

    def remove(self, seq: Sequence) -> None:
        """Free the row of `seq`."""
        self._free_rows.append(seq.row)
        seq.row = -1

    def rows_of(self, seqs: list[Sequence]) -> np.ndarray:
        """Return the rows of `seqs`, int64 [B]."""
        return np.fromiter((seq.row for seq in seqs), dtype=np.int64, count=len(seqs))

    def append_block(self, seq: Sequence, block: int) -> None:
        """Append a block to `seq`."""
        self.block_table[seq.row, len(seq.block_ids)] = block
        seq.block_ids.append(block)

    def append_window_block(self, seq: Sequence, block: int) -> None:
        """Append a block for layers with a window to `seq`."""
        assert self.window_table is not None
        self.window_table[seq.row, seq.window_first + len(seq.window_ids)] = block
        seq.window_ids.append(block)

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Append a token to `seq`, which may have lost its row."""
        if seq.row >= 0:
            self.token_ids[seq.row, seq.num_tokens] = token_id
        seq.token_ids.append(token_id)

    def launched(
        self, seqs: list[Sequence], num_new_tokens: np.ndarray, samples: np.ndarray
    ) -> None:
        """Enter a launch: each of `seqs` computes `num_new_tokens` tokens; those with `samples` get a pending token."""
        rows = self.rows_of(seqs)
        ends = self.num_computed_tokens[rows] + num_new_tokens
        self.num_computed_tokens[rows] = ends
        for seq, end, drawn in zip(seqs, ends.tolist(), samples.tolist(), strict=True):
            seq.num_computed_tokens = end
            seq.num_pending += drawn
        drawing = rows[samples]
        self.token_ids[drawing, ends[samples]] = -1 - drawing
