"""A draft model beside its target on one rank, and its logits of several depths."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.attention.mla import MlaAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.interface.attention_spec import AttentionSpec
from kernels.routing.expert_map import ContiguousMap
from tests.unit.model_case import BLOCK_SIZE, BLOCKS_PER_SEQ, MAX_SEQS, OneRank, make_batch
from workers.kv_cache.caches import allocate_kv_caches
from workers.models.eagle3.config import load_eagle3_config
from workers.models.eagle3.head import Eagle3Head
from workers.models.mtp.head import MtpHead
from workers.specs.model import ModelConfig
from workers.weights.files import read_headers
from workers.weights.loader import load_weights


class OneRankDraft:
    """The head of a checkpoint, or a draft model of another folder; it has an attention with caches of its own."""

    def __init__(self, path: Path, draft: Path | None = None, **target: Any):
        """target: options of OneRank."""
        self.target = OneRank(path, **target)
        model = self.target.config
        eagle = draft and load_eagle3_config(draft, model, read_headers(draft).keys())
        config = model.mtp if eagle is None else eagle.model
        assert config is not None
        self.attention = self._attention(config)
        backends = replace(self.target.backends, attention=self.attention, linear_attention=None)
        expert_map = ContiguousMap(model.num_experts, 1)
        place: dict[str, Any] = {"expert_map": expert_map, "rank": 0, "device": "cpu"}
        head: MtpHead | Eagle3Head
        if eagle is None:
            head = MtpHead(self.target.model, config, backends, dtype=torch.float32, **place)
        else:
            head = Eagle3Head(self.target.model, eagle, backends, dtype=torch.float32, **place)
        self.head = head
        place["device"] = torch.device("cpu")
        load_weights(head, draft or path, config=config, **place)
        head.filled()

    def _attention(self, config: ModelConfig) -> Any:
        specs: tuple[AttentionSpec, ...] = config.attention_specs
        kind = MlaAttention if specs[0].mla is not None else SdpaAttention
        attention = kind(specs, BLOCK_SIZE)
        blocks = MAX_SEQS * BLOCKS_PER_SEQ, BLOCK_SIZE
        caches = allocate_kv_caches(
            kind.kv_groups(specs), *blocks, torch.float32, torch.device("cpu")
        )
        attention.bind(caches)
        return attention

    @torch.inference_mode()
    def logits(
        self, prompts: list[list[int]], next_tokens: list[int], depth: int, chunk: int = 64
    ) -> list[torch.Tensor]:
        """Return the logits [B, V] of each depth. Prompts are computed in chunks, single tokens first."""
        states_BD = torch.empty(0)
        longest = max(map(len, prompts))
        for start in range(0, longest, chunk):
            parts = [prompt[start : start + chunk] for prompt in prompts]
            follow = [
                [*prompt, token][start + 1 : start + 1 + chunk]
                for prompt, token in zip(prompts, next_tokens, strict=True)
            ]
            states_BD = self._first(parts, follow, start)
        head, found = self.head, []
        lens = [len(prompt) for prompt in prompts]
        for k in range(depth):
            found.append(head.compute_logits(states_BD))
            tokens = head.draft(states_BD).tolist()
            batch = make_batch([[token] for token in tokens], [n + k for n in lens])
            self.attention.plan(batch)
            states_BD = head.forward(batch, states_BD)
        return found

    def drafts(self, prompt: list[int], next_token: int, depth: int) -> list[int]:
        """Return the likeliest token of each depth, as the target numbers tokens."""
        offsets = getattr(self.head, "token_offset_d", None)
        found = [int(logits[0].argmax()) for logits in self.logits([prompt], [next_token], depth)]
        return found if offsets is None else [it + int(offsets[it]) for it in found]

    def _first(self, parts: list[list[int]], follow: list[list[int]], start: int) -> torch.Tensor:
        """Run target and head over the parts of all prompts; return the states behind the last rows."""
        batch, model = make_batch(parts, [start] * len(parts)), self.target.model
        self.target.attention.plan(batch)
        if self.target.backends.linear_attention is not None:
            self.target.backends.linear_attention.plan(batch)
        after = dict.fromkeys(self.head.aux_layers, torch.empty(0))
        hidden_TD = model.forward(batch, hidden_after=after)
        states_TD = self.head.read_target(hidden_TD, after)
        ids = torch.tensor([token for tokens in follow for token in tokens])
        self.attention.plan(batch)
        out_TD = self.head.forward(replace(batch, input_ids=ids), states_TD)
        return out_TD[batch.logits_indices]
