"""The configuration of a running server after a change of some settings. Needs neither torch nor Ray."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from cluster.config.files import read_config
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from workers.config import CacheConfig

SCALE = ("cluster.ranks",)
# The memory and the files of a node outlive its ranks.
OF_NODES = ("host_memory_gib", "disk_path", "disk_gib", "transfer")
# What new rank processes read; everything else is read by the ingresses or the supervisor, which go on. A change
# comes over HTTP, so no setting is among them that names a path or code, or chooses the weights.
RESTART = (
    *("scheduler", "overlap", "model.dtype", "model.routing"),
    *(f"cache.{name}" for name in CacheConfig.model_fields if name not in OF_NODES),
    *("experts.rebalance", "experts.redundant_slots", "experts.copies"),
    *("speculation.method", "speculation.num_draft_tokens", "speculation.adaptive"),
    *("kernels.all2all", "kernels.grouped_gemm", "kernels.attention", "kernels.linear_attention"),
    "kernels.cascade",
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
    present = config.model_dump()
    # Before load_config, which fetches what model.path names.
    before, after = dict(_flat(present)), dict(_flat(read_config(present, settings).data))
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
    return load_config(present, settings)


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
