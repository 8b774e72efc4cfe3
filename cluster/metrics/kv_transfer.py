"""KV outside the devices as Prometheus families: what moves, what waits for it, what the stores of the nodes hold.

A store belongs to a node, and each rank of the node reports it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.metrics.snapshot import PREFIX

COUNTERS = {
    "kv_loads": (
        "kv_loads",
        "Loads of KV into the device, each for one request that waited for it.",
    ),
    "kv_partial_loads": (
        "kv_partial_loads",
        "Loads that brought less than was to be found; the rest is computed.",
    ),
    "kv_load_seconds": ("kv_load_seconds", "Time that requests waited for loads of KV, in all."),
    "kv_nixl_fetches": (
        "kv_fetches",
        "Fetches of the KV of a prompt from another node, each for one request that waited for it.",
    ),
    "kv_nixl_seconds": ("kv_fetch_seconds", "Time that requests waited for these fetches, in all."),
    "kv_nixl_bytes": ("kv_fetched_bytes", "Bytes of KV that came from other nodes."),
    "kv_host_evicted": ("kv_host_evicted", "Contents that left the host memory of a rank's node."),
}
GAUGES = {
    "kv_waiting": ("num_requests_waiting_for_kv", "Requests that wait for a load of KV."),
    "kv_host_bytes": ("kv_host_memory_bytes", "Host memory of a rank's node for KV."),
    "kv_host_used_bytes": ("kv_host_memory_used_bytes", "Part of this memory with contents."),
    "kv_host_disk_used_bytes": ("kv_disk_used_bytes", "Files with KV on a rank's node."),
}
# Metric name -> help, name of the label, and values of the label with the statistics that belong to them.
BY_LABEL: dict[str, tuple[str, str, Mapping[str, str]]] = {
    "kv_restored_tokens": (
        "Prompt tokens that were loaded into the device, by where they were found.",
        "place",
        {"host": "kv_restored_host", "disk": "kv_restored_disk"},
    ),
    "kv_moved_bytes": (
        "Bytes of KV between a rank's device and host memory.",
        "direction",
        {"save": "kv_host_saved_bytes", "load": "kv_host_loaded_bytes"},
    ),
    "kv_copy_seconds": (
        "Time of these copies.",
        "direction",
        {"save": "kv_host_saved_copy_seconds", "load": "kv_host_loaded_copy_seconds"},
    ),
    "kv_disk_bytes": (
        "Bytes of KV to and from files of a rank's node.",
        "direction",
        {"save": "kv_host_disk_written_bytes", "load": "kv_host_disk_read_bytes"},
    ),
    "kv_failures": (
        "Contents of KV that could not be used or kept, and were computed again: gone before the load, damaged, of "
        "another version (stale), a store that was lost, requests in which a store failed, errors of files, files "
        "skipped because too many waited. Of fetches from other nodes: not held there, of another form (refused), too "
        "late, the other node or this node's process lost.",
        "kind",
        {
            "gone": "kv_host_missed",
            "damaged": "kv_host_damaged",
            "store_lost": "kv_host_lost",
            "store_errors": "kv_host_errors",
            **{
                f"fetch_{kind}": f"kv_nixl_{kind}"
                for kind in ("missed", "damaged", "refused", "late", "source_lost", "lost")
            },
            **{
                f"file_{kind}": f"kv_host_disk_{kind}"
                for kind in ("missing", "damaged", "stale", "errors", "skipped")
            },
        },
    ),
}


def kv_families(stats: Sequence[Mapping[str, Any]], model_name: str) -> Iterator[Metric]:
    """Return the families of all ranks; a statistic that a rank does not report is left out."""
    labels = ["model_name", "rank"]
    heads = [([model_name, str(values.get("rank", i))], values) for i, values in enumerate(stats)]
    for table, make in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for key, (name, text) in table.items():
            family = make(PREFIX + name, text, labels=labels)
            for head, values in heads:
                if key in values:
                    family.add_metric(head, values[key])
            yield family
    for name, (text, label, keys) in BY_LABEL.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=[*labels, label])
        for head, values in heads:
            for value, key in keys.items():
                if key in values:
                    counter.add_metric([*head, value], values[key])
        yield counter
