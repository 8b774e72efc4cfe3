"""The whole model on a GPU, fused kernels and all, gives the logits of the CPU's float32."""

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.base import Attention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.backends.select import probe
from kernels.routing.forced_routing import ForcedRouting
from tests.closeness import calc_diff
from tests.family_cases import CASES, family_checkpoint
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.models.registry import load_model_config
from workers.step.forward_batch import ForwardBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
NUM_SEQS = 4
# With given experts: a rounded router logit may choose others, which changes a row by up to 0.3. On a CPU 5e-4.
FLOAT32, BFLOAT16 = 1e-9, 2e-3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("cuda") / "model", head_dim=128)


def batches() -> list[ForwardBatch]:
    """Prompts, then decodes beside a continued prompt, then decodes; padded."""
    ids = torch.randint(0, 300, (NUM_SEQS, 40), generator=torch.Generator().manual_seed(2)).tolist()
    lens = [9, 17, 1, 30]
    prompts = sorted(range(NUM_SEQS), key=lambda seq: lens[seq] != 1)
    assert prompts[0] == 2, "single tokens come first, and sequences keep their rows"
    ids, lens = [ids[seq] for seq in prompts], [lens[seq] for seq in prompts]
    steps = [lens, [1, 1, 1, 5], [1, 1, 1, 1]]
    done, found = [0] * NUM_SEQS, []
    for new in steps:
        parts = [row[at : at + n] for row, at, n in zip(ids, done, new, strict=True)]
        found.append(make_batch(parts, list(done), padding=2))
        done = [at + n for at, n in zip(done, new, strict=True)]
    return found


def on_gpu(batch: ForwardBatch) -> ForwardBatch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved = {name: t.cuda() for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return replace(batch, **moved)


def given_experts(path: Path, device: str) -> dict[str, Any]:
    """Return the option of OneRank that gives each row the same experts on every device."""
    config = load_model_config(path)
    law = {"num_experts": config.num_experts, "top_k": config.top_k, "rank": 0, "num_ranks": 1}
    return {"forced_routing": partial(ForcedRouting, "uniform", 1.0, device=device, **law)}


def check_logits(path: Path, dtype: torch.dtype, backend: type[Attention] | None = None) -> None:
    """Compare logits on a GPU with the CPU's in float32; a bfloat16 model gets the experts that the CPU's gets."""
    given = dtype != torch.float32
    here, there = (given_experts(path, device) if given else {} for device in ("cpu", "cuda"))
    reference = OneRank(path, **here)
    model = OneRank(path, dtype, device="cuda", backend=backend, **there)
    for batch in batches():
        expected = reference.logits(batch)
        found = model.logits(on_gpu(batch)).cpu()
        assert found.isfinite().all()
        assert calc_diff(found, expected) < (BFLOAT16 if given else FLOAT32)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        (torch.float32, SdpaAttention),
        (torch.bfloat16, SdpaAttention),
        pytest.param(
            torch.bfloat16,
            FlashInferAttention,
            marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
        ),
    ],
)
def test_logits_equal_the_cpu(checkpoint: Path, dtype: torch.dtype, backend: type[Attention]):
    check_logits(checkpoint, dtype, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_family_equals_the_cpu(tmp_path: Path, family: str, variant: str, dtype: torch.dtype):
    """Norms over all heads, clipping, attention without norms and shared experts run fused kernels of their own."""
    check_logits(family_checkpoint(tmp_path, family, variant), dtype)
