"""The ranks' statistics (`workers.stats.stats.EngineStats.snapshot`) as Prometheus families, each with a `rank` label.

Names are vLLM's where vLLM has the metric. Knows nothing of the source of the statistics.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from cluster.metrics.experts import expert_families
from cluster.metrics.kv_transfer import kv_families
from cluster.metrics.snapshot import PREFIX, add_histogram

RankStats = Sequence[dict[str, Any]]
Heads = list[tuple[list[str], dict[str, Any]]]  # label values and statistics of each rank

# Key of a rank's statistics -> metric name without prefix, help.
GAUGES = {
    "running": ("num_requests_running", "Requests in the running batch."),
    "waiting": ("num_requests_waiting", "Requests waiting to be scheduled."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of KV blocks in use, 1 = all."),
    "prefill_cap": (
        "max_prefill_tokens_with_decodes",
        "Most prompt tokens of a rank in a step in which a rank decodes, as last decided; absent = no limit.",
    ),
    "state_snapshots": (
        "state_snapshots",
        "States of linear attention that the prefix cache keeps.",
    ),
    "state_snapshot_bytes": ("state_snapshot_bytes", "Memory of these states."),
    "images_waiting": (
        "num_requests_waiting_for_images",
        "Requests that wait for the embeddings of their images, of those that wait.",
    ),
    "adapters_resident": ("lora_adapters_resident", "LoRA adapters in slots of the device."),
    "expert_balancedness": (
        "expert_load_balancedness",
        "Mean rows of a local expert over the busiest one's, in the step last looked at; 1 = even.",
    ),
}
COUNTERS = {
    "preemptions": ("num_preemptions", "Requests preempted for lack of KV blocks."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the cache."),
    "shared_prefix_rows": (
        "shared_prefix_rows",
        "Decodes that read leading KV blocks together with other ones.",
    ),
    "shared_prefix_tokens_saved": (
        "shared_prefix_tokens_saved",
        "Tokens of K and V that a layer did not read again, because decodes read them together.",
    ),
    "states_restored": (
        "states_restored",
        "Requests that went on from a state in the prefix cache.",
    ),
    "images_computed": ("images_computed", "Images that the vision tower computed."),
    "images_found": ("images_found", "Images of requests that the rank had computed before."),
    "adapter_loads": (
        "lora_slot_loads",
        "Copies of a LoRA adapter from host memory into a slot.",
    ),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens": ("generation_tokens", "Tokens sampled."),
    "padding_tokens": ("padding_tokens", "Padding rows that ran to give all ranks equal shapes."),
    "invalid_logits": (
        "invalid_logits",
        "Requests ended because a logit was NaN or infinite.",
    ),
    "invalid_logits_rows": (
        "invalid_logits_rows",
        "Rows of logits with a NaN or an infinity, also of prompts and of requests that had ended.",
    ),
    "drafts": (
        "spec_decode_num_drafts",
        "Times that a sequence had draft tokens in a step.",
    ),
    "draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens that steps verified."),
    "accepted_tokens": (
        "spec_decode_num_accepted_tokens",
        "Draft tokens that the model confirmed.",
    ),
    "steps": ("steps", "Lockstep forwards."),
    "idle_steps": ("idle_steps", "Steps in which this rank had no tokens."),
    "stale_messages": ("stale_messages", "Messages of another epoch that a rank dropped."),
    "expert_layers_moved": (
        "expert_layers_moved",
        "Layers of which the ranks have changed the map of experts while they served.",
    ),
    "expert_moves": ("expert_moves", "Moves of experts that are complete."),
    "expert_moves_cancelled": (
        "expert_moves_cancelled",
        "Moves of experts that the ranks have cancelled, because a rank did not stage a layer.",
    ),
    "expert_rows": (
        "expert_rows",
        "(Token, expert) pairs that came to this rank's experts, up to the last reading.",
    ),
}
HISTOGRAMS = {
    "request_queue_time": (
        "request_queue_time_seconds",
        "From a request's arrival in its rank to its first step.",
    ),
    "request_prefill_time": (
        "request_prefill_time_seconds",
        "From a request's first step to its first token.",
    ),
    "request_decode_time": (
        "request_decode_time_seconds",
        "From a request's first token to its end.",
    ),
    "request_inference_time": (
        "request_inference_time_seconds",
        "From a request's first step to its end.",
    ),
    "step_tokens": ("iteration_tokens_total", "Tokens that a rank computed in a step."),
}


def rank_families(stats: RankStats, model_name: str) -> Iterator[Metric]:
    """All families of all ranks; a statistic that a rank does not report is left out."""
    labels = ["model_name", "rank"]
    yield _answers(stats, model_name)
    stats = [values for values in stats if not values.get("silent")]
    heads: Heads = [
        ([model_name, str(values.get("rank", i))], values) for i, values in enumerate(stats)
    ]
    for table, make in ((GAUGES, GaugeMetricFamily), (COUNTERS, CounterMetricFamily)):
        for key, (name, text) in table.items():
            family = make(PREFIX + name, text, labels=labels)
            for head, values in heads:
                if values.get(key) is not None:
                    family.add_metric(head, values[key])
            yield family
    for key, (name, text) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(PREFIX + name, text, labels=labels)
        for head, values in heads:
            if key in values.get("histograms", {}):
                bounds, numbers = values["histograms"][key]
                add_histogram(histogram, head, bounds, numbers)
        yield histogram
    parts = CounterMetricFamily(
        f"{PREFIX}step_time_seconds",
        "Time in the parts of a step; vote is the wait for the votes of other ranks.",
        labels=[*labels, "part"],
    )
    kinds = CounterMetricFamily(
        f"{PREFIX}steps_by_kind",
        "Steps by what they were: forward mode, CUDA graph, ubatched.",
        labels=[*labels, "forward_mode", "graph_mode", "ubatch"],
    )
    places = CounterMetricFamily(
        f"{PREFIX}spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that the model confirmed, by their place behind the sequence's last token.",
        labels=[*labels, "position"],
    )
    for head, values in heads:
        for place, count in enumerate(values.get("accepted_tokens_by_place", ())):
            places.add_metric([*head, str(place)], count)
        for part, seconds in values.get("step_seconds", {}).items():
            parts.add_metric([*head, part], seconds)
        for kind, count in values.get("kinds", {}).items():
            kinds.add_metric([*head, *(word.lower() for word in kind)], count)
    yield from (parts, kinds, places, *expert_families(stats, model_name))
    yield from kv_families(stats, model_name)
    yield from (_info(heads), *_process(heads))


def _answers(stats: RankStats, model_name: str) -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}rank_answers",
        "1 for a rank with figures here; 0 for one that did not answer in time or cannot be reached.",
        labels=["model_name", "rank"],
    )
    for position, values in enumerate(stats):
        head = [model_name, str(values.get("rank", position))]
        family.add_metric(head, float(not values.get("silent")))
    return family


def _info(heads: Heads) -> Metric:
    names = sorted({name for _, values in heads for name in values.get("info", {})})
    family = GaugeMetricFamily(
        f"{PREFIX}cache_config_info",
        "Always 1; what a rank was started with, as labels.",
        labels=["model_name", "rank", *names],
    )
    for head, values in heads:
        if "info" in values:
            family.add_metric([*head, *(str(values["info"].get(name, "")) for name in names)], 1)
    return family


def _process(heads: Heads) -> Iterator[Metric]:
    labels = ["model_name", "rank"]
    seconds = CounterMetricFamily(
        f"{PREFIX}rank_cpu_seconds", "Processor time of a rank's process.", labels=labels
    )
    memory = GaugeMetricFamily(
        f"{PREFIX}rank_resident_memory_bytes", "Memory of a rank's process.", labels=labels
    )
    for head, values in heads:
        if "process" in values:
            seconds.add_metric(head, values["process"]["cpu_seconds"])
            memory.add_metric(head, values["process"]["resident_bytes"])
    yield from (seconds, memory)
