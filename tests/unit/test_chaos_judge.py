"""The judge of scripts/chaos: only an answer that the undisturbed server gives with noise counts as rounding."""

import asyncio
import json
from pathlib import Path

import httpx

from scripts.bench.chaos_judge import TRIES, control, judge
from scripts.bench.chaos_streams import Found, repeat, stream
from scripts.bench.chaos_victim import Victim

REQUESTS = [("greedy", "/v1/completions", {"prompt": "x", "stream": True})]


class Server:
    """Answers "ab", or the text of a disturbance; with noise every fourth time "ac"."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.disturbed = ""
        self.asked = 0
        self.salts: set[str] = set()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        text = "ab"
        if (self._folder / "noise").exists():
            self.salts.add(json.loads(request.content)["cache_salt"])
            text = "ac" if self.asked % 4 == 0 else "ab"
        elif self.disturbed:
            text = self.disturbed
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        lines = [f"data: {json.dumps({'choices': [choice]})}", "data: [DONE]", ""]
        return httpx.Response(200, text="\n\n".join(lines))


def judged(folder: Path, texts: list[str]) -> tuple[Found, list[str], Server]:
    """The verdict on disturbed answers with these texts, and the server."""

    async def scenario() -> tuple[Found, list[str], Server]:
        server = Server(folder)
        transport = httpx.MockTransport(server)
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            expected = [await stream(client, *REQUESTS[0][1:])]
            found, ended = Found(), asyncio.Event()
            ended.set()
            for server.disturbed in texts:
                await repeat(client, REQUESTS, expected, found, [0], ended, may_break=False)
            victim = Victim(0, folder / "log", client, folder, 1)
            explained = await judge(victim, client, REQUESTS, found)
            noise = await control(victim, client, REQUESTS * 8, expected * 8)
            assert noise.answers == 8 and noise.others == 2
            return found, [d.answer.texts[0] for d in explained], server

    return asyncio.run(scenario())


def test_an_answer_that_noise_gives_too_is_rounding(tmp_path: Path) -> None:
    found, explained, server = judged(tmp_path, ["ab", "ac"])
    assert explained == ["ac"] and not found.failed and found.done["greedy"] == 2
    assert not (tmp_path / "noise").exists()
    assert len(server.salts) == 16 + 8, "prompts come from the cache"


def test_a_lost_or_doubled_token_is_a_failure(tmp_path: Path) -> None:
    found, explained, _ = judged(tmp_path, ["a", "abb", "ac"])
    assert explained == ["ac"]
    assert [failed.split(":")[0] for failed in found.failed] == ["greedy 0", "greedy 0"]


def test_equal_answers_are_judged_once(tmp_path: Path) -> None:
    found, explained, server = judged(tmp_path, ["ac", "a", "ac", "a"])
    assert explained == ["ac", "ac"] and len(found.failed) == 2
    assert server.asked == 1 + 4 + 16 + TRIES + 8
