"""The host tier of a GPU: bytes come back equal through pinned memory, beside steps, and sessions get right answers."""

import random
from pathlib import Path

import pytest
import torch

from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.gpu.pools import Pools
from tests.gpu.test_cuda_graphs import MARGIN, MEAN
from tests.gpu_families import released_shape
from tests.kv_tier_case import LAYOUTS, damaged_rows, there_and_back, tier_case
from tests.token_judge import TokenJudge, steep_routers, transformers_reference
from workers.kv_transfer import row_copies
from workers.kv_transfer.connector import Transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_contents_there_and_back(layout: str) -> None:
    with tier_case("cuda", layout) as case:
        there_and_back(case)


def test_damaged_rows_are_not_used() -> None:
    with tier_case("cuda", "heads") as case:
        damaged_rows(case)


def test_rows_that_cross_what_is_pinned_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned in parts of a size that no row divides, and buffers of two rows."""
    monkeypatch.setattr(row_copies, "REGISTER_BYTES", 5 * 4096)
    monkeypatch.setattr(row_copies, "BUFFER_BYTES", 32_000)
    with tier_case("cuda", "heads", num_bytes=2**21) as case:
        there_and_back(case)


def test_a_save_reads_what_launched_work_writes_and_a_load_waits_for_readers() -> None:
    """The work of the current stream is long: a copy that did not wait for it would take other bytes."""
    with tier_case("cuda", "heads") as case:
        items = case.blocks(list(range(40)))
        torch.cuda._sleep(200_000_000)
        for cache in case.caches:
            cache.fill_(3)
        case.run(Transfer(items), load=False)
        torch.cuda._sleep(200_000_000)
        seen = [cache.clone() for cache in case.caches]
        case.scramble(5)
        assert case.run(Transfer(items), load=True).done == {item.name for item in items}
        assert all(bool((it == 3).all()) for it in seen)
        assert all(bool((cache[:, :40] == 3).all()) for cache in case.caches)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_sessions_that_come_back(pools: Pools, tmp_path: Path, family: str) -> None:
    checkpoint = steep_routers(released_shape(tmp_path / "model", family, num_experts_per_tok=8))
    chance, events = random.Random(family), []
    for turn in range(3):
        for session in range(6):
            text = [random.Random(session).randrange(256) for _ in range(400)]
            prompt = text[: 300 + 40 * turn]
            request = make_request(f"{session}-{turn}", prompt, max_tokens=8)
            events.append(Event(40 * (6 * turn + session) + chance.randrange(3), 0, request))
    config = rank_config(
        checkpoint,
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": 512},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 256},
        cache={
            "num_blocks": 72,
            "block_size": 16,
            "state_snapshots": 2,
            "host_memory_gib": 0.25,
        },
    )
    (result,) = run_engines(pools, config, events, timeout_s=300)  # type: ignore[arg-type]
    assert not result.errors and result.gauges["kv_restored_host"] > 12 * 256
    assert result.gauges["kv_host_damaged"] == 0
    judge = TokenJudge(transformers_reference(checkpoint), MARGIN, MEAN)
    for event in events:
        assert event.request is not None
        name = event.request.request_id
        judge.greedy(event.request.prompt_token_ids, result.tokens[name], name)
    judge.close(at_least=100)
