"""Chooses the group and the rank of each request. Pure policy: no Ray, no clock, no I/O.

A rank's load is the number of tokens, prompt and expected output, of its unfinished requests. The load that this
ingress sent is counted here, at once and exactly, so that a burst cannot pile up on one rank while reports of it are
on their way.

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
So a rank that may hold the whole prompt is allowed a lead over the other ranks of `lead` requests of this size; a rank
that may hold half of it is allowed half of that. This bounds the imbalance however many requests share a prefix: a
request that does not fit under the lead goes to the least loaded rank, which holds the prefix too from then on. The
lead is counted in requests, not in tokens saved, so that the rule is the same for short and long answers. Ranks that
hold equally much share one lead: one more copy of a prefix that many requests have pays, one more copy of the prefix of
a session does not, because the session uses one copy at a time.
What a rank holds is estimated from its last prompts and answers, up to the number of tokens that its cache has room
for. So the turns of a session stay with their rank, because each prompt repeats prompt and answer of the turn before.

An ingress has a record only of the prefixes that it has sent. Where several ingresses take the turns of one session,
the name of the session stands in for the prefix: if all ranks hold equally much of a prompt by the record of this
ingress, the home of the session counts as a rank that holds the whole prompt. The home is found by rendezvous hashing,
so all ingresses find the same rank without a message, and ranks that come or go move few sessions.
"""

import hashlib
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cluster.config.serve_section import PREFIX_LEAD

CHUNK = 32
"""Tokens of a prompt that are cached or not cached together."""

PREFILL_WEIGHT = 2
"""Outstanding tokens that a prompt token without a first token counts for, beside itself.

Simulated with log-normal prompts behind 8 shared prefixes over 4 ranks in lockstep at 40 and 80 requests/s: p99 of the
time to the first token is 3 to 4 % shorter with 2 than without, and no other figure is worse; 1, 4 and prompts first of
all are within 1 % of it.
"""

MAX_CHUNKS = 32_768
"""Most chunks that are remembered of a rank, about 100 bytes each."""


Place = tuple[int, int]
"""Group, and rank in the group."""


