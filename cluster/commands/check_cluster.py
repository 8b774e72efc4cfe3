"""`phalanx check --cluster`: looks at every node of a Ray cluster and compares the nodes. Starts no ranks.

Differences between nodes are errors, because ranks compute in lockstep: the slowest node, or one with another version,
decides for all.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.commands.start import start_ray
from cluster.config.phalanx_config import PhalanxConfig
from workers.kv_transfer.nixl_memory import DISTRIBUTION, nixl_unfit
from workers.rank.node_facts import NodeFacts
from workers.rank.node_probe import NodeProbe
from workers.weights.checkpoint_files import CheckpointFiles

ANSWER_S = 60.0
NUM_CLOCK_READINGS = 5
MAX_SKEW_S = 1.0


@dataclass(frozen=True)
class NodeReport:
    """One node. An `error` means that nothing else could be read. `skew_s`: its clock against this machine's."""

    name: str
    address: str
    interface: str = ""
    facts: NodeFacts | None = None
    checkpoint: CheckpointFiles | None = None
    skew_s: float = 0.0
    unreachable: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class ClusterReport:
    """All nodes, and what is wrong."""

    nodes: list[NodeReport]
    errors: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes."""
        return asdict(self)


def check_cluster(config: PhalanxConfig) -> ClusterReport:
    """Look at the Ray cluster of the configuration. Raises ServerError when it cannot be joined."""
    import ray

    start_ray(config)
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        probes = {node["NodeManagerAddress"]: _probe(config, node) for node in nodes}
        names = {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in nodes}
        reports = _look(probes, names)
        return ClusterReport(reports, list(find_errors(config, reports)))
    finally:
        ray.shutdown()


def find_errors(config: PhalanxConfig, nodes: Sequence[NodeReport]) -> Iterator[str]:
    """Yield each difference and each defect, with its nodes."""
    if len(nodes) < config.cluster.nodes:
        yield f"cluster.nodes is {config.cluster.nodes}, the Ray cluster has {len(nodes)} node(s)"
    for node in nodes:
        if node.error:
            yield f"{node.name} ({node.address}): {node.error}"
        for other, reason in node.unreachable.items():
            yield f"{node.name} ({node.address}) cannot connect to {other}: {reason}"
        if abs(node.skew_s) > MAX_SKEW_S:
            yield f"{node.name}: its clock is {node.skew_s:+.1f} s off this machine's; run NTP on all nodes"
    yield from differences({n.name: n.facts.equal for n in nodes if n.facts is not None})
    yield from _checkpoint_errors(config, nodes)
    yield from _transfer_errors(config, nodes)


def differences(facts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield a line for each fact that differs between nodes: its values, most frequent first, with their nodes."""
    names = dict.fromkeys(name for of_node in facts.values() for name in of_node)
    for name in names:
        values = {node: of_node.get(name, "none") for node, of_node in facts.items()}
        counts = Counter(values.values())
        if len(counts) > 1:
            parts = (
                f"{value} on {', '.join(node for node, has in values.items() if has == value)}"
                for value, _ in counts.most_common()
            )
            yield f"{name} differs: {'; '.join(parts)}"


def _checkpoint_errors(config: PhalanxConfig, nodes: Sequence[NodeReport]) -> Iterator[str]:
    found = {node.name: node.checkpoint for node in nodes if node.checkpoint is not None}
    somewhere = any(not files.missing for files in found.values())
    comes = config.model.revision is not None or (config.cluster.fetch_weights and somewhere)
    for name, files in found.items():
        if files.missing and not comes:
            more = f" and {len(files.missing) - 1} more" if len(files.missing) > 1 else ""
            yield (
                f"{name} lacks {files.missing[0]}{more} of {config.model.folder} (model.path); copy the folder there, "
                "or set cluster.fetch_weights to true"
            )
    names = dict.fromkeys(name for files in found.values() for name in files.files)
    for name in names:
        digests = {
            node: files.files[name].digest for node, files in found.items() if name in files.files
        }
        for line in differences({node: {name: digest[:12]} for node, digest in digests.items()}):
            yield f"{config.model.folder}: {line}"


def _transfer_errors(config: PhalanxConfig, nodes: Sequence[NodeReport]) -> Iterator[str]:
    if config.cache.transfer != "nixl":
        return
    for node in nodes:
        if node.facts is not None:
            unfit = nixl_unfit(node.facts.equal.get(DISTRIBUTION))
            if unfit is not None:
                yield f"{node.name}: cache.transfer is nixl, but {unfit} there"


def _probe(config: PhalanxConfig, node: Mapping[str, Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor_class: Any = ray.remote(NodeProbe)
    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": there}
    return actor_class.options(**options).remote(node["NodeManagerAddress"], config.model)


def _look(probes: Mapping[str, Any], names: Mapping[str, str]) -> list[NodeReport]:
    """Read each node; a node without an answer gets an error and does not stop the others."""
    deadline = time.monotonic() + ANSWER_S
    read = {
        address: [
            getattr(probe, call).remote() for call in ("port", "interface", "facts", "checkpoint")
        ]
        for address, probe in probes.items()
    }
    answers = {address: _answer(calls, deadline) for address, calls in read.items()}
    ports = {a: found[0] for a, found in answers.items() if not isinstance(found, str)}
    reached = {address: [probes[address].reach.remote(ports)] for address in ports}
    reports = []
    for address, found in answers.items():
        if isinstance(found, str):
            reports.append(NodeReport(names[address], address, error=found))
            continue
        _, interface, facts, checkpoint = found
        unreachable = _answer(reached[address], deadline)
        if isinstance(unreachable, str):
            unreachable = [{}]
        skew_s = clock_skew(lambda probe=probes[address]: _clock(probe))  # type: ignore[misc]
        reports.append(
            NodeReport(
                *(names[address], address, interface, facts, checkpoint, skew_s), unreachable[0]
            )
        )
    return reports


def clock_skew(read: Callable[[], float]) -> float:
    """Return how far a clock is ahead, from the reading with the shortest way; less than that way counts as none."""
    best: tuple[float, float] | None = None
    for _ in range(NUM_CLOCK_READINGS):
        before = time.time()
        there = read()
        after = time.time()
        reading = (after - before, there - (before + after) / 2)
        best = reading if best is None or reading < best else best
    assert best is not None
    way, skew = best
    return skew if abs(skew) > way / 2 else 0.0


def _clock(probe: Any) -> float:
    import ray

    return float(ray.get(probe.clock.remote(), timeout=ANSWER_S))


def _answer(calls: Sequence[Any], deadline: float) -> list[Any] | str:
    """Return the results, or the error of the first call that failed."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return list(ray.get(list(calls), timeout=max(1.0, deadline - time.monotonic())))
    except GetTimeoutError:
        return f"no answer within {ANSWER_S:g} s"
    except RayError as error:
        lines = str(error).strip().splitlines()
        return lines[-1] if lines else type(error).__name__
