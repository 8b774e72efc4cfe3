"""The `lora` section of the YAML: memory for LoRA adapters, and the adapters of the start."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from workers import hub
from workers.section import Section


class AdapterError(ValueError):
    """An adapter that cannot be loaded or unloaded. Defined here, because a supervisor reads it without torch."""


class AdapterConfig(Section):
    """One adapter of the YAML."""

    name: str = Field(min_length=1, description="Value of `model` in requests for the adapter.")
    path: str = Field(
        description="Folder that PEFT has saved, relative to the YAML's folder, or a name on the Hub."
    )


LoraTarget = Literal["attention", "mlp", "experts", "embeddings"]


class LoraConfig(Section):
    """LoRA adapters, chosen by the `model` of a request."""

    max_loras: int = Field(
        0,
        ge=0,
        le=32,
        description="Adapters in the memory of a rank's device, and so of the sequences that run at once; 0 = no LoRA.",
    )
    max_cpu_loras: int = Field(
        32,
        ge=1,
        le=10_000,
        description="Adapters of the server, which each rank keeps in host memory.",
    )
    max_rank: int = Field(
        16, ge=1, le=256, description="Largest rank; smaller ones take as much memory."
    )
    targets: list[LoraTarget] = Field(
        ["attention", "mlp"],
        min_length=1,
        description="What adapters may change, for which memory is reserved: attention = projections of attention, "
        "latent attention and gated delta nets; mlp = dense MLPs and shared experts; experts = routed experts, which "
        "take far more memory; embeddings = the embedding of tokens and the head.",
    )
    adapters: list[AdapterConfig] = Field(
        default_factory=list, description="Adapters that the server has from its start."
    )


class LoadedAdapter(Section):
    """An adapter of a running server. No two have one id, also one after another under one name.

    path       absolute folder, or a name on the Hub
    revision   commit of a name on the Hub; None for a folder
    """

    id: int
    name: str
    path: str
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """The folder on this machine."""
        if self.revision is None:
            return Path(self.path)
        return hub.snapshot_folder(self.path, self.revision)
