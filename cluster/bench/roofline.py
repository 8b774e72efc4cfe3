"""The fastest that a load could run on given GPUs: bytes, FLOPs and link bytes over what the hardware does. Pure.

Everything that can overlap does, routing is even, and nothing else costs time: no server reaches it. R ranks, each with
its share of the requests and of the experts, and a copy of everything else.
"""

from dataclasses import dataclass
from math import comb

from kernels.placement import ExpertPlacement
from workers.models.config import Qwen3MoeConfig
from workers.models.tensors import DTYPE_BYTES, kv_block_bytes, rank_weight_bytes


@dataclass(frozen=True)
class Hardware:
    """What one GPU does in practice, per second. Defaults: an H200 in bfloat16 among others on NVLink."""

    memory_bytes: float = 4.0e12
    flops: float = 750e12
    link_bytes: float = 380e9


@dataclass(frozen=True)
class Part:
    """Seconds of one rank in some part of the work, by what they are spent on; the longest is the floor."""

    memory_s: float
    compute_s: float
    link_s: float

    @property
    def floor_s(self) -> float:
        """All three at once."""
        return max(self.memory_s, self.compute_s, self.link_s)


@dataclass(frozen=True)
class Floor:
    """The floor of one load: its prompts, one step of its decodes at mean length, and the rates that follow."""

    prefill: Part
    decode_step: Part
    output_tokens_per_s: float
    total_tokens_per_s: float


def floor_of(
    model: Qwen3MoeConfig,
    num_ranks: int,
    *,
    in_flight: int,
    input_len: int,
    output_len: int,
    max_num_batched_tokens: int = 8192,
    hardware: Hardware | None = None,
) -> Floor:
    """All requests in flight are prefilled, then decoded together to their end.

    in_flight counts requests on all ranks; lengths are tokens; a prefill step has max_num_batched_tokens of a rank.
    """
    hardware = hardware or Hardware()
    work = _Work(model, num_ranks, hardware)
    seqs = in_flight / num_ranks
    prompt_tokens = seqs * input_len
    prefill = work.part(
        tokens=prompt_tokens,
        context=input_len / 2,
        steps=max(1.0, prompt_tokens / max_num_batched_tokens),
        kv_reads=0.0,
    )
    context = input_len + output_len / 2
    decode = work.part(tokens=seqs, context=context, steps=1.0, kv_reads=seqs * context)
    seconds = prefill.floor_s + (output_len - 1) * decode.floor_s  # a prefill gives the first token
    return Floor(
        prefill,
        decode,
        output_tokens_per_s=in_flight * output_len / seconds,
        total_tokens_per_s=in_flight * (input_len + output_len) / seconds,
    )


class _Work:
    """What one rank does for so many tokens."""

    def __init__(self, model: Qwen3MoeConfig, num_ranks: int, hardware: Hardware):
        self._model, self._ranks, self._hardware = model, num_ranks, hardware
        self._width = DTYPE_BYTES[model.dtype]
        self._placement = ExpertPlacement(model.num_experts, num_ranks)

    def part(self, *, tokens: float, context: float, steps: float, kv_reads: float) -> Part:
        """`tokens` of one rank, each attending to `context` others, in `steps`; kv_reads tokens' K and V are read."""
        kv_bytes = kv_reads * kv_block_bytes(self._model, 1, self._model.dtype)
        memory = steps * self._weight_bytes(tokens / steps) + kv_bytes
        return Part(
            memory / self._hardware.memory_bytes,
            tokens * self._flops(context) / self._hardware.flops,
            tokens * self._link_bytes() / self._hardware.link_bytes,
        )

    def _weight_bytes(self, tokens: float) -> float:
        """Read in one step of `tokens` a rank: all weights but the embedding, and experts that nobody chose."""
        model = self._model
        all_bytes = rank_weight_bytes(model, self._placement, 0, model.dtype)
        local = len(self._placement.local_experts(0))
        expert_bytes = 3 * model.hidden_size * model.moe_intermediate_size * self._width
        missed = (1 - model.num_experts_per_tok / model.num_experts) ** (tokens * self._ranks)
        untouched = model.num_hidden_layers * local * expert_bytes * missed
        return all_bytes - model.vocab_size * model.hidden_size * self._width - untouched

    def _flops(self, context: float) -> float:
        """Of one token, without the embedding and the logits, which only sampled tokens need."""
        model = self._model
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        projections = model.hidden_size * model.head_dim * (2 * heads + 2 * kv_heads)
        experts = model.num_experts_per_tok * 3 * model.hidden_size * model.moe_intermediate_size
        router = model.hidden_size * model.num_experts
        attention = 2 * heads * model.head_dim * context
        return 2.0 * model.num_hidden_layers * (projections + experts + router + attention)

    def _link_bytes(self) -> float:
        """Out of a rank for one token: its row once to each other rank with one of its experts, and once back."""
        model = self._model
        local = model.num_experts // self._ranks
        others = comb(model.num_experts - local, model.num_experts_per_tok)
        missed = others / comb(model.num_experts, model.num_experts_per_tok)
        remote_ranks = (self._ranks - 1) * (1 - missed)
        return 2 * model.num_hidden_layers * remote_ranks * model.hidden_size * self._width
