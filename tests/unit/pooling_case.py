"""Models that answer with vectors or scores: small checkpoints in the layouts of tools, and a scripted engine."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.unit.api_fakes import FakeBackend
from tests.unit.model_case import small_checkpoint
from workers.models.registry import FAMILIES
from workers.wire.request import NO_OUTPUT, PoolingParams, RequestOutput, SamplingParams

FILE = "model.safetensors"
QWEN = FAMILIES["qwen3_moe"].architecture.removesuffix("ForCausalLM")


def without_root(path: Path) -> Path:
    """The checkpoint with the names of tensors of a saved base model."""
    tensors = load_file(path / FILE)
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, path / FILE, metadata={"format": "pt"})
    return path


def base_checkpoint(path: Path, **changes: Any) -> Path:
    """A base model as `AutoModel.save_pretrained` writes it."""
    return without_root(small_checkpoint(path, architectures=[f"{QWEN}Model"], **changes))


def class_checkpoint(path: Path, num_labels: int, **changes: Any) -> Path:
    """A model with a classification head."""
    labels = {str(index): f"kind {index}" for index in range(num_labels)}
    changes = {"architectures": [f"{QWEN}ForSequenceClassification"], "id2label": labels, **changes}
    return small_checkpoint(path, **changes)


def add_modules(path: Path, pooling: dict[str, Any], *, normalizes: bool = True) -> Path:
    """The checkpoint with the files of sentence-transformers."""
    names = ["", "1_Pooling", *(["2_Normalize"] if normalizes else [])]
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": name,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (name, kind) in enumerate(zip(names, kinds, strict=False))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def pooled(states_TD: torch.Tensor, rows: str) -> torch.Tensor:
    """The pooled state of one prompt."""
    return {"last": states_TD[-1], "mean": states_TD.mean(0), "cls": states_TD[0]}[rows]


class PoolingBackend(FakeBackend):
    """Answers with a vector of the prompt: its length, its first and last token, 1; or its length as all logits."""

    error: str | None = None

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        assert params == NO_OUTPUT
        self.requests[request_id] = (prompt_token_ids, params)
        self.options[request_id] = options
        await asyncio.sleep(0)
        if self.error is not None:
            yield RequestOutput(request_id, [], "error", self.error)
            return
        pooling: PoolingParams = options["pooling"]
        ids = prompt_token_ids
        vector = np.array([len(ids), ids[0], ids[-1], 1], dtype=np.float32)
        if pooling.output == "classes":
            vector = vector[:3] / 100
        elif pooling.output == "tokens":
            vector = vector[:1] / 100
        if pooling.dimensions:
            vector = vector[: pooling.dimensions]
        if pooling.normalize:
            vector = vector / np.linalg.norm(vector)
        yield RequestOutput(request_id, [], "stop", vector=vector, num_cached_tokens=1)
