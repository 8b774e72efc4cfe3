"""A rank's inbox: messages of its epoch arrive whole and in each sender's order, and no message ends its thread."""

import errno
import json
import logging
import threading
import weakref
from dataclasses import replace

import pytest
import zmq

from workers.rank.token_streams import TokenStreams
from workers.wire import secure_socket
from workers.wire.inbox import Inbox, InboxSender
from workers.wire.request import EngineRequest, ImageInput, SamplingParams
from workers.wire.secure_socket import StreamAddress


class Engine:
    """Keeps what is delivered."""

    def __init__(self) -> None:
        self.delivered: list[object] = []
        self.changed = threading.Condition()

    def submit(self, request: EngineRequest) -> None:
        self.note(request)

    def abort(self, request_id: str) -> None:
        self.note(("abort", request_id))

    def wake(self, step: int) -> None:
        self.note(("wake", step))

    def refuse(self, request_id: str, ingress_id: str, error: str) -> None:
        self.note(("refuse", request_id, ingress_id, error))

    def fail(self, error: BaseException) -> None:
        self.note(error)

    def note(self, what: object) -> None:
        with self.changed:
            self.delivered.append(what)
            self.changed.notify()

    def wait_for(self, number: int, timeout_s: float = 10) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.delivered) >= number, timeout_s)


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
        kv_source="tcp://10.0.0.1:77 key",
    )


# More bytes than ZeroMQ copies, and a few.
IMAGES = tuple(
    ImageInput(offset=place, num_tokens=1, grid_thw=(1, 2, 2), digest=b"\0\xff", pixels=pixels)
    for place, pixels in enumerate((bytes(range(256)) * 4096, b"\n"))
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
        replace(request("images"), images=IMAGES),
    ]
    engine, sender = Engine(), InboxSender(inbox.address, 3)
    for each in sent:
        sender.submit(each)
    inbox.deliver_to(engine, 3)  # what came before is not lost
    assert engine.wait_for(3) and engine.delivered == sent
    assert {hash(each) for each in engine.delivered[1].params.logit_bias}, "as it was: hashable"
    sender.close()
    sender.submit(sent[0])  # dropped without an error


def test_each_sender_is_heard_in_its_order(inbox):
    engine = Engine()
    inbox.deliver_to(engine, 3)
    senders = [InboxSender(inbox.address, 3) for _ in range(3)]
    for step in range(40):
        for number, sender in enumerate(senders):
            sender.wake(step)
            sender.abort(f"{number} {step}")
    assert engine.wait_for(240)
    for number in range(3):
        mine = [x[1] for x in engine.delivered if x[0] == "abort" and x[1].startswith(f"{number} ")]
        assert mine == [f"{number} {step}" for step in range(40)]
    assert sorted(x[1] for x in engine.delivered if x[0] == "wake") == sorted([*range(40)] * 3)
    for sender in senders:
        sender.close()


def test_who_was_not_given_the_key_is_not_heard(inbox):
    engine = Engine()
    inbox.deliver_to(engine, 3)
    stranger = InboxSender(StreamAddress(inbox.address.endpoint, zmq.curve_keypair()[0]), 3)
    stranger.abort("x")
    assert not engine.wait_for(1, timeout_s=0.5)
    stranger.close()


def test_an_inbox_that_nobody_reads_can_be_closed():
    Inbox("127.0.0.1").close()


def test_a_released_engine_is_freed_before_the_next_one_is_made(inbox):
    """It holds the KV cache, for whose successor a GPU may have no room beside it."""
    engine, sender = Engine(), InboxSender(inbox.address, 1)
    inbox.deliver_to(engine, 1)
    sender.wake(5)
    assert engine.wait_for(1)
    freed = weakref.ref(engine)
    inbox.release()
    sender.wake(6)
    for _ in range(1000):
        if inbox.num_stale:
            break
        threading.Event().wait(0.01)
    del engine
    assert freed() is None and inbox.num_stale == 1
    later = Engine()
    inbox.deliver_to(later, 1)
    sender.wake(7)
    assert later.wait_for(1) and later.delivered == [("wake", 7)]


