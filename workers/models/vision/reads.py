"""Reads of config.json and of the processor's config that families with a vision tower share. Need no torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.models.config_reader import ConfigReader, read_json
from workers.models.rope_config import is_number
from workers.models.vision.weights import ROOT
from workers.specs.model import GqaSpec, LayerSpec, ModelConfig
from workers.specs.vision import PixelScale, VisionSpec

TEXT = "text_config"
TIED = "tie_word_embeddings"
VISION = "vision_config"
PROCESSOR = "preprocessor_config.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"
NEW_PROCESSOR = "processor_config.json"
ROPES = ("rope_parameters", "rope_scaling")
OF_POSITIONS = ("mrope_section", "mrope_interleaved")
# fmt: off
OF_IMAGES = (
    "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "image_start_token_id",
    "image_end_token_id", "video_start_token_id", "video_end_token_id",
)
# fmt: on
HARMLESS = frozenset({"model_type", "initializer_range", "dtype", "torch_dtype"})
ROPE_THETA = 10_000.0
Floats = tuple[float, ...]


def text_part(raw: Mapping[str, Any], whole: str, *, ties: bool = False) -> dict[str, Any]:
    """Return config.json with the settings of the text part in the place of `text_config`.

    The settings of three positions stand beside the rotary embedding, which is read as that of a text model.

    whole   `model_type` of a model with a vision tower
    ties    `tie_word_embeddings` may stand in `text_config`, as transformers has it for the family
    """
    found = dict(raw)
    if raw.get("model_type") == whole and isinstance(raw.get(TEXT), Mapping):
        text = dict(raw[TEXT])
        tied = text.pop(TIED, None)
        found = {**text, **found}
        del found[TEXT]
        if ties and tied and not raw.get(TIED):
            found[TIED] = tied
        for key in ("dtype", "torch_dtype", "eos_token_id"):
            if raw.get(key) is None and text.get(key) is not None:
                found[key] = text[key]
    for key in ROPES:
        rope = found.get(key)
        if isinstance(rope, Mapping):
            found |= {name: rope[name] for name in OF_POSITIONS if name in rope}
            found[key] = {name: it for name, it in rope.items() if name not in OF_POSITIONS}
    return found


def with_sections(
    config: ModelConfig,
    read: ConfigReader,
    default: tuple[int, int, int],
    *,
    interleaved: bool,
) -> ModelConfig:
    """Return the config with attention, of its draft head too, that turns by three positions a token.

    default       pairs that turn by each position, if config.json has none
    interleaved   whether pairs of the family take turns, which config.json may repeat
    """
    found, attention = read.integers("mrope_section") or default, config.attention
    read.fixed("mrope_interleaved", interleaved, None)
    dim = 0 if attention is None else attention.rope_dim
    if attention is not None and (len(found) != 3 or 2 * sum(found) != dim):
        read.problems.append(
            f"mrope_section is {list(found)}; expected three numbers with the sum {dim // 2}, because {dim} values "
            "of a head turn in pairs"
        )

    def turned(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.attention, GqaSpec):
            return layer
        rope = replace(layer.attention.rope, sections=found, interleaved_sections=interleaved)
        return replace(layer, attention=replace(layer.attention, rope=rope))

    head = config.mtp
    if head is not None:
        head = replace(head, layers=tuple(map(turned, head.layers)))
    return replace(config, layers=tuple(map(turned, config.layers)), mtp=head)


def read_processor(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the image processor of a checkpoint folder, or {}.

    A folder may have both files: transformers 5 writes the new one beside the old one, and prefers it.
    """
    new = read_json(folder, NEW_PROCESSOR, required=False).get("image_processor")
    return new if isinstance(new, dict) else read_json(folder, PROCESSOR, required=False)


def per_channel(value: Any, channels: int) -> tuple[Any, ...]:
    """Return a processor's value of each channel: one that is no list stands for all."""
    return tuple(value) if isinstance(value, list | tuple) else (value,) * channels


