"""A server with a prefill and a decode group: the answers of one group, while ranks of either side are killed."""

import itertools
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.serve.server import Server, running

pytestmark = pytest.mark.exhaustive
PROMPT, NEW = 600, 24


def ask(server: Server, number: int, **headers: str) -> list[int]:
    """The tokens of the answer to prompt `number`."""
    body = {
        "prompt": [(number * 31 + 7 * i * i) % 200 for i in range(PROMPT)],
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": headers.pop("salt", "") or None,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    tokens: list[int] = choice["token_ids"]
    assert len(tokens) == NEW
    return tokens


def metric(server: Server, name: str) -> list[str]:
    """The lines of a metric, with labels and value."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    return [line for line in lines if line.startswith(f"phalanx:{name}{{")]


def prompts_by_place(server: Server) -> dict[str, float]:
    found = metric(server, "prompts_by_place_total")
    return {line.split('place="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def computed(server: Server) -> list[float]:
    """Tokens that each rank has computed."""
    return [float(line.split()[-1]) for line in metric(server, "iteration_tokens_total_sum")]


def restored(server: Server) -> float:
    """Tokens that were loaded from the memory of the node."""
    return sum(float(line.split()[-1]) for line in metric(server, "kv_restored_tokens_total"))


def until_serving(server: Server) -> None:
    """Wait until both groups serve."""
    deadline = time.monotonic() + 120
    while True:
        groups = httpx.get(f"{server.url}/ready", timeout=60).json()["groups"]
        if [group["state"] for group in groups] == ["serving"] * 2:
            return
        assert time.monotonic() < deadline, groups
        time.sleep(0.1)


def until_handed_over(server: Server) -> None:
    """Wait until the decode rank computes little of three prompts: the end of a prompt waits 2 s at most for its KV."""
    deadline, numbers = time.monotonic() + 120, itertools.count(20)
    while True:
        before, before_places = computed(server), prompts_by_place(server)
        for _ in range(3):
            ask(server, next(numbers))
        assert prompts_by_place(server)["prefill"] == before_places.get("prefill", 0) + 3
        prefill, decode = (now - then for now, then in zip(computed(server), before, strict=True))
        if decode < PROMPT:
            assert prefill >= 3 * PROMPT and restored(server)
            return
        assert time.monotonic() < deadline, "the decode rank computes the prompts"


def test_answers_do_not_depend_on_the_pool_or_on_deaths_in_it(
    tmp_path: Path, checkpoint: Path
) -> None:
    sections = {
        "model": {"max_model_len": 2048},
        "cluster": {"ranks": 2, "device": "cpu"},
        "cache": {"num_blocks": 1024, "host_memory_gib": 0.1},
        "pool": [{"role": "prefill", "ranks": 1}, {"role": "decode", "ranks": 1}],
    }
    with running(tmp_path, checkpoint, **sections) as server:
        whole = [ask(server, n, salt="whole", **{"X-data-parallel-rank": "1"}) for n in range(12)]
        until_handed_over(server)
        assert [ask(server, n) for n in range(3)] == whole[:3]

        found: dict[int, list[int]] = {}

        def one(number: int) -> None:
            found[number] = ask(server, number)

        for first, victim in zip((3, 6), server.ranks(), strict=True):  # one rank of each group
            asked = [threading.Thread(target=one, args=(n,)) for n in range(first, first + 3)]
            for thread in asked:
                thread.start()
            time.sleep(0.05)
            victim.kill()
            for thread in asked:
                thread.join()
            until_serving(server)
        assert [found.get(n) for n in range(3, 9)] == whole[3:9], "or a stream hangs"
        assert [ask(server, n) for n in range(9, 12)] == whole[9:]
        server.wait_free(60.0)
