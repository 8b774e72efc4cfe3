"""Messages between a rank and its supervisor. Imports nothing heavy, because an ingress needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from workers.config import RankConfig
from workers.specs.expert_layout import ExpertLayout
from workers.stats.own_work import OwnWork

CHECKPOINT = "checkpoint"
WEIGHTS = "weights"
KERNELS = "kernels"
KV_CACHE = "KV cache"
GRAPHS = "CUDA graphs"
IN_BYTES = (CHECKPOINT, WEIGHTS)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Rendezvous:
    """The store of rank 0 through which the ranks of one epoch join.

    name     that no other group uses, and that cannot be guessed: of the group's shared memory and keys in the store
    secret   signs the gathers; a rank alone needs none
    layout   of the experts, of any number of ranks; None: as the configuration has it
    store    name of the group's KV in the memory of each node, in all epochs; "": there is none
    """

    host: str
    port: int
    name: str
    epoch: int = 0
    secret: bytes = field(default=b"", repr=False)
    layout: ExpertLayout | None = field(default=None, repr=False)
    store: str = ""


class SignatureError(RuntimeError):
    """A part of a gather comes from outside the group, or was changed on its way."""


@dataclass(frozen=True)
class RankInfo:
    """The report of a rank when its engine is made. `stage_seconds` is the time of each stage of this epoch.

    adapter_errors  why adapters of the configuration cannot be used, by id
    window_blocks  blocks that a long request needs beside those of its tokens, for layers with a window
    """

    rank: int
    backends: dict[str, str]
    num_blocks: int
    block_size: int
    max_model_len: int
    memory_bytes: dict[str, int] = field(default_factory=dict)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    window_blocks: int = 0
    adapter_errors: dict[int, str] = field(default_factory=dict)

    @property
    def cache_tokens(self) -> int:
        """Tokens of the longest request that the cache holds."""
        return (self.num_blocks - min(self.window_blocks, self.num_blocks // 2)) * self.block_size


@dataclass(frozen=True)
class Membership:
    """The epoch that a rank is in, as a supervisor finds it again.

    rank     its number, in the group of that epoch
    epoch    -1 between two epochs
    fence    the first epoch that the rank may join
    info     the report of the rank's engine; None while the step loop does not run
    streams  the streams of ingresses that are open
    config   of that epoch
    """

    rank: int
    epoch: int
    fence: int
    info: RankInfo | None
    streams: tuple[str, ...] = ()
    config: RankConfig | None = None


Activity = Literal["step", "vote", "capture", "sleep"]


class Pulse(NamedTuple):
    """A step loop at one moment.

    step      votes that are complete
    activity  vote = it waits for the votes of its peers; capture = it captures a CUDA graph that a step wants, or that
              was postponed; sleep = all ranks were idle
    cpu_s     processor time of the loop's thread
    overdue   the step takes far longer than steps of its size, see Pace
    work      of the steps of this epoch so far
    """

    step: int
    activity: Activity
    cpu_s: float
    overdue: bool = False
    work: OwnWork = OwnWork()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The steps of one rank.

    seconds   form -> seconds of a step without the profiler
    events    Chrome's trace format, JSON compressed by gzip
    """

    rank: int
    all2all: str
    seconds: dict[str, float]
    events: bytes


def start_stages(device: str) -> tuple[str, ...]:
    """Return the stages between joining the group and the first step, in one order on all ranks."""
    return (WEIGHTS, KERNELS, KV_CACHE, GRAPHS) if device == "cuda" else (WEIGHTS, KV_CACHE)


def total_progress(stage: str, of_ranks: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return done and total of a stage: bytes of each rank or node add up; the ranks run every other stage together."""
    if not of_ranks:
        return 0, 0
    if stage not in IN_BYTES:
        return min(of_ranks)
    return sum(done for done, _ in of_ranks), sum(total for _, total in of_ranks)
