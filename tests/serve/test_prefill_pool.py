"""A server with a prefill and a decode group: the answers of one group, while ranks die or roles change."""

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.commands.operate import OperationError
from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.serve.server import Server, running
from tests.serve.test_operations import operate

pytestmark = pytest.mark.exhaustive
PROMPT, NEW, LONG = 600, 24, 300
WHOLE = {"X-data-parallel-rank": "1"}  # one rank computes prompt and answer
SECTIONS: dict[str, Any] = {
    "model": {"max_model_len": 2048},
    "cache": {"num_blocks": 1024, "host_memory_gib": 0.1},
    "pool": [{"role": "prefill", "ranks": 1}, {"role": "decode", "ranks": 1}],
}


def body_of(number: int, max_tokens: int, salt: str = "", model: str = "") -> dict[str, Any]:
    """A request with prompt `number`."""
    return {
        "model": model or None,
        "prompt": [(number * 31 + 7 * i * i) % 200 for i in range(PROMPT)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt or None,
    }


def ask(
    server: Server,
    number: int,
    max_tokens: int = NEW,
    *,
    salt: str = "",
    model: str = "",
    **headers: str,
) -> list[int]:
    """The tokens of the answer to prompt `number`."""
    body = body_of(number, max_tokens, salt, model)
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    tokens: list[int] = choice["token_ids"]
    assert len(tokens) == max_tokens
    return tokens


def processor_time(process: psutil.Process) -> float:
    """The seconds that a process has computed."""
    times = process.cpu_times()
    return float(times.user + times.system)


class Stream(threading.Thread):
    """A client that reads the answer to prompt `number`; `tokens` grows, and `taken` is set by the second one."""

    def __init__(self, server: Server, number: int):
        super().__init__(daemon=True)
        self.tokens: list[int] = []
        self.taken = threading.Event()
        self._url, self._body = f"{server.url}/v1/completions", body_of(number, LONG)
        self.start()

    def run(self) -> None:
        body = self._body | {"stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.tokens += choice["token_ids"]
                if len(self.tokens) > 1:
                    self.taken.set()


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


def until_handed_over(server: Server, first: int = 20, prefill_rank: int = 0) -> None:
    """Wait until the decode rank computes little of three prompts: the end of a prompt waits 2 s at most for its KV."""
    deadline, numbers = time.monotonic() + 120, itertools.count(first)
    while True:
        before, before_places = computed(server), prompts_by_place(server)
        for _ in range(3):
            ask(server, next(numbers))
        assert prompts_by_place(server)["prefill"] == before_places.get("prefill", 0) + 3
        spent = [now - then for now, then in zip(computed(server), before, strict=True)]
        if spent[1 - prefill_rank] < PROMPT:
            assert spent[prefill_rank] >= 3 * PROMPT and restored(server)
            return
        assert time.monotonic() < deadline, "the decode rank computes the prompts"


def until_restored(server: Server, model: str) -> None:
    """Wait until the decode rank finds the KV of a prompt of this model."""
    deadline, numbers = time.monotonic() + 120, itertools.count(40)
    while True:
        before = restored(server)
        ask(server, next(numbers), model=model)
        if restored(server) >= before + PROMPT - 64:
            return
        assert time.monotonic() < deadline, "the decode rank computes the prompts"


def test_answers_do_not_depend_on_the_pool_or_on_deaths_in_it(
    tmp_path: Path, checkpoint: Path
) -> None:
    cluster = {"ranks": 2, "device": "cpu"}
    with running(tmp_path, checkpoint, cluster=cluster, **SECTIONS) as server:
        whole = [ask(server, n, salt="whole", **WHOLE) for n in range(12)]
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


def test_the_groups_compute_with_the_adapter_of_a_request(tmp_path: Path, checkpoint: Path) -> None:
    """Every prompt is computed with and without adapter; the merged model has the answers of the adapter."""
    modules = chosen(weight_shapes(checkpoint), ("k_proj", "v_proj", "o_proj"))
    folder = make_adapter(tmp_path / "fr", modules, alpha=24)
    cluster = {"ranks": 2, "device": "cpu"}
    lora = {"max_loras": 1, "adapters": [{"name": "fr", "path": str(folder)}]}
    with running(tmp_path, checkpoint, cluster=cluster, lora=lora, **SECTIONS) as server:
        until_handed_over(server)
        plain = [ask(server, n, salt="whole", **WHOLE) for n in range(4)]
        before = prompts_by_place(server)
        found = [[ask(server, n, model=model) for model in ("fr", "tiny")] for n in range(4)]
        assert prompts_by_place(server)["prefill"] == before["prefill"] + 8
        until_restored(server, "fr")
    merged = merge(checkpoint, folder, tmp_path / "merged")
    alone = {name: SECTIONS[name] for name in ("model", "cache")}
    with running(tmp_path, merged, **alone) as server:
        adapted = [ask(server, n) for n in range(4)]
    assert adapted != plain and found == [list(pair) for pair in zip(adapted, plain, strict=True)]


def test_groups_exchange_their_roles_and_no_open_stream_differs(
    tmp_path: Path, checkpoint: Path
) -> None:
    # The ranks are stopped for a moment, which is no hang.
    cluster = {"ranks": 2, "device": "cpu", "hang_timeout_s": 120}
    with running(tmp_path, checkpoint, cluster=cluster, **SECTIONS) as server:
        until_handed_over(server)
        ranks = server.ranks()
        for prefill, decode in ((0, 1), (1, 0)):
            numbers = range(4 * prefill, 4 * prefill + 4)
            whole = [ask(server, n, LONG, salt="whole", **WHOLE) for n in numbers]
            streams = [Stream(server, n) for n in numbers]
            assert all(stream.taken.wait(120) for stream in streams)
            for rank in ranks:
                rank.suspend()  # the streams are open for as long as the roles change
            try:
                assert all(stream.is_alive() for stream in streams), "too quick to prove anything"
                with pytest.raises(OperationError, match="no other group answers than"):
                    operate(server, "role", role="prefill", group=f"phalanx-{decode}")
                operate(server, "role", role="decode", group=f"phalanx-{prefill}")
                operate(server, "role", role="prefill", group=f"phalanx-{decode}")
            finally:
                for rank in ranks:
                    rank.resume()
            for stream in streams:
                stream.join(120)
            assert [stream.tokens for stream in streams] == whole, "or a stream hangs"
            groups = httpx.get(f"{server.url}/ready", timeout=60).json()["groups"]
            assert groups[prefill]["role"] == "decode" and groups[decode]["role"] == "prefill"
            assert [group["rebuilds"] for group in groups] == [0, 0]
            until_handed_over(server, first=50 * (1 + decode), prefill_rank=decode)
        server.wait_free(60.0)


def test_the_prefill_group_goes_on_with_the_streams_of_a_decode_group_that_is_gone(
    tmp_path: Path, checkpoint: Path
) -> None:
    # The decode group does not serve again. Its rank is stopped for a moment, which is no hang.
    cluster = {"ranks": 2, "device": "cpu", "hang_timeout_s": 120, "rebuild_attempts": 0}
    with running(tmp_path, checkpoint, cluster=cluster, **SECTIONS) as server:
        until_handed_over(server)
        before = {rank: processor_time(rank) for rank in server.ranks()}
        whole = [ask(server, n, LONG, salt="whole", **WHOLE) for n in range(4)]
        decode = max(before, key=lambda rank: processor_time(rank) - before[rank])
        streams = [Stream(server, n) for n in range(4)]
        assert all(stream.taken.wait(120) for stream in streams)
        decode.suspend()  # the streams are open when it ends
        assert all(stream.is_alive() for stream in streams), "too quick to prove anything"
        decode.kill()
        for stream in streams:
            stream.join(120)
        assert [stream.tokens for stream in streams] == whole, "or a stream hangs"
        groups = httpx.get(f"{server.url}/ready", timeout=60).json()["groups"]
        assert [group["state"] for group in groups] == ["serving", "failed"]
        assert [ask(server, n, LONG) for n in range(4)] == whole
        server.wait_free(60.0)
