"""The code that decides, called with plain values: for tests/unit/epoch_model.py.

Each function makes the objects of the code from plain values, runs the code, and returns what came of it.
"""

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from cluster.client.group_client import GroupClient
from cluster.client.open_request import OpenRequest
from cluster.client.router import Pick, RankLoad, Tail
from cluster.client.suspects import Suspects
from workers.engine.engine import Engine
from workers.rank.fence import Fence, StaleEpochError
from workers.step.step_sync import PlanConfig, decide
from workers.step.vote import Vote
from workers.wire.inbox import Inbox, InboxSender
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams
from workers.wire.token_stream import TokenReceiver, TokenSender

RANKS = (0, 1)
LENGTHS = {"a": 2, "b": 1}
"""Tokens of each request; request number i is sent to rank i."""
NAMES = tuple(LENGTHS)
Request = tuple[int, tuple[int, ...], bool, bool]  # attempt, emitted, finished, submitted


class Captured:
    """In place of a socket: keeps the bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, message: bytes, *frames: bytes) -> None:
        assert not frames, "the requests of the model have no images"
        self.sent.append(message)


def inbox_message(epoch: int, kind: str, *args: Any) -> bytes:
    sender = object.__new__(InboxSender)
    sender._sender, sender._epoch = Captured(), epoch
    getattr(sender, kind)(*args)
    return sender._sender.sent[0]


@cache
def wake_message(epoch: int, step: int) -> bytes:
    return inbox_message(epoch, "wake", step)


@cache
def token_message(epoch: int, rank: int, outputs: tuple[tuple[str, int, bool], ...]) -> bytes:
    """`outputs`: (wire id, token, whether it is the last)."""
    sender = object.__new__(TokenSender)
    sender._sender, sender._epoch = Captured(), epoch
    made = [
        RequestOutput(name, [token], "length" if last else None) for name, token, last in outputs
    ]
    sender.send(rank, 0, made)
    return sender._sender.sent[0]


@cache
def delivered(message: bytes, epoch: int) -> tuple[str, Any] | None:
    """What an inbox in `epoch` gives to its engine: ("submit", (wire id, emitted)), ("wake", step) or nothing."""
    found: list[tuple[str, Any]] = []

    def submit(request: EngineRequest) -> None:
        name = NAMES[request.prompt_token_ids[0]]
        emitted = request.emitted_token_ids
        assert emitted == list(range(len(emitted))), f"{request} goes on from wrong tokens"
        assert len(emitted) < LENGTHS[name], "a request is submitted that has ended"
        found.append(("submit", (request.request_id, len(emitted))))

    inbox = object.__new__(Inbox)
    inbox.num_stale, inbox._logged_epoch = 0, None
    receiver: Any = SimpleNamespace(submit=submit, wake=lambda step: found.append(("wake", step)))
    inbox._target = receiver, epoch
    inbox._deliver(message, ())
    assert len(found) + inbox.num_stale == 1
    return found[0] if found else None


def client_of(
    requests: tuple[Request | None, ...], captured: dict[int, list[bytes]], epoch: int
) -> Any:
    """A client of the group with these open requests; `captured` gets what it sends, by rank."""
    loads = [RankLoad((0, rank)) for rank in RANKS]
    client = object.__new__(GroupClient)
    client.index, client.lease_id, client.open, client._token_times = 0, "", {}, {}
    client._suspects = Suspects()
    router: Any = SimpleNamespace(
        report=lambda *_: None,
        pick=lambda prompt, *_, **__: _counted(loads[prompt[0]]),
        keep=lambda *_: None,
    )
    client._router = router

    def submit(rank: int, request: EngineRequest) -> None:
        captured.setdefault(rank, []).append(inbox_message(epoch, "submit", request))

    streams: Any = SimpleNamespace(submit=submit)
    client._streams = streams
    for number, request in enumerate(requests):
        if request is not None:
            made = open_request(number, request)
            made.load = _counted(loads[number]).load
            client.open[made.wire_id] = made
    return client


def _counted(load: RankLoad) -> Pick:
    load.outstanding += 1  # as the router counts a request of one token
    return Pick(load, 0, Tail(0, []))


def open_request(number: int, request: Request) -> OpenRequest:
    params = SamplingParams(max_tokens=LENGTHS[NAMES[number]])
    made = OpenRequest(NAMES[number], [number], params, 0, "", None, 1)
    made.attempt, made.emitted, made.finished = request[0], list(request[1]), request[2]
    return made


def requests_of(client: Any, before: tuple[Request | None, ...]) -> tuple[Request | None, ...]:
    after = list(before)
    for made in client.open.values():
        emitted = tuple(made.emitted)
        assert emitted == tuple(range(len(emitted))), f"request {made.request_id} has {emitted}"
        number = made.prompt_token_ids[0]
        assert made.finished == (len(emitted) == LENGTHS[NAMES[number]])
        after[number] = (made.attempt, emitted, made.finished, True)
    return tuple(after)


@cache
def received(
    requests: tuple[Request | None, ...], message: bytes, epoch: int
) -> tuple[Request | None, ...]:
    """The requests after the client, with streams of `epoch`, has read a message of a rank."""
    client = client_of(requests, {}, epoch)
    receiver = object.__new__(TokenReceiver)
    receiver.epoch, receiver.num_stale = epoch, 0
    errors: list[BaseException] = []

    def deliver(rank: int, load: int, outputs: list[RequestOutput]) -> None:
        try:
            client._deliver("", rank, load, outputs)
        except BaseException as error:  # the receiver only logs errors
            errors.append(error)

    receiver._listener = SimpleNamespace(deliver=deliver)
    assert receiver._take(json.loads(message)[1], message)
    assert not errors, errors
    return requests_of(client, requests)


@cache
def submitted(
    requests: tuple[Request | None, ...], numbers: tuple[int, ...], epoch: int
) -> tuple[tuple[Request | None, ...], tuple[tuple[int, bytes], ...]]:
    """The client submits these requests, new or again: (requests after it, messages to ranks)."""
    captured: dict[int, list[bytes]] = {}
    client = client_of(requests, captured, epoch)
    for number in numbers:
        made = next(r for r in client.open.values() if r.prompt_token_ids[0] == number)
        if made.finished:
            continue
        client._route_again(made)
        client.submit(made)
    messages = tuple((rank, data) for rank, sent in captured.items() for data in sent)
    return requests_of(client, requests), messages


@cache
def runs(epoch: int, step: int, tokens: tuple[int, ...]) -> bool:
    """Whether the ranks run a forward after these votes."""
    rows = [
        Vote(epoch=epoch, step=step, num_tokens=count, has_work=int(count > 0)).row()
        for count in tokens
    ]
    return decide(np.stack(rows), PlanConfig(equal_tokens=False)).run


@cache
def reasons_to_vote(step: int, awaited: int, has_inbox: bool) -> tuple[bool, bool]:
    """(whether a sleeping rank votes, whether a peer woke it)."""
    engine = object.__new__(Engine)
    engine._step, engine._awaited_step, engine._stopping = step, -1, False
    engine._failure, engine._inbox = None, [None] if has_inbox else []  # type: ignore[assignment]
    engine._awaited_step = awaited
    cache = SimpleNamespace(transfers=None)
    scheduler: Any = SimpleNamespace(settle=lambda *, idle: None, has_work=False, cache=cache)
    engine.scheduler = scheduler
    engine._outbox = SimpleNamespace(send_held=lambda: None)  # type: ignore[assignment]
    engine._arrivals = SimpleNamespace(may_accept=False)  # type: ignore[assignment]
    return engine._must_vote(), engine._woken_by_peer()


@cache
def epoch_in(message: bytes) -> int:
    return int(json.loads(message)[0])


@cache
def fenced(epoch: int, first: int, call: str, argument: int) -> tuple[int, int] | None:
    """(epoch, first epoch to join) of a fence after a call of the group or the client; None if it refuses."""
    fence = Fence(0, epoch, first)
    try:
        getattr(fence, call)(argument)
    except StaleEpochError:
        return None
    return fence.epoch, fence.first


CACHES = (
    wake_message,
    token_message,
    delivered,
    received,
    submitted,
    runs,
    reasons_to_vote,
    fenced,
)
"""To clear when the code is changed by a test."""
