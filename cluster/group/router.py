"""Which rank gets the next request. Pure policy: no Ray, no clock, no I/O.

A rank's load is the number of tokens, prompt and expected output, of the requests it has not finished. What this
ingress sent is counted here, at once and exactly, so that a burst cannot pile up on one rank while news of it is on
its way.

What other ingresses sent is told by the rank with every message of its token stream, and is late. If each of k
ingresses took all of it for true, each would fill the whole gap of a rank that was empty a moment ago, and they would
fill it k times. So each evens out its k-th: own tokens count in full, those of the others divided by k. In simulations
with news 60 requests old, the spread between ranks stayed within a quarter of that without any news, where counting the
others in full more than doubled it; with fresh news, and with ingresses of unequal traffic, it is better than without.
Equal ranks take turns from a different start in each ingress.

A rank that has computed a prefix of the prompt need not do so again, but it must not get everything because of that.
So a rank that may hold the whole prompt is allowed a lead over the others of `LEAD` requests of this size; one that
may hold half of it is allowed half of that. This bounds the imbalance however many requests share a prefix: what does
not fit under the lead goes to the least loaded rank, which holds the prefix too from then on. Counted in requests, not
in tokens saved, the rule is the same for short and long answers.
What a rank holds is guessed from what was sent there: its last prompts, as many tokens as its cache has room for.
"""

from collections import OrderedDict
from collections.abc import Sequence

CHUNK = 32
"""Tokens of a prompt that are known or unknown together."""

LEAD = 4
"""Requests by which a rank may be ahead when it holds the whole prompt.

Simulated with 20 shared prefixes over 4 ranks: 2 found 90 to 95 % of what could be found, 4 finds 91 to 97 %, and the
most loaded rank had 19 % instead of 15 % more than the mean with 24 requests under way, 2 % more in a burst of 400.
"""

MAX_CHUNKS = 32_768
"""Chunks remembered of each rank, some 100 bytes each, whatever its cache has room for."""


class Router:
    """The view of one ingress.

    num_replicas  ingresses that share the ranks
    start         the rank that begins when all are equal; a random one, so that ingresses do not move in step
    cache_tokens  room of one rank's prefix cache; 0 = it has none
    """

    def __init__(
        self, num_ranks: int, *, num_replicas: int = 1, start: int = 0, cache_tokens: int = 0
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: needs at least 1, got {num_ranks}")
        self._outstanding = [0] * num_ranks
        self._others = [0] * num_ranks
        self._num_replicas = num_replicas
        self._next = start % num_ranks
        self._max_chunks = min(cache_tokens // CHUNK, MAX_CHUNKS)
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]

    @property
    def outstanding(self) -> tuple[int, ...]:
        """This ingress's own outstanding tokens by rank."""
        return tuple(self._outstanding)

    def pick(
        self,
        prompt_token_ids: Sequence[int],
        num_output: int,
        *,
        cache_salt: str = "",
        pinned: int | None = None,
    ) -> int:
        """Choose a rank for a request, or take `pinned`, and count its tokens there until their `release`.

        num_output: the tokens that its answer is expected to have.
        """
        num_tokens = len(prompt_token_ids) + num_output
        chunks = self._chunks(prompt_token_ids, cache_salt)
        rank = pinned
        if rank is None:
            rank = self._choose(chunks, len(prompt_token_ids), num_tokens)
        self._outstanding[rank] += num_tokens
        self._remember(rank, chunks)
        return rank

    def release(self, rank: int, num_tokens: int) -> None:
        """Take back tokens of `rank`: all of a request when it ends, or some as they are done."""
        left = self._outstanding[rank] - num_tokens
        assert num_tokens >= 0 and left >= 0, (
            f"rank {rank} has {self._outstanding[rank]} outstanding tokens, release of {num_tokens}"
        )
        self._outstanding[rank] = left

    def report(self, rank: int, others: int) -> None:
        """`rank` says how many tokens of the other ingresses it has not finished."""
        self._others[rank] = others

    def _choose(self, chunks: list[int], prompt_len: int, num_tokens: int) -> int:
        both = zip(self._outstanding, self._others, strict=True)
        costs = [own + others / self._num_replicas for own, others in both]
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
        """A hash of each full chunk and all before it. A collision misleads a guess, nothing more."""
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
        for chunk in reversed(chunks):  # the last ones are forgotten first, as in the rank
            held[chunk] = None
            held.move_to_end(chunk)
        while len(held) > self._max_chunks:
            held.popitem(last=False)
