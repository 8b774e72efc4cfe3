"""The configuration of a running server after a change of some settings. Needs neither torch nor Ray."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig

SCALE = ("cluster.ranks",)
# What new rank processes read; everything else is read by the ingresses or the supervisor, which go on.
RESTART = (
    *("scheduler", "cache", "kernels", "overlap"),
    *("model.dtype", "model.weights", "model.routing"),
    *("cluster.threads_per_rank", "cluster.vote_timeout_s"),
)


class ChangeRefusedError(ValueError):
    """A setting that a running server cannot change."""


def changed_config(
    config: PhalanxConfig, settings: Sequence[str], allowed: Collection[str]
) -> PhalanxConfig:
    """Apply settings as in --set. Raises ConfigError, and ChangeRefusedError for a key that is not in `allowed`.

    allowed: keys, or sections of which every key may change
    """
    changed = load_config(config.model_dump(), settings)
    before, after = dict(_flat(config.model_dump())), dict(_flat(changed.model_dump()))
    refused = sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
        and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    )
    if refused:
        raise ChangeRefusedError(
            f"a running server cannot change {', '.join(refused)}; start it again with the new settings"
        )
    return changed


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
