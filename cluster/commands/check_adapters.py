"""Refuses adapters of the configuration that the ranks could not load, before anything starts."""

from cluster.config.errors import ConfigError, Problem
from workers import hub
from workers.adapters.layout import AdapterLayout
from workers.adapters.peft_folder import PeftFolder
from workers.config import RankConfig
from workers.lora_config import AdapterError
from workers.specs.model import ModelConfig


def check_adapters(config: RankConfig, model: ModelConfig) -> None:
    """Read the folders of `lora.adapters` on this machine. Raises ConfigError with every adapter that does not fit."""
    if not config.lora.max_loras:
        return
    layout = AdapterLayout.of(model, config.lora, range(model.num_experts))
    problems = []
    if layout.is_empty:
        problems.append(
            Problem(
                "lora.targets",
                f"the model has no products of {', '.join(config.lora.targets)}; set lora.max_loras: 0",
            )
        )
    for adapter in config.adapters:
        try:
            hub.fetch_adapter(adapter.path, adapter.revision)
            layout.place(PeftFolder.read(adapter.folder))
        except hub.HubError as error:
            problems.append(Problem("lora.adapters", f"{adapter.name}: {error.reason}"))
        except AdapterError as error:
            problems.append(Problem("lora.adapters", f"{adapter.name}: {error}"))
    if problems:
        raise ConfigError.of("configuration", problems)
