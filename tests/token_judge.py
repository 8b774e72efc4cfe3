"""Judges the tokens of engines that compute in 16 or 8 bits by the logits of a float32 reference.

The reference reads prompt and answer (teacher-forced), so an early tie does not change the judgement of later tokens.
A logit's distance counts in standard deviations of its row: of random rows, 99 % of wrong tokens lie more than 1 below
the best.

Where routers are undecided, rounding changes the chosen experts, and with them the logits by up to 1.5. Checkpoints for
these tests choose half of their experts and have `steep_routers`: an expert that rounding lets in or out then has
almost no weight. With 8 of 16 experts and 5,200 tokens in bfloat16 the worst deficit was 0.15, the mean 0.0007.

L tokens of an answer, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from workers.sampling.logits_processors import LogitsProcessors
from workers.sampling.token_sampling import SamplingBatch, filter_weights
from workers.wire.request import EngineRequest, SamplingParams

Reference = Callable[[list[int]], torch.Tensor]  # token ids to float32 [T, V] on the CPU
ROUTER_FACTOR = 2.0
# Probability by which rounding may move a token's borders in the cumulative distribution; a filter that keeps one more
# token moved them by 0.08.
CDF_MARGIN = 0.12


def steep_routers(checkpoint: Path) -> Path:
    """Multiply all routers of a checkpoint folder by ROUTER_FACTOR, in place; return the folder."""
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("mlp.gate.weight"):
                tensors[name] = tensor * ROUTER_FACTOR
        save_file(tensors, path, metadata={"format": "pt"})
    return checkpoint


def transformers_reference(checkpoint: Path, device: str = "cpu") -> Reference:
    """Return the logits of transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().to(device)

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([token_ids], device=device)).logits
        return found[0].float().cpu()

    return logits


def deficits(logits_LV: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    """Return how far below the best logit each token's logit lies, in standard deviations of its row: float32 [L]."""
    chosen_L = logits_LV.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    return (logits_LV.amax(1) - chosen_L) / logits_LV.std(1)


@dataclass
class TokenJudge:
    """Collects the deficits of greedy answers, and fails for a token that the reference would not choose.

    margin   bound on the deficit of each token
    mean     bound on the mean deficit of all greedy tokens; see `close`
    """

    reference: Reference
    margin: float
    mean: float
    found: list[torch.Tensor] = field(default_factory=list)

    def greedy(self, prompt: list[int], token_ids: list[int], name: str = "") -> None:
        """Fail if a token lies more than `margin` below the best one of the reference."""
        found = deficits(self._logits(prompt, token_ids), token_ids)
        self.found.append(found)
        worst = int(found.argmax())
        assert found[worst] <= self.margin, (
            f"{name}: token {worst} of {len(token_ids)} is {token_ids[worst]}, {found[worst]:.3f} standard deviations "
            f"below the best; {self.margin} is the margin"
        )

    def drawn(self, request: EngineRequest, token_ids: list[int]) -> None:
        """Fail for a token that the request's parameters do not draw from the reference's logits, or nearly so.

        Penalties, bans, filters and the request's random numbers are those of the engine, on the CPU. A filter and
        a greedy choice see the token's logit raised by `margin`; a random number may be CDF_MARGIN off its interval.
        """
        prompt, params = request.prompt_token_ids, request.params
        logits_LV = self._logits(prompt, token_ids)
        raised_L = self.margin * logits_LV.std(1)
        processors = LogitsProcessors(1, logits_LV.shape[1], torch.device("cpu"))
        processors.set(0, params, prompt, [])
        known, slot = np.array([prompt + token_ids], dtype=np.int32), np.array([0])
        for index, token in enumerate(token_ids):
            row_1V, position = logits_LV[index : index + 1].clone(), np.array([len(prompt) + index])
            found = processors.batch(slot)
            if found is not None:
                processors.apply(row_1V, found, position, known)
                processors.count_tokens(torch.tensor([token]), found)
            drawn = _is_drawn(row_1V, token, float(raised_L[index]), params, position)
            assert drawn, (
                f"{request.request_id}: token {index} is {token}, the reference draws another"
            )

    def close(self, at_least: int = 1) -> None:
        """Fail if the mean deficit exceeds `mean`, or if fewer than `at_least` greedy tokens were judged."""
        found = torch.cat(self.found)
        assert len(found) >= at_least, f"{len(found)} tokens were judged"
        assert found.mean() <= self.mean, f"mean deficit {found.mean():.4f}, bound {self.mean}"

    def _logits(self, prompt: list[int], token_ids: list[int]) -> torch.Tensor:
        """float32 [L, V], the logits that each token was chosen from."""
        return self.reference(prompt + token_ids)[len(prompt) - 1 : -1]


def _is_drawn(
    row_1V: torch.Tensor, token: int, raised: float, params: SamplingParams, position: np.ndarray
) -> bool:
    batch = SamplingBatch.from_rows([params], position)
    raised_1V = row_1V.index_add(1, torch.tensor([token]), torch.tensor([[raised]]))
    if batch.values is None:
        return int(raised_1V.argmax()) == token
    values, filters = torch.from_numpy(batch.values), batch.filters
    weights_1V = ((row_1V - row_1V.amax()) / params.temperature).exp()
    if filters is not None:
        kept_1V = filter_weights(weights_1V, values, filters) > 0
        near_1V = ((raised_1V - raised_1V.amax()) / params.temperature).exp()
        kept_1V[0, token] |= filter_weights(near_1V, values, filters)[0, token] > 0
        weights_1V = weights_1V * kept_1V
    cumulative_V = weights_1V[0].double().cumsum(0) / weights_1V.double().sum()
    low = float(cumulative_V[token - 1]) if token else 0.0
    uniform = float(values[0, -1])
    possible = bool(weights_1V[0, token] > 0)
    return possible and low - CDF_MARGIN <= uniform <= float(cumulative_V[token]) + CDF_MARGIN
