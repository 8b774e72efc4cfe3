"""The token stream: order, several ranks, a closed end, and strangers that are not let in."""

import asyncio
import logging
import time

import pytest
import zmq

from tests.unit.ray_fakes import until
from workers.wire.request import RequestOutput, RequestTimes, TokenLogprobs, merge
from workers.wire.secure_socket import StreamAddress
from workers.wire.token_stream import MAX_MESSAGES_AT_ONCE, TokenReceiver, TokenSender


class Inbox:
    """A receiver's messages, one at a time."""

    def __init__(self, receiver: TokenReceiver):
        self._queue: asyncio.Queue[list[RequestOutput]] = asyncio.Queue()
        self.loads: dict[int, list[int]] = {}
        self.beats: list[tuple[int, int | None]] = []
        self.broken: list[int] = []
        receiver.listen(self)

    async def receive(self, timeout_s: float = 10) -> list[RequestOutput]:
        return await asyncio.wait_for(self._queue.get(), timeout_s)

    def deliver(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        self.loads.setdefault(rank, []).append(load_of_others)
        self._queue.put_nowait(outputs)

    def beat(self, rank: int, num_taken: int | None) -> None:
        self.beats.append((rank, num_taken))

    def lost(self, rank: int) -> None:
        self.broken.append(rank)


def sender_to(receiver: TokenReceiver, epoch: int = 0, rank: int = 0) -> TokenSender:
    return TokenSender(receiver.address, epoch, receiver.open_stream(rank))


def output(name: str, *tokens: int, **rest) -> RequestOutput:
    return RequestOutput(name, list(tokens), **rest)


def test_messages_arrive_whole_and_in_order_from_every_rank():
    async def run() -> dict[str, list[int]]:
        receiver = TokenReceiver("127.0.0.1", 0)
        inbox = Inbox(receiver)
        senders = [sender_to(receiver, rank=rank) for rank in range(3)]
        for step in range(50):
            for rank, sender in enumerate(senders):
                sender.send(
                    rank, 10 * step, [output(f"r{rank}", step), output(f"other{rank}", step)]
                )
        tokens: dict[str, list[int]] = {}
        for _ in range(150):
            for item in await inbox.receive():
                tokens.setdefault(item.request_id, []).extend(item.token_ids)
        for sender in senders:
            sender.close()
        receiver.close()
        assert inbox.loads == {rank: [10 * step for step in range(50)] for rank in range(3)}
        return tokens

    tokens = asyncio.run(run())
    assert len(tokens) == 6 and all(ids == list(range(50)) for ids in tokens.values())


def test_every_field_survives():
    sent = [
        output("a", 1, 2, finish_reason="stop"),
        output("b", finish_reason="error", error="why"),
        output("c", 7, logprobs=[TokenLogprobs(-0.5, 1, [7, 8], [-0.5, -float("inf")])]),
        output("d", prompt_logprobs=[None, TokenLogprobs(-1.0, 3, [], [])], num_cached_tokens=16),
        output("e", 5, finish_reason="length", times=RequestTimes(0.5, 0.25, 2.0)),
        output("f", finish_reason="length", kv_source="tcp://10.0.0.1:77 key"),
    ]

    async def run() -> list[RequestOutput]:
        receiver = TokenReceiver("127.0.0.1", 0)
        inbox = Inbox(receiver)
        sender = sender_to(receiver)
        sender.send(0, 0, sent)
        received = await inbox.receive()
        sender.close()
        sender.send(0, 0, sent)  # dropped without an error
        receiver.close()
        return received

    assert asyncio.run(run()) == sent


def test_who_was_not_given_the_key_is_not_heard():
    async def run() -> None:
        receiver = TokenReceiver("127.0.0.1", 0)
        inbox = Inbox(receiver)
        wrong_key = StreamAddress(receiver.address.endpoint, zmq.curve_keypair()[0])
        stranger = TokenSender(wrong_key, 0, receiver.open_stream(0))
        stranger.send(0, 0, [output("x", 1)])
        plain = zmq.Context.instance().socket(zmq.PUSH)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(receiver.address.endpoint)
        plain.send(b"[]")
        with pytest.raises(TimeoutError):
            await inbox.receive(0.5)
        stranger.close()
        plain.close()
        receiver.close()

    asyncio.run(run())


def test_a_burst_that_came_before_the_loop_looked_is_delivered_whole():
    """More messages than are taken at once, and one change of the descriptor for all of them."""
    number = 5 * MAX_MESSAGES_AT_ONCE + 3

    async def run() -> list[int]:
        receiver = TokenReceiver("127.0.0.1", 0)
        sender = sender_to(receiver)
        for step in range(number):
            sender.send(0, 0, [output("r", step)])
        time.sleep(0.3)  # the loop stands still
        inbox = Inbox(receiver)
        steps = [(await inbox.receive())[0].token_ids[0] for _ in range(number)]
        sender.close()
        receiver.close()
        return steps

    assert asyncio.run(run()) == list(range(number))


def test_messages_of_another_epoch_are_dropped_and_counted(caplog):
    async def run() -> None:
        receiver = TokenReceiver("127.0.0.1", 2)
        inbox = Inbox(receiver)
        old, new = sender_to(receiver, 1, rank=1), sender_to(receiver, 2)
        for step in range(3):
            old.send(0, 9, [output("r", step)])
        for _ in range(1000):
            if receiver.num_stale == 3:
                break
            await asyncio.sleep(0.01)
        new.send(0, 0, [output("r", 7)])
        assert await inbox.receive() == [output("r", 7)]
        assert receiver.num_stale == 3 and inbox.loads == {0: [0]}
        receiver.close()
        old.close()
        new.close()

    with caplog.at_level(logging.INFO, "workers.wire.token_stream"):
        asyncio.run(run())
    messages = [record.message for record in caplog.records if "epoch" in record.message]
    assert messages == ["dropping messages of epoch 1; this is epoch 2"]


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"[0, 0]", b'[0, 0, 0, [["r", [1], null, null, 5]]]', b"[0, 1, 0, []]"],
    ids=str,
)
def test_a_message_that_cannot_be_read_counts_as_missing(caplog, data):
    """Its tokens would be missing in the texts."""

    async def run() -> None:
        receiver = TokenReceiver("127.0.0.1", 0)
        inbox = Inbox(receiver)
        sender = sender_to(receiver)
        sender._sender.send(data)
        sender.send(0, 0, [output("r", 8)])
        await until(lambda: inbox.broken == [0])
        again = sender_to(receiver)
        again.send(0, 0, [output("r", 7)])
        assert await inbox.receive() == [output("r", 7)]
        assert inbox.broken == [0] and receiver.num_stale == 1
        for each in (sender, again):
            each.close()
        receiver.close()

    asyncio.run(run())
    assert caplog.text.count("a message of rank 0 cannot be read") == 1


