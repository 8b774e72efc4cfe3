"""The whole model on a GPU, fused kernels and all, gives the logits of the CPU's float32."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from kernels.attention.base import Attention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.backends.select import probe
from tests.closeness import calc_diff
from tests.family_cases import CASES, family_checkpoint
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.runner.forward_batch import ForwardBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
NUM_SEQS = 4
# A rounded router logit may choose another expert: 0.0084 on a CPU, 0.0046 on an H200. float32 bounds all else.
BFLOAT16 = 2e-2


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


@pytest.mark.parametrize(
    ("dtype", "backend", "tolerance"),
    [
        (torch.float32, SdpaAttention, 1e-9),
        (torch.bfloat16, SdpaAttention, BFLOAT16),
        pytest.param(
            torch.bfloat16,
            FlashInferAttention,
            BFLOAT16,
            marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
        ),
    ],
)
def test_logits_equal_the_cpu(
    checkpoint: Path, dtype: torch.dtype, backend: type[Attention], tolerance: float
):
    reference = OneRank(checkpoint)
    model = OneRank(checkpoint, dtype, device="cuda", backend=backend)
    for batch in batches():
        expected = reference.logits(batch)
        found = model.logits(on_gpu(batch)).cpu()
        assert found.isfinite().all()
        assert calc_diff(found, expected) < tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-9), (torch.bfloat16, BFLOAT16)], ids=str
)
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_family_equals_the_cpu(
    tmp_path: Path, family: str, variant: str, dtype: torch.dtype, tolerance: float
):
    """Norms over all heads, clipping, attention without norms and shared experts run fused kernels of their own."""
    checkpoint = family_checkpoint(tmp_path, family, variant)
    reference, model = OneRank(checkpoint), OneRank(checkpoint, dtype, device="cuda")
    for batch in batches():
        expected = reference.logits(batch)
        found = model.logits(on_gpu(batch)).cpu()
        assert found.isfinite().all()
        assert calc_diff(found, expected) < tolerance
