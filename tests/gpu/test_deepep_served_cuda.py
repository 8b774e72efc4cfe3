"""configs/deepep-deepgemm.yaml serves: a small FP8 checkpoint on two ranks, every step cut, answers over HTTP."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kernels.backends import select
from tests.checkpoints.writer import make_checkpoint

pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")

CONFIG = Path(__file__).parents[2] / "configs" / "deepep-deepgemm.yaml"
START_TIMEOUT_S = 300  # the first start on a machine compiles
PAIR = {"all2all": "deepep", "grouped_gemm": "deepgemm_fp8"}


def _why_not() -> str | None:
    if torch.cuda.device_count() < 2:
        return f"needs 2 GPUs, found {torch.cuda.device_count()}"
    unavailable = select.probe("cuda")
    return unavailable.get("all2all.deepep") or unavailable.get("grouped_gemm.deepgemm_fp8")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_why_not() is not None, reason=str(_why_not())),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tests.serve.server import running

    folder = tmp_path_factory.mktemp("pair")
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 2048, "moe_intermediate_size": 256}
    sizes |= {"num_heads": 16, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}
    checkpoint = make_checkpoint(folder / "model", **sizes, fp8=True)
    config = yaml.safe_load(CONFIG.read_text())
    assert config["kernels"] == PAIR
    with running(
        folder,
        checkpoint,
        start_timeout_s=START_TIMEOUT_S,
        model={"max_model_len": 1024},
        cluster=config["cluster"],
        kernels=config["kernels"],
        overlap={"mode": "on", "comm_sms": 24},
        scheduler={"max_num_seqs": 16, "max_num_batched_tokens": 1024},
    ) as server:
        yield server


def answer(server: Any, prompt: list[int]) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    body |= {"max_tokens": 16, "return_token_ids": True}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    ids: list[int] = found.json()["choices"][0]["token_ids"]
    return ids


def test_the_pair_answers(server: Any) -> None:
    prompts = [[(7 * seq + token) % 500 for token in range(20 + 37 * seq)] for seq in range(12)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda prompt: answer(server, prompt), prompts))
    assert all(len(ids) == 16 for ids in together)
    alone = [answer(server, prompt) for prompt in prompts[:3]]
    assert [answer(server, prompt) for prompt in prompts[:3]] == alone
    ranks = httpx.get(f"{server.url}/ranks").json()["ranks"]
    assert len(ranks) == 2 and all(rank["generation_tokens"] > 0 for rank in ranks), ranks
    assert "all2all deepep, grouped_gemm deepgemm_fp8" in server.log.read_text()
