"""All interleavings of two ranks, an ingress and a supervisor, with failures, over the code that decides.

Sockets, threads and processes are modelled. Each decision is that of the code itself: the fence of a rank, the epoch
filters of inbox and token stream, votes and `decide`, the reasons of a sleeping rank, open requests and their
submission by the engine client. A state is a tuple; the code runs on objects made of it, once for each input.

A message between living processes arrives in order. A wake may be lost, a process may die or stop at any moment, and a
stopped process that was replaced may wake up later and go on in its old epoch.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.unit.epoch_model_code import (
    LENGTHS,
    RANKS,
    Request,
    delivered,
    epoch_in,
    fenced,
    reasons_to_vote,
    received,
    runs,
    submitted,
    token_message,
    wake_message,
)

UP, STOPPED, DEAD = "up", "stopped", "dead"
Wake = tuple[int, int]  # epoch, step


class Rank(NamedTuple):
    """One process.

    loop     none, voting, forward, commit (has a token to publish), asleep, ended
    inbox    (wire id, tokens emitted before) that the loop has not taken
    work     (wire id, tokens that it has now) of each request that runs
    voted    votes of the last two steps, by step
    entered  steps of which it has begun the exchange
    """

    life: str = UP
    epoch: int = -1
    first: int = 0
    loop: str = "none"
    step: int = 0
    awaited: int = -1
    inbox: tuple[tuple[str, int], ...] = ()
    work: tuple[tuple[str, int], ...] = ()
    voted: tuple[tuple[int, int], ...] = ()
    entered: int = -1
    stream: bool = False


class State(NamedTuple):
    """The whole.

    ranks      the processes of the present actors
    ghosts     stopped processes that were replaced, with their rank
    group      (state, epoch, ranks that have done this part)
    client     (epoch of its streams, whether it takes requests, epoch of the streams that it opens, their ranks)
    requests   by number; None = not asked yet
    to_ranks   requests on the way to each rank's process
    wakes      the last wake on the way to each rank's process; it may be lost, or overtaken by the next one
    to_client  messages on the way from each rank
    failures   that may still happen
    """

    ranks: tuple[Rank, ...]
    ghosts: tuple[tuple[int, Rank], ...]
    group: tuple[str, int, frozenset[int]]
    client: tuple[int, bool, int, frozenset[int]]
    requests: tuple[Request | None, ...]
    to_ranks: tuple[tuple[bytes, ...], ...]
    wakes: tuple[Wake | None, ...]
    to_client: tuple[tuple[bytes, ...], ...]
    failures: int


def first_state(failures: int, num_requests: int) -> State:
    ranks = tuple(voting(Rank(epoch=0, stream=True)) for _ in RANKS)
    ended = [(0, tuple(range(length)), True, True) for length in LENGTHS.values()]
    requests = (*[None] * num_requests, *ended[num_requests:])
    nothing: tuple[tuple[bytes, ...], ...] = ((), ())
    serving = ("serving", 0, frozenset[int]())
    client = (0, True, 0, frozenset[int]())
    return State(ranks, (), serving, client, requests, nothing, (None, None), nothing, failures)


def without_stale(state: State) -> State:
    """Deliver messages of epochs that are over, at once: they change nothing whenever they arrive."""
    for number in RANKS:
        rank = state.ranks[number]
        queue = state.to_ranks[number]
        while queue and (rank.life == DEAD or epoch_in(queue[0]) < max(rank.epoch, rank.first)):
            assert rank.life == DEAD or delivered(queue[0], max(rank.epoch, rank.first)) is None
            queue = queue[1:]
        to_client = state.to_client[number]
        while to_client and epoch_in(to_client[0]) < state.client[0]:
            assert received(state.requests, to_client[0], state.client[0]) == state.requests
            to_client = to_client[1:]
        state = state._replace(
            to_ranks=put(state.to_ranks, number, queue),
            to_client=put(state.to_client, number, to_client),
        )
    # The rest of a ghost's messages would be stale.
    over = min(state.client[0], *(max(rank.epoch, rank.first) for rank in state.ranks))
    kept = []
    for number, ghost in state.ghosts:
        if ghost.epoch >= over:
            kept.append((number, ghost))
            continue
        message = publish(state._replace(to_client=((), ())), number, ghost)[0].to_client[number]
        assert not message or received(state.requests, message[0], over) == state.requests
        assert delivered(wake_message(ghost.epoch, ghost.step), over) is None
    return state._replace(ghosts=tuple(kept))


def normal(state: State) -> State:
    """Return the state without what can have no effect any more, and with steps that count from the present one."""
    state = without_stale(state)
    first, second = state.ranks
    together = first.epoch == second.epoch
    base = min(first.step, second.step) if together else 0
    ranks, wakes = [], list(state.wakes)
    for number, (rank, peer) in enumerate(((first, second), (second, first))):
        shift = base if together else rank.step
        needed = min(rank.step, peer.step) if together else rank.step
        wake = wakes[number]
        if wake is not None and wake[0] == rank.epoch:
            wakes[number] = (wake[0], wake[1] - shift) if wake[1] >= rank.step else None
        ranks.append(
            rank._replace(
                step=rank.step - shift,
                awaited=rank.awaited - shift if rank.awaited >= rank.step else -9,
                voted=tuple((step - shift, count) for step, count in rank.voted if step >= needed),
                entered=max(-9, rank.entered - shift),
                first=max(rank.first, rank.epoch),  # it joins no earlier epoch in either way
            )
        )
        if rank.life == DEAD or rank.loop == "ended":
            ranks[-1] = ranks[-1]._replace(inbox=(), work=(), awaited=-9, stream=False)
        if rank.life == DEAD:
            ranks[-1] = ranks[-1]._replace(loop="ended", step=0, first=0)
            wakes[number] = None
    return state._replace(ranks=tuple(ranks), wakes=tuple(wakes))


def after_call(rank: Rank, call: str, epoch: int) -> Rank | None:
    """The rank after a call that its fence allows; None if the rank refuses."""
    found = fenced(rank.epoch, rank.first, call, epoch)
    return None if found is None else rank._replace(epoch=found[0], first=found[1])


def put(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


def send(queues: tuple[tuple[bytes, ...], ...], index: int, data: bytes) -> tuple[Any, ...]:
    return put(queues, index, (*queues[index], data))


def moves(state: State) -> Iterator[tuple[str, State]]:
    """Every move that one component can make, and the state after it."""
    for number in RANKS:
        rank = state.ranks[number]
        if rank.life == UP:
            for name, after in loop_moves(state, number, rank):
                yield f"rank {number} {name}", normal(after)
        yield from message_moves(state, number)
    for found in (ghost_moves, client_moves, group_moves, failure_moves):
        for name, after in found(state):
            yield name, normal(after)


def message_moves(state: State, number: int) -> Iterator[tuple[str, State]]:
    """A process receives the first message on its way, or a wake is lost."""
    rank = state.ranks[number]
    if state.to_ranks[number]:
        first, *rest = state.to_ranks[number]
        left = state._replace(to_ranks=put(state.to_ranks, number, tuple(rest)))
        if rank.life == UP and rank.loop != "none":
            yield (
                f"rank {number} receives",
                left._replace(ranks=put(state.ranks, number, with_message(rank, first))),
            )
    wake = state.wakes[number]
    if wake is not None:
        left = state._replace(wakes=put(state.wakes, number, None))
        yield f"a wake of rank {number} is lost", left
        if rank.life == UP and rank.loop != "none":
            woken = with_message(rank, wake_message(*wake))
            yield f"rank {number} gets a wake", left._replace(ranks=put(state.ranks, number, woken))
    if state.to_client[number]:
        first, *rest = state.to_client[number]
        requests = received(state.requests, first, state.client[0])
        to_client = put(state.to_client, number, tuple(rest))
        yield (
            f"client receives from {number}",
            state._replace(requests=requests, to_client=to_client),
        )


def with_message(rank: Rank, message: bytes) -> Rank:
    found = delivered(message, rank.epoch)
    if found is None or rank.loop == "ended":
        return rank
    kind, value = found
    if kind == "wake":
        return rank._replace(awaited=max(rank.awaited, value))
    return rank._replace(inbox=(*rank.inbox, value))


def loop_moves(state: State, number: int, rank: Rank) -> Iterator[tuple[str, State]]:
    """The step loop: vote, read the votes, exchange, publish, sleep; or the discovery that the peer is gone."""
    peer = state.ranks[1 - number]
    together = peer.epoch == rank.epoch

    def become(after: Rank) -> State:
        return state._replace(ranks=put(state.ranks, number, after))

    if rank.loop == "voting":
        votes = dict(peer.voted) if together else {}
        if rank.step in votes:
            own = dict(rank.voted)[rank.step]
            tokens = (own, votes[rank.step]) if number == 0 else (votes[rank.step], own)
            loop = "forward" if runs(rank.epoch, rank.step, tokens) else "asleep"
            entered = rank.step if loop == "forward" else rank.entered
            yield (
                "reads the votes",
                become(rank._replace(loop=loop, step=rank.step + 1, entered=entered)),
            )
        elif is_gone(peer, together):
            yield "lost its peer", become(rank._replace(loop="ended"))
        elif (rank.epoch, rank.step) != state.wakes[1 - number]:
            yield "wakes again", with_wake(state, number, rank)
    elif rank.loop == "forward":
        if together and peer.entered >= rank.entered:
            yield "has exchanged", become(rank._replace(loop="commit"))
        elif is_gone(peer, together):
            yield "lost its peer in the exchange", become(rank._replace(loop="ended"))
    elif rank.loop == "commit":
        after, work = publish(state, number, rank)
        ranks = put(after.ranks, number, voting(rank._replace(work=work)))
        yield "publishes", after._replace(ranks=ranks)
    elif rank.loop == "asleep":
        votes_now, by_peer = reasons_to_vote(rank.step, rank.awaited, bool(rank.inbox))
        if votes_now:
            after = become(voting(rank))
            yield "wakes up", after if by_peer else with_wake(after, number, rank)


def is_gone(peer: Rank, together: bool) -> bool:
    """Whether a wait for the peer ends: it died or left, or it has stopped and the time is over."""
    return not together or peer.life in (DEAD, STOPPED) or peer.loop == "ended"


def with_wake(state: State, number: int, rank: Rank) -> State:
    return state._replace(wakes=put(state.wakes, 1 - number, (rank.epoch, rank.step)))


def voting(rank: Rank) -> Rank:
    """The rank takes its inbox and votes."""
    names = {name for name, _ in rank.work}
    assert not names & {name for name, _ in rank.inbox}, "a rank got one request id twice"
    work = (*rank.work, *rank.inbox)
    voted = (*rank.voted, (rank.step, len(work)))[-2:]
    return rank._replace(loop="voting", inbox=(), work=work, voted=voted)


def publish(state: State, number: int, rank: Rank) -> tuple[State, tuple[tuple[str, int], ...]]:
    """Publish a token of each request; return the state, and the requests that go on."""
    outputs, work = [], []
    for name, have in rank.work:
        last = have + 1 == LENGTHS[name.split("~")[0]]
        outputs.append((name, have, last))
        if not last:
            work.append((name, have + 1))
    if outputs and rank.stream:
        message = token_message(rank.epoch, number, tuple(outputs))
        state = state._replace(to_client=send(state.to_client, number, message))
    return state, tuple(work)


def ghost_of(number: int, rank: Rank) -> tuple[tuple[int, Rank], ...]:
    """The old process of a replaced rank, by what it may still send; () if its loop has ended."""
    if rank.life == DEAD or rank.loop in ("none", "ended"):
        return ()
    loop = "asleep" if rank.loop == "asleep" else "commit"
    kept = Rank(STOPPED, rank.epoch, loop=loop, work=rank.work, stream=rank.stream)
    return ((number, kept),)


def ghost_moves(state: State) -> Iterator[tuple[str, State]]:
    """A stopped process that was replaced wakes up in its old epoch, does what it was about to do, and ends."""
    for index, (number, rank) in enumerate(state.ghosts):
        after = state._replace(ghosts=(*state.ghosts[:index], *state.ghosts[index + 1 :]))
        yield f"ghost of {number} wakes its peer", with_wake(after, number, rank)
        if rank.loop == "commit":
            yield f"ghost of {number} publishes", publish(after, number, rank)[0]


def client_moves(state: State) -> Iterator[tuple[str, State]]:
    epoch, takes, opening, streams = state.client
    group, group_epoch, _ = state.group
    for number in RANKS:
        if state.requests[number] is None and takes:
            fresh = put(state.requests, number, (0, (), False, False))
            requests, messages = submitted(fresh, (number,), epoch)
            yield (
                f"client asks {number}",
                with_messages(state._replace(requests=requests), messages),
            )
    if takes and epoch != group_epoch:
        yield "client pauses", state._replace(client=(epoch, False, group_epoch, frozenset()))
    if takes:
        return
    if group == "serving" and opening != group_epoch:
        opening, streams = group_epoch, frozenset()
    for number in RANKS:
        rank = state.ranks[number]
        if number not in streams and rank.life == UP and after_call(rank, "check", opening):
            ranks = put(state.ranks, number, rank._replace(stream=True))
            client = (epoch, False, opening, streams | {number})
            yield f"client opens a stream of {number}", state._replace(ranks=ranks, client=client)
    if len(streams) == len(RANKS):
        numbers = tuple(n for n in RANKS if state.requests[n] is not None)
        requests, messages = submitted(state.requests, numbers, opening)
        client = (opening, True, opening, frozenset[int]())
        after = state._replace(requests=requests, client=client)
        yield "client goes on", with_messages(after, messages)


def with_messages(state: State, messages: tuple[tuple[int, bytes], ...]) -> State:
    for rank, data in messages:
        state = state._replace(to_ranks=send(state.to_ranks, rank, data))
    return state


def group_moves(state: State) -> Iterator[tuple[str, State]]:
    """The supervisor: watches, lets ranks leave or replaces them, joins and starts them."""
    name, epoch, done = state.group
    broken = any(rank.life != UP or rank.loop == "ended" for rank in state.ranks)
    if name == "serving":
        if broken:
            yield "group rebuilds", state._replace(group=("leaving", epoch + 1, frozenset()))
        return
    if name != "leaving" and broken:
        yield "group tries again", state._replace(group=("leaving", epoch + 1, frozenset()))
    if name == "joining" and not broken:
        joined = tuple(after_call(rank, "join", epoch) for rank in state.ranks)
        assert None not in joined, "a rank of the present group is fenced"
        yield "ranks join", state._replace(ranks=joined, group=("starting", epoch, frozenset()))
    for number in RANKS:
        rank = state.ranks[number]
        if number in done:
            continue
        if name == "leaving":
            yield from leave_moves(state, number, rank)
        elif name == "starting" and rank.life == UP:
            yield f"rank {number} starts", group_done(state, number, voting(rank), "serving")


def leave_moves(state: State, number: int, rank: Rank) -> Iterator[tuple[str, State]]:
    epoch = state.group[1]
    if rank.life == UP:
        left = after_call(rank, "leave", epoch)
        assert left is not None, "a rank of the present group cannot leave"
        fresh = Rank(epoch=left.epoch, first=left.first)
        yield f"rank {number} leaves", group_done(state, number, fresh, "joining")
        return
    ghosts = (*state.ghosts, *ghost_of(number, rank))
    # Messages to the old process are lost; its address is not used again.
    to_ranks = put(state.to_ranks, number, ())
    wakes = put(state.wakes, number, None)
    after = state._replace(ghosts=ghosts, to_ranks=to_ranks, wakes=wakes)
    yield f"rank {number} is replaced", group_done(after, number, Rank(), "joining")


def group_done(state: State, number: int, rank: Rank, following: str) -> State:
    name, epoch, done = state.group
    done |= {number}
    group = (following, epoch, frozenset[int]()) if len(done) == len(RANKS) else (name, epoch, done)
    return state._replace(ranks=put(state.ranks, number, rank), group=group)


def failure_moves(state: State) -> Iterator[tuple[str, State]]:
    for number in RANKS:
        rank = state.ranks[number]
        if rank.life == STOPPED:
            awake = rank._replace(life=UP)
            yield f"rank {number} goes on", state._replace(ranks=put(state.ranks, number, awake))
        if rank.life == UP and state.failures:
            after = state._replace(failures=state.failures - 1)
            for life in (DEAD, STOPPED):
                ranks = put(state.ranks, number, rank._replace(life=life))
                yield f"rank {number} is {life}", after._replace(ranks=ranks)
