"""Checkpoints with one tensor for all experts of a layer, stored either way round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.routing.expert_map import ContiguousMap
from tests.checkpoints.writer import make_checkpoint
from tests.family_cases import SIZES, VARIANTS, family_checkpoint, load_reference
from tests.unit.model_case import OneRank, make_batch
from workers.models.decoder import DecoderLM
from workers.weights.loader import CheckpointError, load_weights

torch.set_num_threads(1)
FILE = "model.safetensors"
PROMPTS = make_batch([[1, 2, 3, 4], [200, 100]], [0, 0])
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def written(path: Path, family: str = "qwen3_moe", **options: Any) -> Path:
    return make_checkpoint(path, family=family, **SIZES | options)


@pytest.mark.parametrize("family", VARIANTS)
def test_the_layout_of_experts_changes_nothing(tmp_path: Path, family: str) -> None:
    """Also in several files, and as transformers saves a model without its conversion to the layout of releases."""
    expected = OneRank(written(tmp_path / "fused", family, expert_layout="fused")).logits(PROMPTS)
    transposed = written(tmp_path / "transposed", family, expert_layout="transposed", num_shards=3)
    assert len(list(transposed.glob("*.safetensors"))) == 3
    assert torch.equal(OneRank(transposed).logits(PROMPTS), expected)
    hub = family_checkpoint(tmp_path, family, "untied")
    own = tmp_path / "own"
    load_reference(hub).save_pretrained(own, save_original_format=False)
    assert any("experts.gate_up_proj" in name for name in load_file(own / FILE))
    for name in ("config.json", "tokenizer.json"):
        (own / name).write_bytes((hub / name).read_bytes())
    assert torch.equal(OneRank(own).logits(PROMPTS), OneRank(hub).logits(PROMPTS))


@pytest.mark.parametrize(("width", "square"), [(32, GATE_UP), (64, DOWN)])
@pytest.mark.parametrize("layout", ["fused", "transposed"])
def test_square_matrices_lie_as_the_others(
    tmp_path: Path, width: int, square: str, layout: str
) -> None:
    expected = OneRank(written(tmp_path / "apart", moe_intermediate_size=width)).logits(PROMPTS)
    path = written(tmp_path / "model", moe_intermediate_size=width, expert_layout=layout)
    assert load_file(path / FILE)[square].shape == (10, 64, 64)
    assert torch.equal(OneRank(path).logits(PROMPTS), expected)


@pytest.mark.parametrize("quantization", ["fp8", "fp8-tensor", "compressed-channel"])
@pytest.mark.parametrize("layout", ["fused", "transposed"])
@pytest.mark.parametrize("width", [64, 128])
def test_fused_tensors_in_fp8(tmp_path: Path, quantization: str, layout: str, width: int) -> None:
    options: dict[str, Any] = {"quantization": quantization, "moe_intermediate_size": width}
    options["hidden_size"] = 192
    expected = OneRank(written(tmp_path / "apart", **options)).logits(PROMPTS)
    path = written(tmp_path / "model", expert_layout=layout, **options)
    stored = load_file(path / FILE)
    assert stored[GATE_UP].dtype == torch.float8_e4m3fn and stored[GATE_UP].dim() == 3
    assert torch.equal(OneRank(path).logits(PROMPTS), expected)


def test_gate_and_up_may_share_a_block(tmp_path: Path) -> None:
    """128 rows of two narrow matrices have one row of scales."""
    path = written(tmp_path, fp8=True, expert_layout="fused", moe_intermediate_size=64)
    stored = load_file(path / FILE)
    scales = [name for name in stored if name.endswith("gate_up_proj_scale_inv")]
    for name in scales:
        assert stored[name].shape == (10, 2, 1)
        stored[name][:, 1] = stored[name][:, 0]
    save_file(stored, path / FILE)
    expected = OneRank(path).logits(PROMPTS)
    save_file(stored | {name: stored[name][:, :1].contiguous() for name in scales}, path / FILE)
    assert torch.equal(OneRank(path).logits(PROMPTS), expected)


@pytest.mark.parametrize("layout", ["fused", "transposed"])
def test_a_rank_reads_its_experts(tmp_path: Path, layout: str) -> None:
    path = written(tmp_path, expert_layout=layout)
    whole = OneRank(path)
    expert_map, config = ContiguousMap(10, 3), whole.config
    for rank in range(3):
        experts = expert_map.experts_of(rank)
        where: dict[str, Any] = {
            "expert_map": expert_map,
            "rank": rank,
            "device": torch.device("cpu"),
        }
        part = DecoderLM(config, whole.backends, dtype=torch.float32, **where)
        load_weights(part, path, config=config, **where)
        for mine, every in zip(part.layers, whole.model.layers, strict=True):
            rows = slice(experts.start, experts.stop)
            assert torch.equal(mine.mlp.w13_e2ID, every.mlp.w13_e2ID[rows])
            assert torch.equal(mine.mlp.w2_eDI, every.mlp.w2_eDI[rows])


def test_errors_name_the_tensor(tmp_path: Path) -> None:
    path = written(tmp_path, expert_layout="fused")
    stored = load_file(path / FILE)

    def fails(message: str, **changes: torch.Tensor | None) -> None:
        tensors = {
            **stored,
            **{{"gate_up": GATE_UP, "down": DOWN}.get(n, n): t for n, t in changes.items()},
        }
        save_file({n: t for n, t in tensors.items() if t is not None}, path / FILE)
        with pytest.raises(CheckpointError, match=message):
            OneRank(path)

    fails(
        r"gate_up_proj is \[10, 64, 60\]; expected \[10, 64, 64\]", gate_up=torch.zeros(10, 64, 60)
    )
    fails(
        r"down_proj is \[9, 64, 32\]; expected \[10, 64, 32\] or \[10, 32, 64\]",
        down=stored[DOWN][:9].clone(),
    )
    fails("some fused tensors are transposed", down=stored[DOWN].mT.contiguous())
    fails(r"10 missing: model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight", down=None)
    extra = "model.layers.1.mlp.experts.3.up_proj.weight"
    fails(f"holds both {GATE_UP} and {extra}", **{extra: torch.zeros(32, 64)})
    fails(
        "1 surplus: model.layers.9.mlp.experts.down_proj",
        **{"model.layers.9.mlp.experts.down_proj": stored[DOWN].clone()},
    )
