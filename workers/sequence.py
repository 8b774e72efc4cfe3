"""One request on a rank, and the arrays that hold all running ones row by row. No scheduling, no model."""

import sys
from dataclasses import dataclass, field

import numpy as np

from workers.grammar import Grammar
from workers.request import EngineRequest, FinishReason


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and how far it is. Tokens `[0, num_computed)` have their K and V in the cache.

    row is its place in the SequenceTable while it runs, -1 while it waits. order says who comes first: smaller
    (priority, arrival).

    block_keys         of the first full blocks, as many as were needed so far
    next_full          when so many tokens are computed, another block is full and gets its key
    num_cached_tokens  tokens found in the prefix cache when it first ran
    grammar            what its output must match, and how far it is; None = anything
    """

    request: EngineRequest
    token_ids: list[int]
    num_computed: int = 0
    row: int = -1
    block_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    order: tuple[int, int] = (0, 0)
    block_keys: list[bytes] = field(default_factory=list)
    next_full: int = sys.maxsize
    num_cached_tokens: int = 0
    grammar: Grammar | None = None

    @classmethod
    def from_request(cls, request: EngineRequest) -> "Sequence":
        """A sequence that has computed nothing yet."""
        return cls(request, list(request.prompt_token_ids))

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Known tokens whose K and V are not in the cache."""
        return len(self.token_ids) - self.num_computed

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why the token just appended is the last one, or None."""
        params = self.request.params
        if self.token_ids[-1] in params.stop_token_ids:
            return "stop"
        if self.grammar is not None and self.grammar.complete:
            return "stop"
        if self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
            return "length"
        return None


class SequenceTable:
    """Tokens and blocks of the running sequences, a row each, so that a batch is gathered without Python loops.

    token_ids int32 [rows, max_model_len]; block_table int64 [rows, max_blocks]; num_computed int64 [rows].
    """

    def __init__(self, num_rows: int, max_model_len: int, block_size: int):
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.block_table = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self.num_computed = np.zeros(num_rows, dtype=np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Give `seq` a row and copy its tokens and blocks there."""
        seq.row = self._free_rows.pop()
        self.token_ids[seq.row, : seq.num_tokens] = seq.token_ids
        self.block_table[seq.row, : len(seq.block_ids)] = seq.block_ids
        self.num_computed[seq.row] = seq.num_computed

    def remove(self, seq: Sequence) -> None:
        """Take `seq`'s row back."""
        self._free_rows.append(seq.row)
        seq.row = -1

    def append_block(self, seq: Sequence, block: int) -> None:
        """`seq` holds one more block."""
        self.block_table[seq.row, len(seq.block_ids)] = block
        seq.block_ids.append(block)

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """`seq` has one more token."""
        self.token_ids[seq.row, seq.num_tokens] = token_id
        seq.token_ids.append(token_id)

    def advance(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens` more of `seq` are in the cache."""
        seq.num_computed += num_tokens
        self.num_computed[seq.row] = seq.num_computed
