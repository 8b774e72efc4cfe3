"""Plans where experts live: a map of one layer under which all ranks have about equal loads. Pure numpy.

An expert with several copies splits its load evenly over them. A plan moves few experts: an expert that stays on a rank
keeps its slot. It depends on its arguments alone, so ranks that plan alike need not exchange the plan.
E logical experts, S slots of all ranks, R ranks. A slot holds the number of an expert; -1 = free.
"""

from collections.abc import Sequence

import numpy as np

EVEN = 0.97
"""Mean load of a rank over that of the busiest, from which a map is left as it is."""
FEW_MOVES = 0.01
"""Share of the busiest rank's load that must be gained for a map from scratch, which moves most experts."""
LESS = 1 - 1e-9  # a change that saves less than rounding errors goes on for ever


def plan_layer(
    loads_E: np.ndarray,
    starts: Sequence[int],
    present_S: np.ndarray,
    *,
    hosts: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """Return the experts of all slots, int64 [S]: at least one copy of each expert, no two copies on one rank.

    Its busiest rank has no more load than under `present_S`, if that is such a map.

    loads_E     rows of each expert, at least 0
    starts      R + 1 offsets: rank r has the slots starts[r] .. starts[r + 1] - 1, at most E
    present_S   the map that the plan replaces; free slots and surplus copies are allowed
    hosts       each has R / hosts ranks, one after another
    groups      of E / groups neighbouring experts, among which a router limits its choice; all of a group go to one
                host if the hosts divide the groups and their slots suffice
    """
    bounds = np.asarray(starts)
    sizes = np.diff(bounds)
    assert len(loads_E) <= bounds[-1] == len(present_S), "every expert needs a slot"
    assert sizes.max() <= len(loads_E), "a rank has more slots than there are experts"
    rank_S = np.repeat(np.arange(len(sizes)), sizes)
    loads_E = np.asarray(loads_E, dtype=np.float64)
    per_host = len(loads_E) // hosts
    host_sizes = sizes.reshape(hosts, -1).sum(axis=1) if len(sizes) % hosts == 0 else [0]
    in_groups = hosts > 1 and groups > 1 and groups % hosts == 0 and min(host_sizes) >= per_host
    if in_groups and sizes.max() <= per_host:
        return _by_groups(loads_E, rank_S, present_S, hosts, groups)
    return _plan(loads_E, np.arange(len(loads_E)), rank_S, np.asarray(present_S))


def rank_loads(loads_E: np.ndarray, slots_S: np.ndarray, starts: Sequence[int]) -> np.ndarray:
    """Return the load of each rank, float64 [R], under a map without free slots."""
    weight_E = np.asarray(loads_E) / np.bincount(slots_S, minlength=len(loads_E)).clip(1)
    total = np.concatenate(([0.0], np.cumsum(weight_E[slots_S])))
    return np.diff(total[np.asarray(starts)])


def is_valid(slots_S: np.ndarray, starts: Sequence[int], num_experts: int) -> bool:
    """Return whether the slots hold every expert, and no rank an expert twice."""
    if sorted(set(slots_S.tolist())) != list(range(num_experts)):
        return False
    parts = np.split(slots_S, np.asarray(starts)[1:-1])
    return all(len(set(part.tolist())) == len(part) for part in parts)


def _by_groups(
    loads_E: np.ndarray, rank_S: np.ndarray, present_S: np.ndarray, hosts: int, groups: int
) -> np.ndarray:
    """Give each host the same number of groups, then plan each host alone."""
    group_E = np.repeat(np.arange(groups), len(loads_E) // groups)
    host_S = rank_S // ((rank_S[-1] + 1) // hosts)
    load_G = np.bincount(group_E, loads_E, groups)
    held = present_S >= 0
    slots_GH = np.zeros((groups, hosts), dtype=np.int64)
    np.add.at(slots_GH, (group_E[present_S[held]], host_S[held]), 1)
    host_G = _pack_groups(load_G, slots_GH, hosts)
    planned_S = np.empty_like(present_S)
    for host in range(hosts):
        own_S, experts = host_S == host, np.flatnonzero(host_G[group_E] == host)
        ranks = rank_S[own_S] - rank_S[own_S][0]
        planned_S[own_S] = _plan(loads_E, experts, ranks, present_S[own_S])
    weight_E = loads_E / np.bincount(planned_S, minlength=len(loads_E))
    before_E = loads_E / np.bincount(present_S[held], minlength=len(loads_E)).clip(1)
    if not _complete(present_S, rank_S, len(loads_E)):
        return planned_S
    worse = np.bincount(rank_S, weight_E[planned_S]).max()
    return planned_S if worse < np.bincount(rank_S, before_E[present_S]).max() * LESS else present_S


def _pack_groups(load_G: np.ndarray, slots_GH: np.ndarray, hosts: int) -> np.ndarray:
    """Return the host of each group: heaviest first to the host with least load; equal hosts keep what they hold."""
    host_G, load_H = np.empty(len(load_G), dtype=np.int64), np.zeros(hosts)
    free_H = np.full(hosts, len(load_G) // hosts)
    for group in np.argsort(-load_G, kind="stable"):
        open_H = np.flatnonzero(free_H)
        lowest = load_H[open_H].min()
        alike = open_H[load_H[open_H] <= lowest + (1 - EVEN) * load_G.sum() / hosts]
        host = alike[np.argmax(slots_GH[group, alike])]
        host_G[group] = host
        load_H[host] += load_G[group]
        free_H[host] -= 1
    return host_G


class _Slots:
    """A map that changes. `experts` are those that it must hold; other experts have no load and no copy."""

    def __init__(
        self, loads_E: np.ndarray, experts: np.ndarray, rank_S: np.ndarray, slots_S: np.ndarray
    ):
        self.experts, self.rank_S = experts, rank_S
        self.slots_S = np.full(len(rank_S), -1)
        self.loads_E, self.copies_E = loads_E, np.zeros(len(loads_E), dtype=np.int64)
        self.held_RE = np.zeros((rank_S[-1] + 1, len(loads_E)), dtype=bool)
        wanted = set(experts.tolist())
        for slot, expert in enumerate(slots_S.tolist()):
            if expert in wanted and not self.held_RE[rank_S[slot], expert]:
                self.put(slot, expert)

    def put(self, slot: int, expert: int) -> None:
        """Put a copy of `expert`, or nothing for -1, in the place of what the slot holds."""
        before = self.slots_S[slot]
        if before >= 0:
            self.copies_E[before] -= 1
            self.held_RE[self.rank_S[slot], before] = False
        self.slots_S[slot] = expert
        if expert >= 0:
            self.copies_E[expert] += 1
            self.held_RE[self.rank_S[slot], expert] = True

    @property
    def weight_S(self) -> np.ndarray:
        """Load of each slot."""
        weight_E = self.loads_E / self.copies_E.clip(1)
        return np.where(self.slots_S >= 0, weight_E[self.slots_S], 0.0)

    @property
    def load_R(self) -> np.ndarray:
        """Load of each rank."""
        return np.bincount(self.rank_S, self.weight_S)

    @property
    def busiest(self) -> float:
        """Load of the busiest rank."""
        return float(self.load_R.max())


def _plan(
    loads_E: np.ndarray, experts: np.ndarray, rank_S: np.ndarray, present_S: np.ndarray
) -> np.ndarray:
    now = _Slots(loads_E, experts, rank_S, present_S)
    mean = loads_E[experts].sum() / (rank_S[-1] + 1)
    complete = bool((now.slots_S >= 0).all() and now.copies_E[experts].all())
    if complete and mean >= EVEN * now.busiest:
        return present_S
    moved = _Slots(loads_E, experts, rank_S, now.slots_S)
    _fill(moved)
    _exchange_copies(moved)
    _swap(moved, mean)
    scratch = _from_scratch(now)
    if scratch is not None:
        _swap(scratch, mean)
        if scratch.busiest < (1 - FEW_MOVES) * moved.busiest:
            moved = scratch
    if complete and moved.busiest >= now.busiest * LESS:
        return present_S
    return _keep_slots(moved.slots_S, now)


def _complete(slots_S: np.ndarray, rank_S: np.ndarray, num_experts: int) -> bool:
    starts = np.concatenate((np.flatnonzero(np.diff(rank_S, prepend=-1)), [len(rank_S)]))
    return is_valid(slots_S, starts.tolist(), num_experts)


def _fill(to: _Slots) -> None:
    """Put every missing expert into a slot, then copies of those with most load a copy into all free slots."""
    loads, load_R = to.loads_E, to.load_R
    missing = to.experts[to.copies_E[to.experts] == 0]
    for expert in missing[np.argsort(-loads[missing], kind="stable")].tolist():
        free = np.flatnonzero(to.slots_S < 0)
        if not len(free):  # of the copies that an expert can spare, the one with the least load
            spare = np.flatnonzero(to.copies_E[to.slots_S] > 1)
            free = spare[[np.argmin(to.weight_S[spare])]]
        slot = free[np.argmin(load_R[to.rank_S[free]])]
        to.put(slot, expert)
        load_R = to.load_R
    while len(free := np.flatnonzero(to.slots_S < 0)):
        slot = free[np.argmin(to.load_R[to.rank_S[free]])]
        candidates = to.experts[~to.held_RE[to.rank_S[slot], to.experts]]
        per_copy = loads[candidates] / to.copies_E[candidates]
        to.put(slot, int(candidates[np.argmax(per_copy)]))


def _exchange_copies(to: _Slots) -> None:
    """Replace copies that their expert can spare by copies of experts with more load a copy."""
    for _ in range(len(to.slots_S)):
        weight_S = to.weight_S
        spare = np.flatnonzero(to.copies_E[to.slots_S] > 1)
        taker = _neediest(to)
        if not len(spare) or taker is None:
            return
        spare = spare[~to.held_RE[to.rank_S[spare], taker]]
        if not len(spare):
            return
        without_S = to.loads_E[to.slots_S[spare]] / (to.copies_E[to.slots_S[spare]] - 1)
        lightest = spare[without_S <= without_S.min()]
        if without_S.min() >= EVEN * to.loads_E[taker] / to.copies_E[taker]:
            return
        others_R = np.bincount(to.rank_S, weight_S)[to.rank_S[lightest]] - weight_S[lightest]
        to.put(int(lightest[np.argmin(others_R)]), taker)


def _neediest(to: _Slots) -> int | None:
    """Return the expert with most load a copy that a rank lacks."""
    open_E = to.experts[to.copies_E[to.experts] < len(to.held_RE)]
    if not len(open_E):
        return None
    return int(open_E[np.argmax(to.loads_E[open_E] / to.copies_E[open_E])])


def _swap(to: _Slots, mean: float) -> None:
    """Swap experts of the busiest rank with lighter ones of other ranks, while that helps and it is not even."""
    for _ in range(4 * len(to.slots_S)):
        weight_S, load_R = to.weight_S, to.load_R
        busiest = int(load_R.argmax())
        if mean >= EVEN * load_R[busiest]:
            return
        own = np.flatnonzero(to.rank_S == busiest)
        others = np.flatnonzero(to.rank_S != busiest)
        if not len(others):
            return
        saved_so = weight_S[own][:, None] - weight_S[others]
        peer_o = load_R[to.rank_S[others]]
        after_so = np.maximum(load_R[busiest] - saved_so, peer_o + saved_so)
        allowed_so = ~to.held_RE[to.rank_S[others][None, :], to.slots_S[own][:, None]]
        allowed_so &= ~to.held_RE[busiest, to.slots_S[others]]
        after_so[~allowed_so] = np.inf
        at, other = np.unravel_index(int(after_so.argmin()), after_so.shape)
        if after_so[at, other] >= load_R[busiest] * LESS:
            return
        mine, theirs = int(own[at]), int(others[other])
        of_mine, of_theirs = int(to.slots_S[mine]), int(to.slots_S[theirs])
        to.put(mine, -1)
        to.put(theirs, of_mine)
        to.put(mine, of_theirs)


def _from_scratch(now: _Slots) -> _Slots | None:
    """Return a map by load alone, heaviest copies first to the least loaded rank; ranks keep what they can.

    None if copies of one expert are left for ranks that hold it.
    """
    experts, rank_S = now.experts, now.rank_S
    copies = np.ones(len(experts), dtype=np.int64)
    for _ in range(len(rank_S) - len(experts)):
        per_copy = np.where(copies < len(now.held_RE), now.loads_E[experts] / copies, -1.0)
        copies[per_copy.argmax()] += 1
    items = np.repeat(np.arange(len(experts)), copies)
    weights = (now.loads_E[experts] / copies)[items]
    sizes = np.bincount(rank_S)
    held: list[list[int]] = [[] for _ in sizes]
    load_R = np.zeros(len(sizes))
    for item in np.argsort(-weights, kind="stable"):
        expert = int(experts[items[item]])
        ranks = [r for r, own in enumerate(held) if len(own) < sizes[r] and expert not in own]
        if not ranks:
            return None
        rank = ranks[int(load_R[ranks].argmin())]
        held[rank].append(expert)
        load_R[rank] += weights[item]
    return _Slots(now.loads_E, experts, rank_S, _seat(held, now))


def _seat(held: list[list[int]], now: _Slots) -> np.ndarray:
    """Return the map of these sets of experts: each goes to the rank that holds most of it now."""
    slots_S, free = np.full(len(now.slots_S), -1), set(range(len(held)))
    for experts in held:
        overlap = {rank: int(now.held_RE[rank, experts].sum()) for rank in free}
        sizes = {rank: int((now.rank_S == rank).sum()) for rank in free}
        fitting = [rank for rank in sorted(free) if sizes[rank] == len(experts)]
        rank = max(fitting, key=lambda rank: (overlap[rank], -rank))
        free.discard(rank)
        slots_S[now.rank_S == rank] = experts
    return slots_S


def _keep_slots(planned_S: np.ndarray, now: _Slots) -> np.ndarray:
    """Return the planned map with experts that stay on their rank in the slots that they have now."""
    kept_S = np.full(len(planned_S), -1)
    for rank in range(len(now.held_RE)):
        own = np.flatnonzero(now.rank_S == rank)
        wanted = planned_S[own].tolist()
        stay = own[np.isin(now.slots_S[own], wanted)]
        kept_S[stay] = now.slots_S[stay]
        held = set(kept_S[stay].tolist())
        kept_S[own[kept_S[own] < 0]] = [expert for expert in wanted if expert not in held]
    return kept_S