def test_a_message_without_a_whole_header_is_dropped_and_counted():
    async def run() -> None:
        receiver = TokenReceiver("127.0.0.1", 0)
        inbox = Inbox(receiver)
        sender = sender_to(receiver)
        for cut in (b"", sender._sender._stream + b"1234567"):
            sender._sender._socket.send(cut)
        sender.send(0, 0, [output("r", 7)])
        assert await inbox.receive() == [output("r", 7)]
        assert receiver.num_stale == 2 and not inbox.broken
        sender.close()
        receiver.close()

    asyncio.run(run())


def test_nothing_is_delivered_after_a_missing_message(caplog):
    """Not from this stream, and nothing more from it when another one has been opened in its place."""

    async def run() -> None:
        receiver = TokenReceiver("127.0.0.1", 0)
        inbox = Inbox(receiver)
        broken, other = sender_to(receiver), sender_to(receiver, rank=1)
        broken.send(0, 0, [output("r", 1)])
        broken._sender.num_sent += 1
        broken.send(0, 0, [output("r", 3)])
        broken.beat(0, 5)
        assert await inbox.receive() == [output("r", 1)]
        await until(lambda: inbox.broken == [0])
        again = sender_to(receiver)
        broken.send(0, 0, [output("r", 4)])
        again.send(0, 0, [output("r", 2)])
        assert await inbox.receive() == [output("r", 2)]
        again.beat(0, None)
        other.beat(1, 7)
        await until(lambda: len(inbox.beats) == 2)
        assert sorted(inbox.beats) == [(0, None), (1, 7)] and inbox.broken == [0]
        for sender in (broken, other, again):
            sender.close()
        receiver.close()

    asyncio.run(run())
    assert "a message of rank 0 is missing: number 2 came after 1" in caplog.text


def test_successive_outputs_merge_into_one():
    one, two = TokenLogprobs(-1.0, 1, [], []), TokenLogprobs(-2.0, 2, [], [])
    merged = merge(
        [
            output("r", 1, logprobs=[one], prompt_logprobs=[None], num_cached_tokens=8),
            output("r", 2, 3, logprobs=[two, one]),
            output("r", 4, finish_reason="stop", logprobs=[two]),
        ]
    )
    assert merged == output(
        "r",
        *(1, 2, 3, 4),
        finish_reason="stop",
        logprobs=[one, two, one, two],
        prompt_logprobs=[None],
        num_cached_tokens=8,
    )
    assert merge([output("r", 1), output("r", 2)]) == output("r", 1, 2)
