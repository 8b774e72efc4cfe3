"""Chooses the rank of each request. Pure policy: no Ray, no clock, no I/O.

The ranks of all groups are numbered one after another. A rank's load is the number of tokens, prompt and expected
output, of its unfinished requests. The load that this ingress sent is counted here, at once and exactly, so that a
burst cannot pile up on one rank while reports of it are on their way.

A prompt without a first token counts `PREFILL_WEIGHT` times more, without the part that its rank may hold: the next
prompt of the rank waits for it, and in lockstep the rank with the most prompts delays the tokens of all. Prompts of
other ingresses do not count so, because their reports would come too late.

Each rank reports the load of the other ingresses with every message of its token stream. The report is late. If each
of k ingresses took the report for exact, each would fill the whole gap of a rank that was empty a moment ago, and the
k ingresses together would fill the gap k times. So an ingress fills a k-th part of the gap: its own tokens count in
full, tokens of other ingresses count divided by k. In simulations with reports 60 requests old, the spread between
ranks stayed within a quarter of the spread without reports; counting the load of other ingresses in full more than
doubled the spread. With fresh reports, and with ingresses of unequal traffic, the spread is smaller than without
reports. Equal ranks take turns from a different start in each ingress.

A rank that holds a prefix of the prompt in its cache need not compute it again, but must not get every such request.
So a rank that may hold the whole prompt is allowed a lead over the other ranks of `LEAD` requests of this size; a rank
that may hold half of it is allowed half of that. This bounds the imbalance however many requests share a prefix: a
request that does not fit under the lead goes to the least loaded rank, which holds the prefix too from then on. The
lead is counted in requests, not in tokens saved, so that the rule is the same for short and long answers.
What a rank holds is estimated from its last prompts, up to the number of tokens that its cache has room for.
"""

from collections import OrderedDict
from collections.abc import Sequence

CHUNK = 32
"""Tokens of a prompt that are cached or not cached together."""

LEAD = 4
"""Requests by which a rank may be ahead when it holds the whole prompt.

Simulated with 20 shared prefixes over 4 ranks: a lead of 2 found 90 to 95 % of the prefixes, 4 finds 91 to 97 %. The
most loaded rank had 19 % instead of 15 % more than the mean with 24 requests in flight, 2 % more in a burst of 400.
"""

PREFILL_WEIGHT = 2
"""Outstanding tokens that a prompt token without a first token counts for, beside itself.

Simulated with log-normal prompts behind 8 shared prefixes over 4 ranks in lockstep at 40 and 80 requests/s: p99 of the
time to the first token is 3 to 4 % shorter with 2 than without, and no other figure is worse; 1, 4 and prompts first of
all are within 1 % of it.
"""

MAX_CHUNKS = 32_768
"""Most chunks that are remembered of a rank, about 100 bytes each."""


