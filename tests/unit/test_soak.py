"""The parts of scripts/chaos --soak without a server: requests, clients that leave, bounds, the page, failures."""

import asyncio
import json
import random
from collections import Counter
from itertools import islice

import httpx
import pytest

from scripts.bench import chaos
from scripts.bench.chaos_resources import growth
from scripts.bench.chaos_streams import Answer, Found, stream
from scripts.bench.soak import GROW_MB, drawn
from scripts.bench.soak_curve import ALL_ROLES, FIGURES, as_columns, broken_bounds, page, windows
from scripts.bench.soak_traffic import Traffic, mixed_requests

REQUEST = ("greedy", "/v1/completions", {"prompt": "x", "stream": True})


def sample(at_s: float, **changes: float) -> dict[str, float]:
    """A sample with equal figures, but for `changes`."""
    found = {"at_s": at_s, "in_flight": 3, "answers": at_s, "failed": 0, "different": 0, "left": 0}
    found |= {"longest_wait_s": 1.5, "failures": at_s // 60, "segments": 1}
    found |= {f"{role}_{figure}": 30 for role in ALL_ROLES for figure in FIGURES}
    return found | changes


def curve(**changes: float) -> list[dict[str, float]]:
    """An hour of samples, of which the one after 50 minutes has `changes`."""
    moments = range(10, 3601, 10)
    return [sample(at, **(changes if at == 3000 else {})) for at in moments]


def choice(text: str, reason: str | None = None) -> str:
    item = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    return f"data: {json.dumps(item)}\n\n"


def test_the_traffic_has_requests_of_all_kinds_lengths_and_forms() -> None:
    requests = mixed_requests("demo", 54)
    kinds = Counter(kind for kind, _, _ in requests)
    assert len(kinds) == 9 and set(kinds.values()) == {6}
    for kind in kinds:
        bodies = [body for name, _, body in requests if name == kind]
        assert {"stream" in body for body in bodies} == {True, False}
        assert all(("stream" in body) == ("stream_options" in body) for body in bodies)
    prompts = [body["prompt"] for _, _, body in requests if "prompt" in body]
    chats = [body["messages"] for _, _, body in requests if "messages" in body]
    assert {len(messages) for messages in chats} == {1, 2}
    lengths = sorted(map(len, prompts))
    assert lengths[0] < 60 and lengths[-1] > 1000
    shared = Counter(prompt[:400] for prompt in prompts if len(prompt) > 500)
    assert max(shared.values()) > 1, "prompts begin alike"
    assert mixed_requests("demo", 54) == requests


@pytest.mark.parametrize(
    ("text", "logprobs", "part"),
    [("ab", [-1.0], ""), ("", [], ""), ("b", [-1.0], "texts"), ("ab", [-2.0], "logprobs")],
)
def test_an_answer_that_was_left_is_a_beginning(text: str, logprobs: list, part: str) -> None:
    whole = Answer(texts={0: "abc"}, reasons={0: "stop"}, logprobs=[-1.0, -3.0])
    beginning = Answer(texts={0: text}, logprobs=logprobs, left=True)
    assert beginning.differs(whole) == whole.differs(beginning) == part
    assert Answer(texts={0: "ab"}).differs(whole) == "texts", "a lost end"


def test_a_whole_answer_equals_its_stream() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["stream"]:
            return httpx.Response(200, text=choice("a") + choice("b", "stop") + "data: [DONE]\n\n")
        message = {"content": "ab"}
        found = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        return httpx.Response(200, json=found)

    async def both() -> list[Answer]:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            return [await stream(client, "/", {"stream": streamed}) for streamed in (True, False)]

    streamed, whole = asyncio.run(both())
    assert not whole.differs(streamed) and whole.texts == {0: "ab"} and not whole.error
    assert (len(streamed.times), len(whole.times)) == (2, 1)


class Server:
    """Answers "abcd"; counts requests and lets `ended` be set after `last` ones."""

    def __init__(self, last: int):
        self.ended, self._last, self.asked = asyncio.Event(), last, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.asked == self._last:
            self.ended.set()
        items = [choice("a"), choice("b"), choice("c"), choice("d", "length")]
        return httpx.Response(200, text="".join(items) + "data: [DONE]\n\n")


def test_clients_leave_and_long_waits_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.bench.soak_traffic.PAUSE_S", 1e-6)
    monkeypatch.setattr("scripts.bench.soak_traffic.LEAVE_AFTER", 3)
    wanted = Answer(texts={0: "abcd"}, thoughts={0: ""}, reasons={0: "length"})

    async def run(hang_s: float) -> tuple[Found, Traffic, int]:
        server, found = Server(60), Found()
        transport = httpx.MockTransport(server)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            traffic = Traffic(client, [REQUEST], [wanted], found, hang_s, may_break=False)
            await traffic.keep(0, server.ended)
        return found, traffic, server.asked

    found, traffic, asked = asyncio.run(run(60.0))
    assert found.done["greedy"] == asked == 60 and 0 < traffic.left < 20
    assert not found.failed and not found.different and found.in_flight == 0
    assert traffic.facts()["answers"] == 60 and traffic.facts()["longest_wait_s"] == 0
    found, _, _ = asyncio.run(run(-1.0))
    assert len(found.failed) == 60 and found.failed[0].endswith("without an item")


def test_a_figure_that_grows_after_the_warm_up_breaks_its_bound() -> None:
    assert broken_bounds(curve(), 600, GROW_MB) == []
    assert broken_bounds(curve(rank_rss_mb=126), 600, GROW_MB) == []
    for name, limit in (("rank_rss_mb", 96), ("gcs_rss_mb", 48), ("ingress_threads", 4)):
        (broken,) = broken_bounds(curve(**{name: 30 + limit + 1}), 600, GROW_MB)
        assert broken == f"{name}: 30 -> {31 + limit} after 3000 s, more than {limit}"
    assert broken_bounds(curve(segments=3), 600, GROW_MB)
    assert broken_bounds(curve(rank_rss_mb=500), 3000, GROW_MB) == [], "it was so in the warm-up"
    assert broken_bounds(curve()[:5], 600, GROW_MB), "nothing after the warm-up proves nothing"


def test_the_page_has_a_row_for_each_ten_minutes() -> None:
    samples = curve(rank_rss_mb=77, longest_wait_s=9.5)
    rows = windows(samples)
    assert [row["minutes"] for row in rows] == [[n, n + 10] for n in range(0, 60, 10)]
    assert {row["answers_per_s"] for row in rows} == {1.0}
    assert sum(row["answers"] for row in rows) == 3600
    assert rows[4]["rank_rss_mb"] == [30, 77] and rows[4]["longest_wait_s"] == 9.5
    found = {
        "seconds": 3600,
        "ranks": 3,
        "streams": 24,
        "seconds_between": 60.0,
        "ten_minutes": rows,
        "hardware": "CPU",
        "versions": {"python": "3"},
        "date": "2026-01-01",
        "answered": {"greedy": 3600},
        "clients_left": 7,
        "failed": [],
        "rounding": [],
        "noise_without_failures": {"answers": 50, "others": 1},
        "failures": {"kill": {"count": 9, "pause_s": {"median": 1.0, "p99": 2.0, "most": 2.5}}},
        "resources": {"warm_up_s": 600, "grew": []},
    }
    text = page(found, "soak")
    assert "| 40 to 50 | 600 | 1.0 | 0 | 10 | 0 | 9.5 s |" in text
    assert "| 40 to 50 | 30, 77 |" in text and "| kill | 9 | 1.0 s | 2.5 s |" in text
    columns = as_columns(samples)
    assert dict(zip(columns["columns"], columns["samples"][-1], strict=True)) == samples[-1]


def test_failures_are_drawn_in_rounds_of_all_kinds() -> None:
    kinds = ["a", "b", "c", "d"]
    first = list(islice(drawn(kinds, random.Random(1)), 12))
    assert first == list(islice(drawn(kinds, random.Random(1)), 12))
    rounds = [first[:4], first[4:8], first[8:]]
    assert all(sorted(part) == kinds for part in rounds) and len(set(map(tuple, rounds))) > 1


def test_a_soak_has_defaults_of_its_own() -> None:
    once, soak = chaos.parse([]), chaos.parse(["--soak", "0.5", "--grow-mb", "rank=7"])
    assert (once.streams, once.faults, once.out.name) == (200, ["kill"], "chaos")
    assert (soak.streams, soak.every_s, soak.out.name) == (24, 60, "chaos-cpu-soak")
    assert set(soak.faults) == set(chaos.FAULTS)
    assert soak.grow_mb == GROW_MB | {"rank": 7.0}
    assert chaos.parse(["--soak", "1", "--streams", "3"]).streams == 3
    with pytest.raises(SystemExit):
        chaos.parse(["--soak", "0"])
    one = chaos.parse(["--soak", "1", "--ranks", "1"]).faults
    assert not {"two", "rebuild"} & set(one) and "kill" in one


def test_threads_that_grew_are_named() -> None:
    before = {"rank": {"threads": 35, "thread_names": {"ray": 33, "zmq": 2}}}
    after = {"rank": {"threads": 44, "thread_names": {"ray": 33, "zmq": 4, "gloo": 7}}}
    assert growth(before, after) == ["rank: threads 35 -> 44 (7 gloo, 2 zmq)"]
