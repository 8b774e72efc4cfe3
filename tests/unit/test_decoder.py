"""The forward of all families starts from ids or embeddings, and gives hidden states of chosen layers."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeForCausalLM as Reference

from tests.unit.model_case import OneRank, make_batch, small_checkpoint

torch.set_num_threads(1)
SEQUENCES = [[5, 17, 250, 3], [9, 9, 41]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("decoder") / "model")


@pytest.fixture
def rank(path):
    return OneRank(path)


@torch.inference_mode()
def forward(rank, *args):
    batch = make_batch(SEQUENCES, [0, 0])
    rank.attention.plan(batch)
    return rank.model.forward(batch, *args)


def test_hidden_states_of_chosen_layers_are_those_of_transformers(path, rank):
    found = {0: torch.empty(0), 1: torch.empty(0)}
    whole = forward(rank)
    torch.testing.assert_close(forward(rank, found), whole)
    model = Reference.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = [
            model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in SEQUENCES
        ]
    for layer, hidden_TD in found.items():
        of_layer = torch.cat([states[layer + 1][0] for states in wanted])
        torch.testing.assert_close(hidden_TD, of_layer, atol=1e-5, rtol=1e-4)


def test_embeddings_of_images_take_the_place_of_ids(rank):
    """And the first layers add what is theirs; a mask and embeddings beside it change nothing."""
    batch = make_batch(SEQUENCES, [0, 0])
    embedded_TD, mask_T = rank.model.embed(batch.input_ids), torch.zeros(7, dtype=torch.int64)
    outputs_TXD = torch.stack((embedded_TD, torch.zeros_like(embedded_TD)), 1)
    whole = rank.logits(batch)

    def logits() -> torch.Tensor:
        return rank.logits(replace(batch, image_mask=mask_T, image_embeds=outputs_TXD))

    mask_T[2] = 1
    torch.testing.assert_close(logits(), whole, atol=0, rtol=0)
    outputs_TXD[5, 0] = 0  # not masked
    torch.testing.assert_close(logits(), whole, atol=0, rtol=0)
    outputs_TXD[2, 0] = 0
    changed = ((logits() - whole).abs() > 1e-4).any(dim=1)
    assert changed.tolist() == [False, False, True, True, False, False, False]
    mask_T[2], outputs_TXD[1, 1] = 0, 1
    changed = ((logits() - whole).abs() > 1e-4).any(dim=1)
    assert changed.tolist() == [False, True, True, True, False, False, False]
