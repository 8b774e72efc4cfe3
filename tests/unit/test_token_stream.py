"""The token stream: order, several ranks, a closed end, and strangers that are not let in."""

import asyncio

import pytest
import zmq

from workers.request import RequestOutput, TokenLogprobs
from workers.token_stream import StreamAddress, TokenReceiver, TokenSender


def output(name: str, *tokens: int, **rest) -> RequestOutput:
    return RequestOutput(name, list(tokens), **rest)


def test_messages_arrive_whole_and_in_order_from_every_rank():
    async def run() -> dict[str, list[int]]:
        receiver = TokenReceiver("127.0.0.1")
        senders = [TokenSender(receiver.address) for _ in range(3)]
        for step in range(50):
            for rank, sender in enumerate(senders):
                sender.send([output(f"r{rank}", step), output(f"other{rank}", step)])
        tokens: dict[str, list[int]] = {}
        for _ in range(150):
            for item in await asyncio.wait_for(receiver.receive(), 10):
                tokens.setdefault(item.request_id, []).extend(item.token_ids)
        for sender in senders:
            sender.close()
        receiver.close()
        return tokens

    tokens = asyncio.run(run())
    assert len(tokens) == 6 and all(ids == list(range(50)) for ids in tokens.values())


def test_every_field_survives():
    sent = [
        output("a", 1, 2, finish_reason="stop"),
        output("b", finish_reason="error", error="why"),
        output("c", 7, logprobs=[TokenLogprobs(-0.5, 1, [7, 8], [-0.5, -float("inf")])]),
        output("d", prompt_logprobs=[None, TokenLogprobs(-1.0, 3, [], [])], num_cached_tokens=16),
    ]

    async def run() -> list[RequestOutput]:
        receiver = TokenReceiver("127.0.0.1")
        sender = TokenSender(receiver.address)
        sender.send(sent)
        received = await asyncio.wait_for(receiver.receive(), 10)
        sender.close()
        sender.send(sent)  # dropped without an error
        receiver.close()
        return received

    assert asyncio.run(run()) == sent


def test_who_was_not_given_the_key_is_not_heard():
    async def run() -> None:
        receiver = TokenReceiver("127.0.0.1")
        wrong_key = StreamAddress(receiver.address.endpoint, zmq.curve_keypair()[0])
        stranger = TokenSender(wrong_key)
        stranger.send([output("x", 1)])
        plain = zmq.Context.instance().socket(zmq.PUSH)
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(receiver.address.endpoint)
        plain.send(b"[]")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.receive(), 0.5)
        stranger.close()
        plain.close()
        receiver.close()

    asyncio.run(run())
