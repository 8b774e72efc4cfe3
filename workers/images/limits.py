"""How many tokens of images a rank takes, computes and keeps, and in how many bytes. Arithmetic; needs no torch."""

from dataclasses import dataclass

from workers.config import CacheConfig, RankConfig, SchedulerConfig
from workers.specs.vision import VisionSpec

CACHE_TOKENS = 32_768  # 32 images of 1,024 x 1,024: 134 MB for Qwen3.6-35B-A3B
BATCH_TOKENS = 1024
"""Tokens of several images that the tower computes at once: one image of 1,024 x 1,024 fills a GPU, and further images
in the same call would delay the first one."""
_FLOAT32 = 4


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one rank, in tokens.

    image      of one image
    per_step   that the tower computes beside a step without prompts; None: by measured times, see `StepShare`
    cache      of images with outputs that are kept, and so of all images of one request
    """

    image: int
    per_step: int | None
    cache: int

    @classmethod
    def of(cls, config: RankConfig, spec: VisionSpec) -> "ImageLimits":
        """Return the limits of a resolved configuration."""
        length = int(config.model.max_model_len)
        return cls.within(length, config.scheduler, config.cache, spec)

    @classmethod
    def within(
        cls, length: int, scheduler: SchedulerConfig, cache: CacheConfig, spec: VisionSpec
    ) -> "ImageLimits":
        """Return the limits of sequences of at most `length` tokens."""
        image, tokens = scheduler.max_image_tokens, cache.image_tokens
        most = min(spec.largest, length) if image == "auto" else int(image)
        kept = max(most, min(CACHE_TOKENS, length)) if tokens == "auto" else int(tokens)
        beside = scheduler.image_tokens_per_step
        return cls(most, None if beside == "auto" else int(beside), kept)

    @property
    def batch(self) -> int:
        """Most tokens of several images that the tower computes at once; one image may have more."""
        return min(self.image, BATCH_TOKENS)

    def cache_bytes(self, spec: VisionSpec, value_bytes: int) -> int:
        """Return the bytes of all outputs that are kept."""
        return self.cache * spec.num_outputs * spec.output_size * value_bytes

    def forward_bytes(self, spec: VisionSpec, value_bytes: int) -> int:
        """Return about the bytes of the largest call of the tower beside its weights."""
        patches = self.image * spec.merged
        scaled = spec.patch_dim * (2 * _FLOAT32 + value_bytes)
        block = (8 * spec.hidden_size + 2 * spec.intermediate_size) * value_bytes
        return patches * max(scaled, block + spec.hidden_size * _FLOAT32)