def test_messages_of_another_epoch_are_dropped_and_counted(inbox, caplog):
    """Also a wake, whose number would make a rank of a new epoch wait alone in its vote."""
    first, second = Engine(), Engine()
    old, new = InboxSender(inbox.address, 1), InboxSender(inbox.address, 2)
    inbox.deliver_to(first, 1)
    old.wake(5)
    assert first.wait_for(1)
    inbox.deliver_to(second, 2)
    with caplog.at_level(logging.INFO, "workers.wire.inbox"):
        old.wake(1000)
        old.submit(request("late"))
        old.abort("late")
        new.submit(request("now"))
        new.wake(0)
        assert second.wait_for(2)
        for _ in range(1000):
            if inbox.num_stale == 3:
                break
            threading.Event().wait(0.01)
    assert inbox.num_stale == 3
    assert second.delivered == [request("now"), ("wake", 0)]
    assert first.delivered == [("wake", 5)]
    assert [record.message for record in caplog.records] == [
        "dropping messages of epoch 1; this is epoch 2"
    ]
    old.close(), new.close()


def submission(**changes) -> list:
    fields = {**vars(request("a")), "params": vars(request("a").params)}
    return [3, "submit", fields | changes]


@pytest.mark.parametrize(
    ("data", "names_its_request"),
    [
        (b"\xff", False),
        (b"[", False),
        (b"7", False),
        (b"[3]", False),
        (b'[3, "close", null]', False),
        (b'[3, "wake", "soon"]', False),
        (b'[3, "abort", 7]', False),
        (b'[3, "submit", null]', False),
        (submission(params=vars(request("a").params) | {"heat": 1}), True),
        (submission(params=None), True),
        (submission(prompt_token_ids=["one"]), True),
        (submission(prompt_token_ids=7), True),
        (submission(emitted_token_ids=[2**40]), True),
        (submission(priority="high"), True),
        (submission(params=vars(request("a").params) | {"bad_words_ids": [["a"]]}), True),
        (submission(request_id=7), False),
        (submission(color="red"), True),
        (submission(images=[{"offset": 0}]), True),  # without pixels
        (submission(images=7), True),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_read_is_refused_and_logged(
    inbox, caplog, data, names_its_request
):
    engine, sender = Engine(), InboxSender(inbox.address, 3)
    inbox.deliver_to(engine, 3)
    sender._sender.send(
        data if isinstance(data, bytes) else json.dumps(data, default=list).encode()
    )
    sender.submit(request("next"))
    assert engine.wait_for(1 + names_its_request)
    *refused, submitted = engine.delivered
    assert submitted == request("next")
    assert [entry[:3] for entry in refused] == [("refuse", "a", "ingress")] * names_its_request
    assert "dropped a message that cannot be read" in caplog.text
    sender.close()


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        (b"[3, \xff", True),
        (b'[3, "abort", 7]', True),
        (json.dumps(submission(request_id=7), default=list).encode(), True),
        (json.dumps(submission(priority="high"), default=list).encode(), False),
    ],
    ids=["bytes", "abort", "nameless submit", "refused submit"],
)
def test_a_stream_ends_with_a_message_that_cannot_be_read_unless_it_is_refused(inbox, data, ends):
    """Its request would wait for ever, or run on without a client: the ingress submits its requests again."""
    engine, stream = Engine(), bytes(15) + b"s"
    inbox.deliver_to(engine, 3)
    inbox.open_stream(stream)
    sender = InboxSender(inbox.address, 3, stream)
    sender._sender.send(data)
    sender.abort("later")
    for _ in range(1000):
        if (taken := inbox.num_taken(stream)) != 0 and taken != 1:
            break
        threading.Event().wait(0.01)
    assert taken == (None if ends else 2)
    assert ends or engine.wait_for(2), "a message counts before it is delivered"
    assert [entry[0] for entry in engine.delivered] == ([] if ends else ["refuse", "abort"])
    sender.close()


def test_a_message_without_a_whole_header_is_dropped_and_counted(inbox):
    """It ended the thread of the inbox, and the rank with it."""
    engine, stream = Engine(), bytes(15) + b"s"
    inbox.deliver_to(engine, 3)
    inbox.open_stream(stream)
    sender = InboxSender(inbox.address, 3, stream)
    for cut in (b"", stream + b"1234567"):
        sender._sender._socket.send(cut)
    sender.abort("next")
    assert engine.wait_for(1) and engine.delivered == [("abort", "next")]
    assert inbox.num_stale == 2 and inbox.num_taken(stream) == 1
    sender.close()


