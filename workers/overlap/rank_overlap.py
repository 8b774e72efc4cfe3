"""The overlap policy of a rank process, which one epoch measures and the next epochs reuse."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernels.all2all.base import AllToAll
from workers.config import OverlapConfig
from workers.overlap.policy import OverlapPolicy, configured

# Returns the value of every rank as JSON carries it, in rank order.
Gather = Callable[[Any], Sequence[Any]]


@dataclass
class RankOverlap:
    """When a rank's steps are cut into ubatches. Lives as long as the process.

    policy       thresholds and SM limit, as far as they are set
    unmeasured   phases with a threshold still to be measured
    tuned        an epoch has measured, or loaded, all that the configuration leaves open
    warm         this process has run ubatches at every size that will be cut without a graph
    """

    policy: OverlapPolicy
    unmeasured: frozenset[str] = frozenset()
    tuned: bool = False
    warm: bool = False

    @classmethod
    def configured(cls, config: OverlapConfig, all2all: type[AllToAll]) -> "RankOverlap":
        """The policy that the configuration gives with this all-to-all."""
        return cls(*configured(config, all2all))

    @property
    def may_cut(self) -> bool:
        """Whether steps are cut under this policy, or may be once it is tuned."""
        return self.policy.enabled or bool(self.unmeasured)

    def agree(self, gather: Gather) -> None:
        """Take over the policy of a rank that was tuned before. Collective.

        Ranks with a new process would otherwise measure while the older ranks do not.
        """
        ranks = gather((asdict(self.policy) if self.tuned else None, self.warm))
        tuned = [fields for fields, _ in ranks if fields is not None]
        if tuned:
            self.settle(OverlapPolicy(**tuned[0]))
        self.warm = all(warm for _, warm in ranks)

    def settle(self, policy: OverlapPolicy) -> None:
        """Keep `policy` for this epoch and the next ones."""
        self.policy, self.unmeasured, self.tuned = policy, frozenset(), True
