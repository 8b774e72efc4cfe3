"""What a rank and its supervisor tell each other. Imports nothing heavy: an ingress needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

WEIGHTS = "weights"
KERNELS = "kernels"
KV_CACHE = "KV cache"
GRAPHS = "CUDA graphs"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one epoch meet: rank 0's store, and a name that no other group uses."""

    host: str
    port: int
    name: str
    epoch: int = 0


@dataclass(frozen=True)
class RankInfo:
    """What a rank says of itself when it is ready."""

    rank: int
    backends: dict[str, str]
    num_blocks: int
    block_size: int
    max_model_len: int
    memory_bytes: dict[str, int] = field(default_factory=dict)


def start_stages(device: str) -> tuple[str, ...]:
    """What a rank does between meeting the others and its first step, in this order on all ranks."""
    return (WEIGHTS, KERNELS, KV_CACHE, GRAPHS) if device == "cuda" else (WEIGHTS, KV_CACHE)


def total_progress(stage: str, of_ranks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Done and total of a stage: each rank reads weights of its own, all else they do together."""
    if not of_ranks:
        return 0, 0
    if stage != WEIGHTS:
        return min(of_ranks)
    return sum(done for done, _ in of_ranks), sum(total for _, total in of_ranks)
