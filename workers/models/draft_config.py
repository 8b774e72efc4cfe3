"""Which draft model a configuration wants for a model: the head of its checkpoint, or EAGLE-3. Needs no torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kernels.interface.kv_layout import KVGroup, group_layers, layout_of
from workers.config import CacheConfig, ModelSection
from workers.models.config_reader import ModelConfigError
from workers.models.eagle3.config import load_eagle3_config
from workers.models.eagle3.spec import Eagle3Config
from workers.specs.model import ModelConfig, weight_map
from workers.specs.weight_map import mapped_name
from workers.speculation_config import SpeculationConfig
from workers.weights.checkpoint_files import ROOT, has_scales, tensor_names


@dataclass(frozen=True)
class DraftConfig:
    """layers: the draft model as a model of one layer; eagle: None for the head of the model's checkpoint."""

    layers: ModelConfig
    eagle: Eagle3Config | None = None

    def kv_groups(self, cache: CacheConfig) -> tuple[KVGroup, ...]:
        """Return the caches of its layers, in the layout of most backends."""
        return group_layers(map(layout_of, cache.cached(self.layers.attention_specs)))


def auto_method(model: ModelConfig, section: ModelSection) -> Literal["mtp", "ngram"]:
    """Return the best drafter that the checkpoint of a section has: its head, or copied text."""
    if model.mtp is None:
        return "ngram"
    if section.weights == "dummy":
        return "mtp"
    return "mtp" if _has_head(model.mtp, tensor_names(section.folder)) else "ngram"


def _has_head(head: ModelConfig, tensors: frozenset[str]) -> bool:
    """Whether a checkpoint has any tensor of a head: a config.json may have a head that the files lack."""
    stored = {mapped_name(name, head.renamed) for name in tensors}
    names = (entry.name for entry in weight_map(head))
    return any(name in stored or name.removeprefix(ROOT) in stored for name in names)


def _as_stored(head: ModelConfig, tensors: frozenset[str]) -> ModelConfig:
    """Return the head without quantisation where its tensors have no scales, whatever the rules of config.json are.

    Tools that load a model without its head copy the head in 16 bits beside a quantised model, and its dense products
    stay in 16 bits then. The experts are held as the kernel of the model's experts has them.
    """
    names = [name if name.startswith(ROOT) else ROOT + name for name in tensors]
    if has_scales(name for name in (*tensors, *names) if name.startswith(head.kept)):
        return head
    return replace(head, quantization=None)


def load_draft_config(
    speculation: SpeculationConfig, section: ModelSection, model: ModelConfig
) -> DraftConfig | None:
    """Return the draft model; None: the method has none. Raises ModelConfigError, which begins with the key.

    section   of the model; a head in files that cannot be read is no error here, because the loader reports them
    """
    dummy = section.weights == "dummy"
    if speculation.method == "eagle3":
        if speculation.draft_model is None:
            raise ModelConfigError(
                "speculation.draft_model: eagle3 needs the folder of a draft model"
            )
        folder = Path(speculation.draft_model)
        eagle = load_eagle3_config(folder, model, None if dummy else tensor_names(folder))
        return DraftConfig(eagle.model, eagle)
    if speculation.draft_model is not None:
        raise ModelConfigError(
            f"speculation.draft_model: speculation.method {speculation.method} has no draft model; expected null, or "
            "the method eagle3"
        )
    if speculation.method != "mtp":
        return None
    if model.mtp is None:
        raise ModelConfigError(
            f"speculation.method: mtp needs a head for multi-token prediction, and this checkpoint "
            f"({model.model_type}) has none that can be run; expected ngram, or eagle3 with speculation.draft_model"
        )
    tensors = frozenset[str]() if dummy else tensor_names(section.folder)
    if tensors and not _has_head(model.mtp, tensors):
        raise ModelConfigError(
            "speculation.method: mtp needs a head for multi-token prediction, which config.json in "
            f"{section.folder} has and the files of weights there lack; expected ngram, or eagle3 with "
            "speculation.draft_model"
        )
    return DraftConfig(_as_stored(model.mtp, tensors) if tensors else model.mtp)
