"""What transformers generates for prompts of all lengths, and the comparison of engines with it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, RankResult, make_request
from tests.family_cases import load_reference

NUM_PROMPTS, NEW_TOKENS = 48, 12
TIE = 1e-3  # closer best logits than this are a tie, told apart by rounding alone


@dataclass
class Reference:
    """What transformers generates: tokens, and the logits each one was chosen from."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray


def write_checkpoint(path: Path) -> Path:
    """A model small enough for a CPU, with all that makes a difference."""
    # 10 experts: they divide by neither 3 nor 4 ranks.
    make_checkpoint(path, num_layers=2, hidden_size=64, num_experts=10, head_dim=32, vocab_size=384)
    return path


def generate_references(
    checkpoint: Path, device: str = "cpu", count: int = NUM_PROMPTS
) -> list[Reference]:
    """Return transformers' greedy answers in float32 to prompts of 1 to 600 tokens, a third with a shared prefix."""
    model = load_reference(checkpoint).to(device)
    generator = np.random.default_rng(0)
    shared = generator.integers(0, 256, 300).tolist()
    lengths = [
        1,
        2,
        15,
        16,
        17,
        600,
        *generator.integers(1, 120, NUM_PROMPTS - 10),
        599,
        257,
        256,
        400,
    ]
    references = []
    for index, length in enumerate(lengths[:count]):
        own = generator.integers(0, 256, length).tolist()
        prompt = (shared + own)[:length] if index % 3 == 0 else own
        found = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, length, dtype=torch.long, device=device),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits = torch.cat(found.logits).float().cpu().numpy()
        references.append(Reference(prompt, found.sequences[0, length:].tolist(), logits))
    return references


def check(
    references: list[Reference], results: list[RankResult], count: int, tolerance: float = 1e-4
) -> None:
    """Equal tokens up to the first tie, logits within `tolerance` as long as the tokens agree."""
    tokens = {name: ids for result in results for name, ids in result.tokens.items()}
    logits = {name: rows for result in results for name, rows in result.logits.items()}
    reasons = {name: why for result in results for name, why in result.reasons.items()}
    assert reasons == {str(index): "length" for index in range(count)}
    ties = 0
    for index, reference in enumerate(references[:count]):
        best = np.sort(reference.logits, axis=-1)
        clear = best[:, -1] - best[:, -2] >= TIE
        upto = NEW_TOKENS if clear.all() else int(np.argmin(clear))
        ties += upto < NEW_TOKENS
        assert tokens[str(index)][:upto] == reference.tokens[:upto], f"prompt {index}"
        if logits:
            mine = np.stack(logits[str(index)])
            assert len(mine) == NEW_TOKENS
            seen = min(upto + 1, NEW_TOKENS)
            worst = np.abs(mine[:seen] - reference.logits[:seen]).max()
            assert worst < tolerance, f"prompt {index}: logits differ by {worst:.2e}"
    assert ties <= count // 4, f"{ties} of {count} references have ties: a useless reference"


def arrivals(references: list[Reference], count: int, num_ranks: int) -> list[Event]:
    return [
        Event(
            index % 5,
            index % num_ranks,
            make_request(str(index), ref.prompt, max_tokens=NEW_TOKENS),
        )
        for index, ref in enumerate(references[:count])
    ]
