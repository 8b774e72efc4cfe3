"""Logits equal transformers' for every field of the config that changes the mathematics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM as Reference

from tests.unit.model_case import OneRank, make_batch, small_checkpoint

torch.set_num_threads(1)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "head_dim": {"head_dim": 48},
    "attention_bias": {"attention_bias": True},
    "weights not renormalised": {"norm_topk_prob": False},
    "dense layers by list": {"mlp_only_layers": [0, 2]},
    "dense layers by step": {"decoder_sparse_step": 2},
    "dense layers by both": {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_kv_heads": 1},
    "eps": {"rms_norm_eps": 0.1},
    "rope_theta": {"rope_theta": 100.0},
    "rope new form": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "rope linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope yarn": {"rope_parameters": {**YARN, "rope_theta": 1e4}},
    "rope yarn, all keys": {
        "rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "truncate": False}
    },
    "rope yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.5}},
    "rope llama3": {"rope_scaling": LLAMA3},
    "many files": {"num_shards": 3},
}


def reference_logits(path: Path, sequences: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """float32 [all tokens, V] of transformers, one sequence at a time."""
    model = Reference.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        rows = [model(torch.tensor([ids])).logits[0].float() for ids in sequences]
    return torch.cat(rows)


def random_ids(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(300, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("case", CASES)
def test_prefill_equals_transformers(tmp_path: Path, case: str) -> None:
    path = small_checkpoint(tmp_path, **CASES[case])
    sequences = random_ids(1, 1, 2, 23, 40)
    logits = OneRank(path).logits(make_batch(sequences, [0] * 4))
    expected = reference_logits(path, sequences, torch.float32)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"plain", "many files", "head_dim"}))
def test_every_case_changes_the_logits(tmp_path: Path, case: str) -> None:
    """Guards the cases above: a field that both sides ignored would pass them."""
    sequences = random_ids(1, 40)
    rows = []
    for name, changes in (("plain", {}), ("changed", CASES[case])):
        rank = OneRank(small_checkpoint(tmp_path / name, **changes))
        rows.append(rank.logits(make_batch(sequences, [0])))
    assert (rows[0] - rows[1]).abs().max() > 1e-2


@pytest.mark.parametrize("padding", [0, 3])
def test_decode_with_cached_context(tmp_path: Path, padding: int) -> None:
    path = small_checkpoint(tmp_path)
    sequences = random_ids(2, 12, 30, 5)
    expected = reference_logits(path, sequences, torch.float32).split([12, 30, 5])
    rank = OneRank(path)
    first = [11, 13, 3]  # one decode, one long and one short chunk follow
    begun = [ids[:n] for ids, n in zip(sequences, first, strict=True)]
    got = rank.logits(make_batch(begun, [0, 0, 0], padding)).split(first)
    rest = [ids[n:] for ids, n in zip(sequences, first, strict=True)]
    more = rank.logits(make_batch(rest, first, padding)).split([len(ids) for ids in rest])
    for start, end, want in zip(got, more, expected, strict=True):
        torch.testing.assert_close(torch.cat((start, end)), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_half_precision_is_close(tmp_path: Path, dtype: torch.dtype, norm_topk_prob: bool) -> None:
    name = str(dtype).removeprefix("torch.")
    path = small_checkpoint(
        tmp_path, dtype=name, norm_topk_prob=norm_topk_prob, attention_bias=True
    )
    sequences = random_ids(3, 9, 31)
    logits = OneRank(path, dtype).logits(make_batch(sequences, [0, 0]))
    expected = reference_logits(path, sequences, torch.float32)
    theirs = reference_logits(path, sequences, dtype)
    # Rounding moves both away from float32, and now and then a token to another expert, which
    # changes its whole row: so compare typical rows. Ours must not be further off than theirs.
    error, their_error = (
        (rows - expected).norm(dim=1).median() / expected.norm(dim=1).median()
        for rows in (logits, theirs)
    )
    assert error < 1.3 * their_error
    assert error < (0.04 if dtype == torch.bfloat16 else 0.004)


def test_no_tokens_and_only_padding(tmp_path: Path) -> None:
    """An idle rank runs the same forward; its experts must not see padding rows."""
    rank = OneRank(small_checkpoint(tmp_path))
    assert rank.logits(make_batch([], [])).shape == (0, 300)
    seen: list[torch.Tensor] = []
    all2all = rank.model.layers[0][1].all2all
    dispatch = all2all.dispatch

    def spy(x_TD: torch.Tensor, idx_TK: torch.Tensor, weights_TK: torch.Tensor) -> Any:
        seen.append(idx_TK.clone())
        return dispatch(x_TD, idx_TK, weights_TK)

    all2all.dispatch = spy
    assert rank.logits(make_batch([], [], padding=4)).shape == (0, 300)
    rank.logits(make_batch([[5], [6, 7]], [0, 0], padding=2))
    assert len(seen) == 6
    assert all((idx == -1).all() for idx in seen[:3])
    assert all((idx[3:] == -1).all() and (idx[:3] >= 0).all() for idx in seen[3:])


def test_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    rank = OneRank(small_checkpoint(tmp_path))
    sequences = random_ids(4, 7, 20)
    together = rank.logits(make_batch(sequences, [0, 0]))
    alone = torch.cat([rank.logits(make_batch([ids], [0])) for ids in sequences])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)
