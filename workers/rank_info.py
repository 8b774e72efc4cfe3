"""What a rank and its supervisor tell each other. Imports nothing heavy: an ingress needs no torch."""

from dataclasses import dataclass, field


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
