"""How many tokens of images a rank takes, computes and keeps, and in how many bytes. Arithmetic; needs no torch."""

from dataclasses import dataclass

from workers.config import RankConfig
from workers.specs.vision import VisionSpec

CACHE_TOKENS = 32_768  # 32 images of 1,024 x 1,024: 134 MB for Qwen3.6-35B-A3B
BATCH_TOKENS = 1024
"""Tokens that the tower computes at once, unless one image has more: one image of 1,024 x 1,024 fills a GPU, and
further images in the same call would delay the first one."""
_FLOAT32 = 4


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one rank, in tokens.

    image      of one image
    per_step   that the tower computes beside a step without prompts
    cache      of images with outputs that are kept, and so of all images of one request
    """

    image: int
    per_step: int
    cache: int

    @classmethod
    def of(cls, config: RankConfig, spec: VisionSpec) -> "ImageLimits":
        """Return the limits of a resolved configuration."""
        image, cache = config.scheduler.max_image_tokens, config.cache.image_tokens
        length = int(config.model.max_model_len)
        most = min(spec.largest, length) if image == "auto" else int(image)
        kept = max(most, min(CACHE_TOKENS, length)) if cache == "auto" else int(cache)
        return cls(most, config.scheduler.image_tokens_per_step, kept)

    @property
    def batch(self) -> int:
        """Most tokens that the tower computes at once."""
        return max(self.image, min(BATCH_TOKENS, self.cache))

    def cache_bytes(self, spec: VisionSpec, value_bytes: int) -> int:
        """Return the bytes of all outputs that are kept."""
        return self.cache * spec.num_outputs * spec.output_size * value_bytes

    def forward_bytes(self, spec: VisionSpec, value_bytes: int) -> int:
        """Return about the bytes of the largest call of the tower beside its weights."""
        patches = self.batch * spec.merged
        scaled = spec.patch_dim * (2 * _FLOAT32 + value_bytes)
        block = (8 * spec.hidden_size + 2 * spec.intermediate_size) * value_bytes
        return patches * max(scaled, block + spec.hidden_size * _FLOAT32)
