"""Adapters of a real server: of the YAML and loaded in service, under aborts, deaths of a rank and the supervisor."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.serve.metrics_scrape import Scrape
from tests.serve.server import OPERATOR_KEY, Server, running
from tests.unit.model_case import OneRank, make_batch

NAMES = ("fr", "de", "es")
HEADERS = {"authorization": f"Bearer {OPERATOR_KEY}"}
PROMPT, NUM_TOKENS = [3, 1, 4, 1, 5], 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> dict[str, Path]:
    """The folder of each adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    modules = chosen(weight_shapes(checkpoint), ("q_proj", "v_proj", "o_proj", "up_proj"))
    return {
        name: make_adapter(folder / name, modules, seed=number, alpha=24)
        for number, name in enumerate(NAMES)
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], checkpoint: Path, tmp_path_factory: Any) -> dict[str, Any]:
    """The greedy tokens of the model and of each adapter, by the merged models."""
    folder = tmp_path_factory.mktemp("merged")
    paths = {name: merge(checkpoint, it, folder / name) for name, it in folders.items()}
    found = {name: greedy(path) for name, path in (paths | {"tiny": checkpoint}).items()}
    assert len({tuple(tokens) for tokens in found.values()}) == 4, (
        "each adapter is told by its tokens"
    )
    return found


def greedy(path: Path) -> list[int]:
    rank, ids = OneRank(path), PROMPT[:]
    for _ in range(NUM_TOKENS):
        ids.append(int(torch.argmax(rank.logits(make_batch([ids], [0]))[-1])))
    return ids[len(PROMPT) :]


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoint: Path,
    folders: dict[str, Path],
    server: Server,
) -> Iterator[Server]:
    """In the Ray of the shared server."""
    lora = {
        "max_loras": 2,
        "max_cpu_loras": 6,
        "targets": ["attention", "experts"],
        "adapters": [{"name": "fr", "path": str(folders["fr"])}],
    }
    folder = tmp_path_factory.mktemp("server")
    sections = {"lora": lora, "serve": {"replicas": 2}}
    with running(folder, checkpoint, joins=server, **sections) as joined:
        yield joined


def tokens(server: Server, model: str, count: int = NUM_TOKENS) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": count, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def operate(server: Server, route: str, **body: Any) -> httpx.Response:
    path = f"{server.url}/v1/{route}_lora_adapter"
    return httpx.post(path, json=body, headers=HEADERS, timeout=120)


def listed(server: Server, *names: str) -> None:
    """Wait until every ingress lists the model and these adapters: connections reach one or the other."""
    deadline, seen = time.monotonic() + 60, 0
    while seen < 12:
        cards = server.get("/v1/models").json()["data"]
        found = {card["id"]: card["parent"] for card in cards}
        seen = seen + 1 if found == {"tiny": None} | dict.fromkeys(names, "tiny") else 0
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


def runs(server: Server) -> bool:
    """Whether a rank has a request."""
    return Scrape(server.get("/metrics").text).sum("num_requests_running") > 0


def num_aborted(server: Server) -> float:
    return Scrape(server.get("/metrics").text).sum("request_success_total", finished_reason="abort")


def leave(server: Server, model: str, then: Callable[[], None]) -> None:
    """Open a stream of 400 tokens and read its begin; call `then`, and leave it."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                return then()
    raise AssertionError("the stream has no tokens")


@pytest.mark.parametrize(
    "cycles",
    [8, pytest.param(60, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1800)])],
)
def test_adapters_change_under_streams_that_clients_leave(
    adapted: Server, folders: dict[str, Path], expected: dict[str, list[int]], cycles: int
) -> None:
    """More adapters than a rank may hold, one after another, under two names: each answer is of its own adapter."""
    server, aborted_before = adapted, num_aborted(adapted)

    def change(route: str, name: str, **path: str) -> None:
        answer = operate(server, route, lora_name=name, **path)
        assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(3) as pool:
        for cycle in range(cycles):
            which, name = NAMES[cycle % 3], f"a{cycle % 2}"
            change("load", name, lora_path=str(folders[which]))
            listed(server, "fr", name)
            left = pool.submit(leave, server, name, lambda: None)
            beside = pool.submit(tokens, server, ("tiny", "fr")[cycle % 2])
            assert tokens(server, name) == expected[which]
            assert beside.result() == expected[("tiny", "fr")[cycle % 2]]
            left.result()
            leave(server, name, lambda name=name: change("unload", name))
    listed(server, "fr")
    server.wait_free(60)
    deadline = time.monotonic() + 60  # an ingress reports its own counts when it is asked
    while num_aborted(server) < aborted_before + cycles:
        assert time.monotonic() < deadline, "the streams that clients left went on to their ends"
    assert [tokens(server, model) for model in ("tiny", "fr")] == [expected["tiny"], expected["fr"]]


def test_adapters_come_and_go_and_outlive_failures(
    adapted: Server, folders: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    server = adapted
    listed(server, "fr")
    refused = operate(server, "load", lora_name="bad", lora_path=str(tmp_path))
    assert refused.status_code == 400 and "has no adapter_config.json" in refused.text
    for name in ("de", "es"):
        answer = operate(server, "load", lora_name=name, lora_path=str(folders[name]))
        assert answer.status_code == 200, answer.text
    listed(server, *NAMES)
    with ThreadPoolExecutor(12) as pool:
        models = [("tiny", *NAMES)[number % 4] for number in range(48)]  # three adapters, two slots
        assert [*pool.map(lambda name: tokens(server, name), models)] == [
            expected[it] for it in models
        ]

        whole = tokens(server, "es", 400)
        assert whole[:NUM_TOKENS] == expected["es"]
        server.wait_free(60)
        open_one = pool.submit(tokens, server, "es", 400)
        while not open_one.done() and not runs(server):
            time.sleep(0.02)
        unloaded = operate(server, "unload", lora_name="es")
        assert unloaded.status_code == 200, unloaded.text
        listed(server, "fr", "de")
        server.ranks()[0].kill()
        assert open_one.result(120) == whole, "the request goes on with its adapter"
        server.wait_line("serving, epoch 1")  # the request may have ended before the rebuild
        gone = {"model": "es", "prompt": [1]}
        missing = httpx.post(f"{server.url}/v1/completions", json=gone, timeout=60)
        assert missing.status_code == 404 and "'de', 'fr'" in missing.text

        server.wait_successor(server.kill_supervisor())
        answer = operate(server, "load", lora_name="es", lora_path=str(folders["fr"]))
        assert answer.status_code == 200, answer.text
        listed(server, *NAMES)
        models = [("tiny", *NAMES)[number % 4] for number in range(16)]
        wanted = expected | {"es": expected["fr"]}
        for ranks in (2, 1):  # the one rank takes the experts of the other, with their adapters
            assert [*pool.map(lambda name: tokens(server, name), models)] == [
                wanted[it] for it in models
            ]
            if ranks == 2:
                scaled = httpx.post(
                    f"{server.url}/admin/scale", json={"ranks": 1}, headers=HEADERS, timeout=120
                )
                assert scaled.status_code == 200, scaled.text
