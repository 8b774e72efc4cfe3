"""Checkpoints in four bits: tokens and logits of their dequantised twins in transformers, whatever the ranks."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints.four_bit import FOUR_BITS
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config, run_engines
from tests.distributed.reference import arrivals, check, generate_references
from tests.distributed.test_families import CONDITIONS, EXCHANGES
from tests.family_cases import SIZES
from workers.models.registry import load_model_config
from workers.specs.model import weight_map
from workers.weights.unpack import unpack

FILE = "model.safetensors"
SHAPE = SIZES | {"moe_intermediate_size": 64, "num_layers": 2, "head_dim": 32}
TURNS = list(zip(FOUR_BITS, EXCHANGES * 2, list(CONDITIONS)[:3] * 3, strict=False))


def twin(path: Path) -> Path:
    """Write the same model in float32."""
    tensors, folder = load_file(path / FILE), path.with_name("twin")
    make_checkpoint(folder, **SHAPE)
    plain = {}
    for entry in weight_map(load_model_config(path)):
        found = [tensors[name] for name in entry.disk]
        form = entry.four_bit
        values = found[0].float() if form is None else unpack(form, found).dequantise()
        plain[entry.name] = values.contiguous()
    save_file(plain, folder / FILE, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("form", "exchange", "condition"), TURNS)
def test_tokens_equal_the_dequantised_twins(
    rank_pool, tmp_path: Path, form: str, exchange: tuple[int, str], condition: str
) -> None:
    ranks, all2all = exchange
    path = make_checkpoint(tmp_path / "packed", quantization=form, **SHAPE)
    references = generate_references(twin(path), count=6)
    kernels = {"all2all": all2all, "grouped_gemm": "native_four_bit"}
    config = rank_config(path, ranks, kernels=kernels, **CONDITIONS[condition].settings)
    busy = 2 if "overlap" in CONDITIONS[condition].settings else ranks
    events = arrivals(references, len(references), min(busy, ranks))
    check(references, run_engines(rank_pool, config, events, keep_logits=True), len(references))
