"""Every family on a GPU by the attention that `auto` takes: logits of the CPU, graphs that equal eager forwards."""

from pathlib import Path

import pytest
import torch

from kernels.attention.base import Attention
from kernels.attention.flashinfer_mla import FlashInferMlaAttention
from kernels.backends.select import probe
from kernels.host.hopper import on_hopper
from kernels.interface.registry import backend_class
from tests.devices import take_gpu
from tests.distributed.engine_harness import make_request, rank_config
from tests.gpu.test_graph_equality_cuda import compare
from tests.gpu.test_model_cuda import check_logits
from tests.gpu_families import released_shape, takes_latents
from workers.models.registry import FAMILIES
from workers.wire.request import EngineRequest

UNAVAILABLE = probe("cuda") if torch.cuda.is_available() else {}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BOTH = {"EVEN_DECODES", "DECODES"}


def attention_of(family: str) -> type[Attention]:
    """Return the fastest attention for the family, or skip the test."""
    name = "flashinfer_mla" if takes_latents(family) else "flashinfer"
    if family == "gpt_oss":
        name = "triton"
    if reason := UNAVAILABLE.get(f"attention.{name}"):
        pytest.skip(reason)
    found: type[Attention] = backend_class("attention", name)
    return found


def waves() -> list[list[EngineRequest]]:
    """A few prompts and long decodes; prompts in several chunks beside decodes; one that is longer than all others."""

    def wave(*lengths: int, max_tokens: int) -> list[EngineRequest]:
        return [
            make_request(
                f"{n}-{i}", [(7 * n + 3 * j) % 256 for j in range(n)], max_tokens=max_tokens
            )
            for i, n in enumerate(lengths)
        ]

    return [
        wave(1, 2, 30, 5, max_tokens=4),
        wave(300, 3, 33, 64, 17, max_tokens=8),
        wave(900, 3, 64, max_tokens=4),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_cpu(tmp_path: Path, family: str) -> None:
    backend = attention_of(family)
    check_logits(released_shape(tmp_path / "model", family), torch.bfloat16, backend)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_equal_eager_forwards(tmp_path: Path, family: str, fp8: bool) -> None:
    """Decodes of all families, whole and in ubatches; experts in bfloat16, and in FP8 from a checkpoint in FP8."""
    attention = attention_of(family)
    if fp8 and family == "gpt_oss":
        pytest.skip("deepgemm_fp8 adds no biases")
    kernels = {"grouped_gemm": "deepgemm_fp8"} if fp8 else {}
    if fp8 and (reason := UNAVAILABLE.get("grouped_gemm.deepgemm_fp8")):
        pytest.skip(reason)
    take_gpu(0)
    config = rank_config(
        released_shape(tmp_path / "model", family, fp8=fp8),
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": 1024},
        scheduler={"max_num_seqs": 12, "max_num_batched_tokens": 96},
        cache={"num_blocks": 256},
        overlap={"mode": "on"},
        kernels=kernels,
    )
    compared = compare(config, waves())
    modes = {"DECODE", "MIXED"} if attention.captures_prompts(hopper=on_hopper()) else {"DECODE"}
    assert {mode for mode, _, _ in compared.kinds} == modes, compared.kinds
    if family == "gpt_oss":
        forms = {form for _, form, ubatch in compared.kinds if not ubatch}
        assert forms == {*BOTH, "MIXED"}, compared.kinds
    assert attention is not FlashInferMlaAttention or len(compared.kinds) == 2, compared.kinds
    assert not compared.wrong
