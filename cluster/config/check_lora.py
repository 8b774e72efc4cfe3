"""Checks of the section `lora`: names and numbers of adapters. They yield problems, none raises."""

from collections.abc import Iterator

from cluster.config.errors import Problem
from cluster.config.phalanx_config import PhalanxConfig


def check_lora(config: PhalanxConfig) -> Iterator[Problem]:
    """Problems of the adapters that the configuration names."""
    lora = config.lora
    names = [adapter.name for adapter in lora.adapters]
    if not names:
        return
    if not lora.max_loras:
        message = f"{len(names)} adapters need lora.max_loras, which is 0"
        yield Problem("lora.adapters", message, ("lora.max_loras",))
    if len(names) > lora.max_cpu_loras:
        yield Problem(
            "lora.adapters",
            f"{len(names)} adapters are more than lora.max_cpu_loras ({lora.max_cpu_loras})",
            ("lora.max_cpu_loras",),
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem("lora.adapters", f"two adapters have the name {name!r}")
    if config.serve.model_name in names:
        message = (
            f"an adapter has the name of the model (serve.model_name), {config.serve.model_name!r}"
        )
        yield Problem("lora.adapters", message, ("serve.model_name",))