@dataclass(eq=False, slots=True)
class RankLoad:
    """What one ingress has counted of one rank.

    outstanding  tokens of the unfinished requests of this ingress
    prefill      prompt tokens of its requests without a first token
    reachable    whether the ingress can reach the rank now
    others       unfinished tokens of other ingresses, as the rank last reported
    held         hashes of the chunks that the rank may have in its cache, longest unused first
    """

    place: Place
    outstanding: int = 0
    prefill: int = 0
    others: int = 0
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    reachable: bool = True

    def begin_prefill(self, num_tokens: int) -> None:
        """Count a prompt that the rank has to compute, until `end_prefill`: the next prompt would wait for it."""
        self.prefill += num_tokens

    def end_prefill(self, num_tokens: int) -> None:
        """Note that the rank has computed a prompt, or that its request has ended."""
        assert self.prefill >= num_tokens, (
            f"rank {self.place} has {self.prefill} prompt tokens, not {num_tokens}"
        )
        self.prefill -= num_tokens

    def release(self, num_tokens: int) -> None:
        """Subtract the tokens of a request that has ended."""
        assert 0 <= num_tokens <= self.outstanding, (
            f"rank {self.place} has {self.outstanding} outstanding tokens, release of {num_tokens}"
        )
        self.outstanding -= num_tokens

    def num_held(self, chunks: list[int]) -> int:
        """The number of first chunks of a prompt that the rank may hold."""
        for count, chunk in enumerate(chunks):
            if chunk not in self.held:
                return count
        return len(chunks)

    def remember(self, chunks: list[int], max_chunks: int) -> None:
        """Note that the rank will hold these chunks of a prompt."""
        for chunk in reversed(chunks):  # a prompt's last chunks are evicted first, as in the rank
            self.held[chunk] = None
            self.held.move_to_end(chunk)
        while len(self.held) > max_chunks:
            self.held.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Pick:
    """The choice for one request; `load` counts its tokens until their `release`.

    prefill  prompt tokens without those that the rank may hold
    tail     for `Router.keep`
    """

    load: RankLoad
    prefill: int
    tail: "Tail"


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a prompt, from which `Router.keep` continues: the hash of its full chunks, and the tokens behind."""

    parent: int
    token_ids: list[int]


class Router:
    """The view of one ingress. The ranks of all groups are numbered one after another.

    group_sizes   ranks of each group
    num_replicas  ingresses that share the ranks
    start         first rank when all are equal; a random one, so that ingresses do not move in step
    cache_tokens  room of one rank's prefix cache; 0 without a cache
    lead          requests by which a rank that holds the whole prompt may be ahead; 0: load alone decides
    """

    def __init__(
        self,
        group_sizes: Sequence[int],
        *,
        num_replicas: int = 1,
        start: int = 0,
        cache_tokens: int = 0,
        lead: float = PREFIX_LEAD,
    ) -> None:
        self._groups: list[list[RankLoad]] = [[] for _ in group_sizes]
        self._max_chunks = [0] * len(group_sizes)
        self._num_replicas = num_replicas
        self._lead = lead
        self._next = defaultdict[frozenset[int], int](
            lambda: start
        )  # rank, by the groups to choose from
        for group, size in enumerate(group_sizes):
            self.resize(group, size, cache_tokens)

    def resize(self, group: int, num_ranks: int, cache_tokens: int) -> None:
        """Begin anew with the ranks of one group. A request that has a rank of before releases its own RankLoad."""
        if num_ranks < 1:
            raise ValueError(f"group {group} needs at least 1 rank, got {num_ranks}")
        self._groups[group] = [RankLoad((group, rank)) for rank in range(num_ranks)]
        self._max_chunks[group] = min(cache_tokens // CHUNK, MAX_CHUNKS)

    @property
    def loads(self) -> list[RankLoad]:
        """The ranks of all groups by number."""
        return [load for group in self._groups for load in group]

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups."""
        return sum(map(len, self._groups))

    def load_of(self, place: Place) -> RankLoad:
        """The rank at a place."""
        return self._groups[place[0]][place[1]]

    def reachable(self, group: int) -> list[RankLoad]:
        """The ranks of a group that can be reached; all of them if none can."""
        found = [load for load in self._groups[group] if load.reachable]
        return found or self._groups[group]

    def reach_all(self, group: int) -> None:
        """Take all ranks of a group for ranks that can be reached."""
        for load in self._groups[group]:
            load.reachable = True

    def place(self, number: int) -> Place | None:
        """The place of a rank; None if there are fewer ranks."""
        loads = self.loads
        return loads[number].place if number < len(loads) else None

    def number(self, place: Place) -> int:
        """The number of a rank over all groups."""
        group, rank = place
        return sum(map(len, self._groups[:group])) + rank

    def pick(
        self,
        prompt_token_ids: Sequence[int],
        num_output: int,
        *,
        cache_salt: str = "",
        pinned: Place | None = None,
        groups: Collection[int] | None = None,
        session: str = "",
    ) -> Pick:
        """Choose a reachable rank of `groups` (None: of all) for a request, and count the request's tokens there.

        num_output: expected tokens of the answer.
        pinned: the rank to take, if its group still has it
        session: name that the requests of one session share; "" without one
        """
        num_tokens = len(prompt_token_ids) + num_output
        chunks = _chunks(prompt_token_ids, hash(cache_salt)) if any(self._max_chunks) else []
        if pinned is not None and pinned[1] < len(self._groups[pinned[0]]):
            load = self.load_of(pinned)
        else:
            load = self._choose(chunks, len(prompt_token_ids), num_tokens, groups, session)
        load.outstanding += num_tokens
        prefill = len(prompt_token_ids) - CHUNK * load.num_held(chunks)
        load.remember(chunks, self._max_chunks[load.place[0]])
        tail = Tail(
            chunks[-1] if chunks else hash(cache_salt),
            list(prompt_token_ids[CHUNK * len(chunks) :]),
        )
        return Pick(load, prefill, tail)

    def missing(
        self, prompt_token_ids: Sequence[int], *, cache_salt: str = "", groups: Collection[int]
    ) -> int:
        """The prompt tokens that no rank of `groups` holds; those of one rank are counted."""
        chunks = _chunks(prompt_token_ids, hash(cache_salt))
        held = max(load.num_held(chunks) for load in self._candidates(frozenset(groups)))
        return len(prompt_token_ids) - CHUNK * held

    def keep(self, load: RankLoad, tail: Tail, answer: Sequence[int]) -> None:
        """Note that a rank holds an answer behind its prompt: the next turn of the session repeats both."""
        if max_chunks := self._max_chunks[load.place[0]]:
            load.remember(_chunks([*tail.token_ids, *answer], tail.parent), max_chunks)

    def report(self, place: Place, load_of_others: int) -> None:
        """Note the unfinished tokens that a rank has of other ingresses."""
        self.load_of(place).others = load_of_others

    def _choose(
        self,
        chunks: list[int],
        prompt_len: int,
        num_tokens: int,
        groups: Collection[int] | None,
        session: str,
    ) -> RankLoad:
        lead = self._lead * num_tokens * CHUNK / prompt_len if chunks else 0.0  # of a chunk
        among = frozenset(range(len(self._groups)) if groups is None else groups)
        loads = self._candidates(among)
        held = [load.num_held(chunks) for load in loads]
        if session and chunks and self._num_replicas > 1 and min(held) == max(held):
            held[_home(session, [load.place for load in loads])] = len(chunks)
        ordered = sorted(held)
        costs = [
            load.outstanding
            + load.others / self._num_replicas
            + PREFILL_WEIGHT * load.prefill
            - lead * count / (len(held) - bisect_left(ordered, count))
            for load, count in zip(loads, held, strict=True)
        ]
        best = loads[costs.index(min(costs))]  # the first of equals
        self._next[among] = self.number(best.place) + 1
        return best

    def _candidates(self, groups: frozenset[int]) -> list[RankLoad]:
        """The ranks of `groups` that can be reached, or all of them if none can, from the next in turn."""
        loads = self.loads
        start = self._next[groups] % len(loads)
        found = [load for load in (*loads[start:], *loads[:start]) if load.place[0] in groups]
        assert found, f"no rank in groups {set(groups)}"
        return [load for load in found if load.reachable] or found


def _chunks(token_ids: Sequence[int], parent: int) -> list[int]:
    """A hash of each full chunk and its prefix. A collision misleads an estimate, nothing else."""
    chunks = []
    for end in range(CHUNK, len(token_ids) + 1, CHUNK):
        parent = hash((parent, *token_ids[end - CHUNK : end]))
        chunks.append(parent)
    return chunks


def _home(session: str, places: Sequence[Place]) -> int:
    """The index of the place with the highest hash of session and place, which is the same in every process."""

    def weight(index: int) -> bytes:
        return hashlib.blake2b(f"{places[index]}:{session}".encode(), digest_size=8).digest()

    return max(range(len(places)), key=weight)
