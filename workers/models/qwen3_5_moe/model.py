"""The text part of Qwen3.5-MoE and Qwen3.6-MoE, which computes as Qwen3-Next does."""

from workers.models.qwen3_next.model import Qwen3NextForCausalLM


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    """A checkpoint of the text part alone."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """A checkpoint with a vision tower, which is not loaded."""