def test_a_stream_ends_with_a_missing_message_or_when_it_is_closed(inbox, caplog):
    """A request that comes later could otherwise run beside its second attempt."""
    engine, broken, whole = Engine(), bytes(15) + b"b", bytes(15) + b"w"
    inbox.deliver_to(engine, 3)
    inbox.open_stream(broken), inbox.open_stream(whole)
    senders = [InboxSender(inbox.address, 3, stream) for stream in (broken, whole)]
    for sender in senders:
        sender.abort("first")
    assert engine.wait_for(2)
    senders[0]._sender.num_sent += 1
    for sender in senders:
        sender.abort("second")
        sender.abort("third")
    assert engine.wait_for(4)
    for _ in range(1000):
        if "is missing" in caplog.text:
            break
        threading.Event().wait(0.01)
    assert (inbox.num_taken(broken), inbox.num_taken(whole)) == (None, 3)
    assert sorted(x[1] for x in engine.delivered) == ["first", "first", "second", "third"]
    assert caplog.text.count("is missing: number 2 came after 1") == 1
    inbox.close_stream(whole)
    senders[1].abort("late")
    senders[0].wake(1)
    other = InboxSender(inbox.address, 3)
    other.wake(7)  # checks no numbers
    assert engine.wait_for(5) and engine.delivered[-1] == ("wake", 7)
    for sender in (*senders, other):
        sender.close()


def test_messages_come_again_once_there_are_descriptors(inbox, monkeypatch, caplog):
    """A rank that is never woken for a vote lets its whole group wait."""

    class GivenUp:
        """A socket after an answer that ZeroMQ has refused."""

        closed = False

        def send_multipart(self, *_, **__) -> None:
            raise zmq.Again

        def close(self) -> None:
            self.closed = True

    def full(*_) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    engine = Engine()
    inbox.deliver_to(engine, 3)
    sender = InboxSender(inbox.address, 3)
    sender._sender._socket.close()
    sender._sender._socket = GivenUp()
    with monkeypatch.context() as patch:
        patch.setattr(secure_socket, "connect", full)
        sender.wake(1)
        sender.wake(2)
    assert caplog.text.count("are lost: [Errno 24] Too many open files") == 1
    sender.wake(3)
    assert engine.wait_for(1, 60) and engine.delivered == [("wake", 3)]
    assert sender.num_sent == 3
    sender.close()
    sender.wake(4)
    assert sender.num_sent == 3 and sender._sender._socket.closed


def test_a_stream_without_a_sender_is_not_taken(inbox, monkeypatch):
    """An ingress tries again every 0.5 s, with another stream each time."""

    def full(*_) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(secure_socket, "connect", full)
    streams = TokenStreams(inbox)
    with pytest.raises(OSError, match="Too many open files"):
        streams.open("lease", inbox.address, 3, bytes(15) + b"x")
    assert inbox._streams == {} and streams.leases == ()


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_may_be_released_while_its_message_arrives(fails):
    """The thread of the inbox lives as long as the process: its end would fail all later epochs too."""

    class Released(Inbox):
        """Released by another thread as soon as this one has looked."""

        looks = 0

        @property
        def _target(self) -> object:
            self.looks += 1
            return (engine, 3) if self.looks == 1 else None

        @_target.setter
        def _target(self, target: object) -> None: ...

    engine, released = Engine(), Released("127.0.0.1")
    try:
        if fails:
            released._fail(ValueError("broken"))
            assert str(engine.delivered) == "[ValueError('broken')]"
        else:
            released._receive(bytes(24) + b'[3, "wake", 7]')
            assert engine.delivered == [("wake", 7)]
    finally:
        released.close()


def test_a_failed_inbox_fails_its_rank(inbox):
    """Otherwise the rank would vote healthy, and its requests would wait for ever."""
    engine, later = Engine(), Engine()
    engine.wake = lambda step: 1 / 0
    inbox.deliver_to(engine, 3)
    sender = InboxSender(inbox.address, 3)
    sender.wake(1)
    assert engine.wait_for(1)
    assert isinstance(engine.delivered[0], ZeroDivisionError)
    inbox.deliver_to(later, 4)  # no new epoch mends it
    assert isinstance(later.delivered[0], ZeroDivisionError)
    sender.close()