class Router:
    """The view of one ingress.

    group_sizes   ranks of each group
    num_replicas  ingresses that share the ranks
    start         first rank when all are equal; a random one, so that ingresses do not move in step
    cache_tokens  room of one rank's prefix cache; 0 without a cache
    """

    def __init__(
        self,
        group_sizes: Sequence[int],
        *,
        num_replicas: int = 1,
        start: int = 0,
        cache_tokens: int = 0,
    ) -> None:
        if not group_sizes or min(group_sizes) < 1:
            raise ValueError(f"every group needs at least 1 rank, got {list(group_sizes)}")
        self._places = [(group, r) for group, size in enumerate(group_sizes) for r in range(size)]
        self._numbers = {place: number for number, place in enumerate(self._places)}
        num_ranks = len(self._places)
        self._outstanding = [0] * num_ranks
        self._prefill = [0] * num_ranks
        self.picked_prefill = 0
        """Prompt tokens of the last picked request without those that its rank may hold."""
        self._others = [0] * num_ranks
        self._num_replicas = num_replicas
        self._next = start % num_ranks
        self._max_chunks = min(cache_tokens // CHUNK, MAX_CHUNKS)
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]

    @property
    def outstanding(self) -> tuple[int, ...]:
        """The outstanding tokens of this ingress by rank."""
        return tuple(self._outstanding)

    @property
    def outstanding_prefill(self) -> tuple[int, ...]:
        """The prompt tokens of this ingress's requests without a first token, by rank."""
        return tuple(self._prefill)

    def place(self, number: int) -> tuple[int, int]:
        """(group, rank in the group) of a rank."""
        return self._places[number]

    def number(self, group: int, rank: int) -> int:
        """The number over all groups of a rank of a group."""
        return self._numbers[group, rank]

    def pick(
        self,
        prompt_token_ids: Sequence[int],
        num_output: int,
        *,
        cache_salt: str = "",
        pinned: int | None = None,
    ) -> int:
        """Choose a rank for a request, or take `pinned`, and count the request's tokens there until their `release`.

        num_output: expected tokens of the answer.
        """
        num_tokens = len(prompt_token_ids) + num_output
        chunks = self._chunks(prompt_token_ids, cache_salt)
        rank = pinned
        if rank is None:
            rank = self._choose(chunks, len(prompt_token_ids), num_tokens)
        self._outstanding[rank] += num_tokens
        self.picked_prefill = len(prompt_token_ids) - CHUNK * self._num_held(rank, chunks)
        self._remember(rank, chunks)
        return rank

    def begin_prefill(self, rank: int, num_tokens: int) -> None:
        """Count a prompt that the rank has to compute, until `end_prefill`: the next prompt would wait for it."""
        self._prefill[rank] += num_tokens

    def end_prefill(self, rank: int, num_tokens: int) -> None:
        """Note that the rank has computed a prompt, or that its request has ended."""
        left = self._prefill[rank] - num_tokens
        assert left >= 0, f"rank {rank} has {self._prefill[rank]} prompt tokens, not {num_tokens}"
        self._prefill[rank] = left

    def release(self, rank: int, num_tokens: int) -> None:
        """Subtract the tokens of a request that has ended."""
        left = self._outstanding[rank] - num_tokens
        assert num_tokens >= 0 and left >= 0, (
            f"rank {rank} has {self._outstanding[rank]} outstanding tokens, release of {num_tokens}"
        )
        self._outstanding[rank] = left

    def report(self, rank: int, load_of_others: int) -> None:
        """Note the unfinished tokens that `rank` has of other ingresses."""
        self._others[rank] = load_of_others

    def _choose(self, chunks: list[int], prompt_len: int, num_tokens: int) -> int:
        both = zip(self._outstanding, self._others, strict=True)
        costs = [own + others / self._num_replicas for own, others in both]
        costs = [
            cost + PREFILL_WEIGHT * tokens
            for cost, tokens in zip(costs, self._prefill, strict=True)
        ]
        num_ranks = len(costs)
        if chunks:
            lead = LEAD * num_tokens * CHUNK / prompt_len  # of a chunk
            for rank in range(num_ranks):
                costs[rank] -= lead * self._num_held(rank, chunks)
        order = ((self._next + offset) % num_ranks for offset in range(num_ranks))
        rank = min(order, key=costs.__getitem__)  # the first of equals
        self._next = (rank + 1) % num_ranks
        return rank

    def _chunks(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """A hash of each full chunk and its prefix. A collision misleads an estimate, nothing else."""
        if not self._max_chunks:
            return []
        chunks, parent = [], hash(salt)
        for end in range(CHUNK, len(token_ids) + 1, CHUNK):
            parent = hash((parent, *token_ids[end - CHUNK : end]))
            chunks.append(parent)
        return chunks

    def _num_held(self, rank: int, chunks: list[int]) -> int:
        held = self._held[rank]
        for count, chunk in enumerate(chunks):
            if chunk not in held:
                return count
        return len(chunks)

    def _remember(self, rank: int, chunks: list[int]) -> None:
        held = self._held[rank]
        for chunk in reversed(chunks):  # a prompt's last chunks are evicted first, as in the rank
            held[chunk] = None
            held.move_to_end(chunk)
        while len(held) > self._max_chunks:
            held.popitem(last=False)
