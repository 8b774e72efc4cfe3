"""A server that moves experts by itself, under streams and past the death of a rank."""

import time
from collections.abc import Callable

import pytest

from cluster.commands.experts import fetch
from tests.serve.metrics_scrape import Scrape
from tests.serve.open_streams import Stream
from tests.serve.server import Server, running
from workers.specs.expert_layout import ExpertLayout

NUM_TOKENS = 240
STEPS_A_MOVE = 4 * NUM_TOKENS
"""Steps to a move, and from one to the next: more than the streams behind the first one take, so no other follows."""
MODEL = {"max_model_len": 512, "routing": {"kind": "zipf", "s": 1.5}}


def scrape(server: Server) -> Scrape:
    return Scrape(server.get("/metrics").text)


def under_load(server: Server, condition: Callable[[], bool], seconds: float = 120) -> None:
    """Keep streams open until a condition holds."""
    streams: list[Stream] = []
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        streams = [stream for stream in streams if stream.is_alive()]
        streams += [Stream(server, NUM_TOKENS) for _ in range(4 - len(streams))]
        time.sleep(0.2)
    for stream in streams:
        stream.join(60)
        assert stream.broken is None and '"length"' in stream.lines[-2], stream.lines[-2:]


def layout(server: Server) -> ExpertLayout:
    (found,) = fetch(server.url, "UNSET")
    return found


def slots(found: ExpertLayout) -> dict[int, tuple[int, ...]]:
    return {layer: it.slots for layer, it in found.layers.items()}


@pytest.fixture
def balanced(tmp_path, checkpoint, server):
    """In the Ray of the shared server."""
    experts = {"rebalance": STEPS_A_MOVE, "redundant_slots": 1}
    with running(tmp_path, checkpoint, joins=server, model=MODEL, experts=experts) as joined:
        yield joined


def test_experts_move_under_streams_and_stay_where_they_are_past_a_death(balanced):
    server = balanced
    before, quiet = layout(server), Stream(server, NUM_TOKENS)
    quiet.join(60)

    def moves() -> float:
        return scrape(server).sum("expert_moves_total", rank="0")

    under_load(server, lambda: moves() > 0)
    found = scrape(server)
    assert found.sum("expert_layers_moved_total", rank="0") >= 1
    assert found.sum("expert_moves_cancelled_total") == 0
    moved = layout(server)
    assert slots(moved) != slots(before) and moved.starts == (0, 4, 8)
    again = Stream(server, NUM_TOKENS)
    again.join(60)
    assert again.text() == quiet.text(), "answers do not depend on the map"
    kept, rank = slots(layout(server)), server.ranks()[0]
    stream = Stream(server, NUM_TOKENS)
    rank.kill()
    stream.join(90)
    assert stream.text() == quiet.text(), stream.lines[-2:]
    server.wait_line("serving, epoch 1")  # the stream may have ended before the rebuild
    assert slots(layout(server)) == kept, "a new process begins with the map of the group"
    under_load(server, lambda: scrape(server).sum("expert_step_imbalance") > 0)
    assert scrape(server).values("expert_layer_balancedness", "layer") == ["0", "1"]
