"""When a rank votes for ubatches: thresholds from the configuration or from measurements. Pure.

All ranks have the same policy, because they compare their settings at the start and gather all measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.all2all.base import AllToAll
from workers.config import OverlapConfig
from workers.step.step_sync import ForwardMode

PHASES = ("decode", "prefill")
# Share by which ubatches must be faster at a size and at all larger measured sizes; less is noise.
MARGIN = 0.02


@dataclass(frozen=True)
class Sample:
    """Seconds of a step of `num_tokens` on each rank, whole and in ubatches, on the slowest rank."""

    num_tokens: int
    whole_s: float
    ubatched_s: float


@dataclass(frozen=True)
class OverlapPolicy:
    """The tokens of a rank's step from which on the rank votes for ubatches; None = never.

    comm_sms   multiprocessors of the all-to-all beside ubatches; None = no limit
    reasons    the reason for each setting
    """

    min_decode_tokens: int | None
    min_prefill_tokens: int | None
    comm_sms: int | None
    reasons: dict[str, str]

    def wants(self, mode: ForwardMode, num_tokens: int) -> bool:
        """Return the vote of a rank with this step. An idle rank votes yes, because it runs padding in either form."""
        if mode.is_idle():
            return True
        least = self.min_decode_tokens if mode.is_decode() else self.min_prefill_tokens
        return least is not None and num_tokens >= least

    @property
    def enabled(self) -> bool:
        """Whether any step is ever cut."""
        return self.min_decode_tokens is not None or self.min_prefill_tokens is not None

    def with_comm_sms(self, comm_sms: int | None, reason: str) -> "OverlapPolicy":
        """Return this policy with another limit on the all-to-all."""
        return replace(self, comm_sms=comm_sms, reasons={**self.reasons, "comm_sms": reason})

    def lines(self) -> list[str]:
        """Return the policy as lines for the log."""
        reasons = self.reasons
        if not self.enabled and reasons["decode"] == reasons["prefill"]:
            return [f"no ubatches: {reasons['decode']}"]
        limit = "no limit" if self.comm_sms is None else str(self.comm_sms)
        return [
            f"ubatches in decode {_since(self.min_decode_tokens, 'sequences')} ({reasons['decode']})",
            f"ubatches in prefill {_since(self.min_prefill_tokens, 'tokens')} ({reasons['prefill']})",
            f"SMs of the all-to-all beside ubatches: {limit} ({reasons['comm_sms']})",
        ]


def never(reason: str) -> OverlapPolicy:
    """Return a policy without ubatches."""
    return OverlapPolicy(None, None, None, dict.fromkeys((*PHASES, "comm_sms"), reason))


def configured(
    config: OverlapConfig, all2all: type[AllToAll]
) -> tuple[OverlapPolicy, frozenset[str]]:
    """What the configuration alone decides with this exchange, and the phases that have to be measured.

    Phases are `decode` and `prefill`; while they are open the policy wants no ubatches in them.
    """
    if config.mode == "off":
        return never("overlap.mode is off"), frozenset()
    if config.mode == "auto" and all2all.no_overlap_reason is not None:
        reason = f"nothing to gain with {all2all.name}: {all2all.no_overlap_reason}"
        return never(reason), frozenset()
    least: dict[str, int | None] = {}
    reasons, unknown = {}, set()
    for phase in PHASES:
        key = f"min_{phase}_tokens"
        wanted = getattr(config, key)
        if wanted != "auto":
            least[phase], reasons[phase] = wanted, f"overlap.{key}"
        elif config.mode == "on":
            least[phase], reasons[phase] = config.num_ubatches, "overlap.mode is on"
        else:
            least[phase], reasons[phase] = None, "not measured"
            unknown.add(phase)
    comm_sms = None if config.comm_sms == "auto" else all2all.granted_sms(config.comm_sms)
    reasons["comm_sms"] = "the backend's own" if comm_sms is None else "overlap.comm_sms"
    if comm_sms not in (None, config.comm_sms):
        reasons["comm_sms"] += f" is {config.comm_sms}, {all2all.name} takes {comm_sms} of them"
    policy = OverlapPolicy(least["decode"], least["prefill"], comm_sms, reasons)
    return policy, frozenset(unknown)


def too_many_sms(comm_sms: int, num_sms: int, usual: Sequence[int]) -> str | None:
    """Return why a GPU of `num_sms` multiprocessors cannot give `comm_sms` to the all-to-all, or None."""
    if comm_sms < num_sms:
        return None
    return (
        f"{comm_sms} leaves none of this GPU's {num_sms} multiprocessors to the experts; expected auto, or fewer: "
        f"{usual[0]} to {usual[-1]} are usual"
    )


def with_measured(
    policy: OverlapPolicy, phase: str, samples: Sequence[Sample], margin: float = MARGIN
) -> OverlapPolicy:
    """Return `policy` with the threshold of one phase from `samples`, which are in ascending order of tokens."""
    least = threshold(samples, margin)
    reasons = {**policy.reasons, phase: explain(samples, least)}
    return replace(policy, reasons=reasons, **{f"min_{phase}_tokens": least})


def threshold(samples: Sequence[Sample], margin: float = MARGIN) -> int | None:
    """Return the fewest tokens from which on ubatches win at every measured size; None if they lose at the largest."""
    least = None
    for sample in reversed(samples):
        if sample.ubatched_s > (1 - margin) * sample.whole_s:
            break
        least = sample.num_tokens
    return least


def explain(samples: Sequence[Sample], least: int | None) -> str:
    """Return the reason for a threshold: the times of both forms at the size that decided it."""
    if not samples:
        return "no step is large enough to be cut"
    shown = [s for s in samples if s.num_tokens == least] or samples
    sample = shown[-1]
    gain = 100 * (sample.whole_s / sample.ubatched_s - 1)
    return (
        f"measured at {sample.num_tokens} a rank: {1e3 * sample.whole_s:.2f} ms whole, "
        f"{1e3 * sample.ubatched_s:.2f} ms in ubatches, {gain:+.0f} %"
    )


def _since(least: int | None, what: str) -> str:
    return "never" if least is None else f"from {least} {what} on"