def read_video_processor(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the video processor of a checkpoint folder, from the first file that has them, or {}."""
    new = read_json(folder, NEW_PROCESSOR, required=False).get("video_processor")
    if isinstance(new, dict):
        return new
    found: Mapping[str, Any] = read_json(folder, VIDEO_PROCESSOR, required=False)
    return found or read_json(folder, PROCESSOR, required=False)


class VisionReader:
    """Reads of `vision_config` and of the processor's config for one tower.

    read   of `vision_config`
    """

    def __init__(self, whole: ConfigReader, defaults: Mapping[str, Any]):
        found = whole.raw(VISION)
        raw = found if isinstance(found, dict) else {}
        self.read = ConfigReader(raw, defaults, {}, lambda _: iter(()))
        self.read.ignore(*HARMLESS)
        if not isinstance(found, dict):
            self.read.problems.append(f"is {found!r}; expected an object")
        self._processor, self._whole = whole.processor, whole

    def sizes(self, most_pixels: int) -> dict[str, Any]:
        """Return the fields of a VisionSpec that towers have in common.

        most_pixels   of an image, where the processor's config has no limit
        """
        read, rope = self.read, self.read.raw("rope_parameters") or {}
        theta = rope.get("rope_theta", ROPE_THETA) if isinstance(rope, Mapping) else rope
        if not is_number(theta) or theta <= 0:
            read.problems.append(f"rope_parameters is {rope!r}; expected a rope_theta > 0")
            theta = ROPE_THETA
        return {
            "depth": read.integer("depth"),
            "hidden_size": read.integer("hidden_size"),
            "intermediate_size": read.integer("intermediate_size"),
            "num_heads": read.integer("num_heads"),
            "channels": read.integer("in_channels"),
            "patch_size": read.integer("patch_size"),
            "temporal_patch_size": read.integer("temporal_patch_size"),
            "merge_size": read.integer("spatial_merge_size"),
            "output_size": read.integer("out_hidden_size"),
            "activation": read.activation(),
            "rope_theta": float(theta),
            "most_pixels": self._most_pixels(most_pixels),
        }

    def scale(self, mean: Floats, std: Floats) -> PixelScale:
        """Return the scale of pixels; mean and deviation are the family's where the processor's config has none."""
        given, channels = self._processor, self.read.integer("in_channels")
        factor = 1.0 if given.get("do_rescale") is False else given.get("rescale_factor", 1 / 255)
        mean, std = self._by_channel("image_mean", mean), self._by_channel("image_std", std)
        if given.get("do_normalize") is False:
            mean, std = (0.0,) * channels, (1.0,) * channels
        if not is_number(factor) or min(factor, *std) <= 0:
            self.read.problems.append(
                f"{PROCESSOR} has rescale_factor {factor!r} and image_std {list(std)}; expected numbers > 0"
            )
            factor = 1.0
        return PixelScale(factor=float(factor), mean=mean, std=std)

    def _by_channel(self, key: str, default: Floats) -> Floats:
        """Return a number for each channel from the processor's config."""
        found, channels = self._processor.get(key), self.read.integer("in_channels")
        values = default if found is None else per_channel(found, channels)
        if not all(map(is_number, values)):
            self.read.problems.append(f"{PROCESSOR} has {key} {found!r}; expected numbers")
        elif len(values) != channels:
            self.read.problems.append(
                f"in_channels is {channels}, but {PROCESSOR} has {len(values)} values of {key}"
            )
        else:
            return tuple(map(float, values))
        return (1.0,) * channels

    def _most_pixels(self, default: int) -> int:
        """Return the most pixels of an image behind the processor, in either spelling of its limit."""
        size, found = self._processor.get("size"), self._processor.get("max_pixels")
        if found is None and isinstance(size, Mapping):
            found = size.get("longest_edge")
        return found if isinstance(found, int) and found > 0 else default

    def finish(self, config: ModelConfig, spec: VisionSpec) -> ModelConfig:
        """Return the config with its tower; complaints go to those of the whole config.json."""
        read = self.read
        read.refuse_unread()
        if spec.hidden_size % spec.num_heads or spec.head_dim % 4:
            read.problems.append(
                f"hidden_size is {spec.hidden_size} with num_heads {spec.num_heads}; expected heads with a multiple "
                "of 4 values, which turn in pairs by row and by column"
            )
        if spec.output_size != config.hidden_size:
            read.problems.append(
                f"out_hidden_size is {spec.output_size}; expected hidden_size of the text part ({config.hidden_size})"
            )
        self._whole.problems += [f"{VISION}.{problem}" for problem in read.problems]
        return replace(config, vision=spec)


def without_vision(config: ModelConfig) -> ModelConfig:
    """Return the config of the text part alone; tensors of a tower are not read."""
    parts = () if config.vision is None else ("the vision tower",)
    return replace(config, vision=None, skipped=(*config.skipped, ROOT), skipped_parts=parts)
