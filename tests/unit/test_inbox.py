"""A rank's inbox: what senders say arrives whole and in their order, from nobody else, until it is closed."""

import threading

import pytest
import zmq

from workers.wire.inbox import Inbox, InboxSender
from workers.wire.request import EngineRequest, SamplingParams
from workers.wire.secure_socket import StreamAddress


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.changed = threading.Condition()

    def submit(self, request: EngineRequest) -> None:
        self.note(request)

    def abort(self, request_id: str) -> None:
        self.note(("abort", request_id))

    def wake(self, step: int) -> None:
        self.note(("wake", step))

    def note(self, what: object) -> None:
        with self.changed:
            self.told.append(what)
            self.changed.notify()

    def wait_for(self, number: int, timeout_s: float = 10) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.told) >= number, timeout_s)


@pytest.fixture
def inbox():
    made = Inbox("127.0.0.1")
    yield made
    made.close()


def request(name: str, **params) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        ingress_id="ingress",
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=5, **params),
        priority=-2,
        cache_salt="half a character: \ud800",
    )


def test_every_field_survives(inbox):
    sent = [
        request("plain"),
        request(
            "all",
            min_tokens=1,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            seed=2**63 - 1,
            stop_token_ids=frozenset({4, 5}),
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.3,
            logit_bias=((1, -100.0), (2, 0.5)),
            allowed_token_ids=(3, 4),
            bad_words_ids=((1,), (2, 3)),
            logprobs=0,
            prompt_logprobs=2,
            grammar='{"grammars": []}',
        ),
    ]
    engine, sender = Engine(), InboxSender(inbox.address)
    for each in sent:
        sender.submit(each)
    inbox.deliver_to(engine)  # what came before is not lost
    assert engine.wait_for(2) and engine.told == sent
    assert {hash(each) for each in engine.told[1].params.logit_bias}, "as it was: hashable"
    sender.close()
    sender.submit(sent[0])  # dropped without an error


def test_each_sender_is_heard_in_its_order(inbox):
    engine = Engine()
    inbox.deliver_to(engine)
    senders = [InboxSender(inbox.address) for _ in range(3)]
    for step in range(40):
        for number, sender in enumerate(senders):
            sender.wake(step)
            sender.abort(f"{number} {step}")
    assert engine.wait_for(240)
    for number in range(3):
        mine = [x[1] for x in engine.told if x[0] == "abort" and x[1].startswith(f"{number} ")]
        assert mine == [f"{number} {step}" for step in range(40)]
    assert sorted(x[1] for x in engine.told if x[0] == "wake") == sorted([*range(40)] * 3)
    for sender in senders:
        sender.close()


def test_who_was_not_given_the_key_is_not_heard(inbox):
    engine = Engine()
    inbox.deliver_to(engine)
    stranger = InboxSender(StreamAddress(inbox.address.endpoint, zmq.curve_keypair()[0]))
    stranger.abort("x")
    assert not engine.wait_for(1, timeout_s=0.5)
    stranger.close()


def test_an_inbox_that_nobody_reads_can_be_closed():
    Inbox("127.0.0.1").close()
