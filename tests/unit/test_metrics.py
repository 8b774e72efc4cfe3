"""What /metrics and /ranks say of given counters, and how the counts of several ingresses add up."""

import asyncio
import time
import timeit
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import kv_transfer
from cluster.metrics.metrics import FAMILIES, GAUGES, IngressMetrics
from cluster.metrics.ranks import COUNTERS, HISTOGRAMS
from cluster.metrics.ranks import GAUGES as RANK_GAUGES
from cluster.metrics.snapshot import SnapshotTotals, add
from cluster.supervisor.status import GroupState, GroupStatus, Rebuild
from tests.unit.api_fakes import Api, assert_error
from workers.stats.expert_counts import LayerRows
from workers.stats.stats import EngineStats

EVEN = "phalanx:expert_layer_balancedness"
KV_KEYS = [
    *(*kv_transfer.GAUGES, *kv_transfer.COUNTERS),
    *(key for _, _, keys in kv_transfer.BY_LABEL.values() for key in keys.values()),
]
RANK_STATS = {
    "running": 3,
    "waiting": 2,
    "kv_cache_usage": 0.25,
    "prefill_cap": 512,
    "preemptions": 1,
    "prefix_cache_queries": 50,
    "prefix_cache_hits": 40,
    "shared_prefix_rows": 14,
    "shared_prefix_tokens_saved": 1400,
    "state_snapshots": 7,
    "state_snapshot_bytes": 7000,
    "states_restored": 8,
    "images_waiting": 1,
    "images_computed": 14,
    "images_found": 15,
    "adapters_resident": 2,
    "adapter_loads": 13,
    "prompt_tokens": 60,
    "generation_tokens": 70,
    "padding_tokens": 5,
    "invalid_logits": 6,
    "invalid_logits_rows": 11,
    "drafts": 12,
    "draft_tokens": 40,
    "accepted_tokens": 25,
    "accepted_tokens_by_place": [10, 9, 6],
    "steps": 9,
    "idle_steps": 4,
    "expert_rows": 33,
    "expert_window": LayerRows(64, [0, 30, 9]),
    "expert_step": LayerRows(65, [0, 3, 1]),
    "expert_layers_moved": 96,
    "expert_moves": 2,
    "expert_moves_cancelled": 1,
    "stale_messages": 2,
    "expert_balancedness": 0.5,
    **{key: 10 + place for place, key in enumerate(KV_KEYS)},
    "step_seconds": {"forward": 1.5, "vote": 0.5},
    "kinds": {("DECODE", "DECODE", "False"): 7, ("IDLE", "NONE", "True"): 2},
    "histograms": {
        name: ((0.5, 1.0), [2, 3, 1, 6.5]) for name in EngineStats().snapshot()["histograms"]
    },
    "process": {"cpu_seconds": 12.5, "resident_bytes": 1000},
    "info": {"block_size": 16, "num_blocks": 256, "all2all": "shm"},
}


def rebuilding() -> GroupStatus:
    """A group in its second rebuild."""
    status = GroupStatus(epoch=2, vote_ages=[0.0, 1.5], since=time.time() - 3)
    status.rebuilt(Rebuild("rank 1: its process died", 2.5, (("processes", 1.5), ("group", 0.5))))
    status.state, status.stage, status.error = "rebuilding", "weights", "rank 0: its process died"
    return status


def filled_metrics() -> IngressMetrics:
    """An ingress that has counted something of everything."""
    metrics = IngressMetrics()
    metrics.set_model_name("m")
    metrics.observe_first_token(0.2)
    metrics.observe_inter_token(0.01)
    metrics.observe_end("stop")
    metrics.observe_prompt("prefill")
    metrics.observe_finished(
        num_prompt_tokens=5, num_output_tokens=3, first_token_s=0.2, total_s=0.5
    )
    metrics.observe_http("/v1/completions", 200)
    metrics.observe_http_end("/v1/completions", 0.5)
    return metrics


def parse(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> sorted labels -> value; every family comes once."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    names = []
    for family in text_string_to_metric_families(text.decode()):
        names.append(family.name)
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            children = found.setdefault(sample.name, {})
            assert labels not in children, f"{sample.name}{labels} comes twice"
            children[labels] = sample.value
    assert len(names) == len(set(names)), names
    return found


def two_ranks() -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    stats = [{**RANK_STATS, "rank": rank, "running": rank} for rank in range(2)]
    return parse(filled_metrics().render(stats))


def test_the_state_of_a_group():
    again, fine = rebuilding(), GroupStatus(state="serving", vote_ages=[0.25])
    fine.slow, fine.slowdowns = [0], [4.567]
    again.rebuilt(Rebuild("rank 0: left", 3.0, (("processes", 2.0),)))
    found = parse(filled_metrics().render([], groups=[again.to_json(), fine.to_json()]))
    states = found["phalanx:group_state"]
    assert (
        states[label(group="0", state="rebuilding")]
        == 1
        == states[label(group="1", state="serving")]
    )
    assert sum(states.values()) == 2 and len(states) == 2 * len(get_args(GroupState))
    assert found["phalanx:group_stage"] == {label(group="0", stage="weights"): 1}
    assert 3 <= found["phalanx:group_state_seconds"][label(group="0")] < 60
    assert found["phalanx:group_epoch"] == {label(group="0"): 2, label(group="1"): 0}
    assert found["phalanx:group_rebuilds_total"] == {label(group="0"): 2, label(group="1"): 0}
    assert found["phalanx:group_rebuild_seconds_total"] == {
        label(group="0", stage="processes"): 3.5,
        label(group="0", stage="group"): 0.5,
    }
    ages = {label(rank="0"): 0, label(rank="1"): 1.5, label(rank="2"): 0.25}
    assert found["phalanx:vote_age_seconds"] == ages
    assert found["phalanx:slow_rank"] == {label(rank="2"): 1}
    assert found["phalanx:rank_slowdown"] == {label(rank="2"): 4.57}


def label(**labels: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model_name": "m", **labels}.items()))


def test_every_rank_statistic_appears_by_rank():
    found = two_ranks()
    for table, suffix in ((RANK_GAUGES, ""), (COUNTERS, "_total")):
        for key, (name, _) in table.items():
            children = found[f"phalanx:{name}{suffix}"]
            expected = 1 if key == "running" else RANK_STATS[key]
            assert children[label(rank="1")] == expected, name
            assert len(children) == 2
    for name, _ in HISTOGRAMS.values():
        buckets = found[f"phalanx:{name}_bucket"]
        edges = ("0.5", "1.0", "+Inf")
        assert [buckets[label(rank="0", le=edge)] for edge in edges] == [2, 5, 6]
        assert found[f"phalanx:{name}_sum"][label(rank="0")] == 6.5
        assert found[f"phalanx:{name}_count"][label(rank="0")] == 6
    parts = found["phalanx:step_time_seconds_total"]
    assert parts[label(rank="0", part="forward")] == 1.5 and len(parts) == 4
    kinds = found["phalanx:steps_by_kind_total"]
    decode = label(rank="0", forward_mode="decode", graph_mode="decode", ubatch="false")
    assert kinds[decode] == 7 and len(kinds) == 4
    (info, _) = found["phalanx:cache_config_info"]
    assert dict(info)["block_size"] == "16" and dict(info)["all2all"] == "shm"
    assert found["phalanx:rank_cpu_seconds_total"][label(rank="1")] == 12.5
    even = found["phalanx:expert_layer_balancedness"]
    assert even == {label(layer="1"): 1, label(layer="2"): 1}  # layer 0 has no experts
    assert found["phalanx:expert_step_imbalance"] == {label(): 1}


def test_kv_outside_the_devices_by_rank():
    found = two_ranks()
    for table, suffix in ((kv_transfer.GAUGES, ""), (kv_transfer.COUNTERS, "_total")):
        for key, (name, _) in table.items():
            assert found[f"phalanx:{name}{suffix}"][label(rank="1")] == RANK_STATS[key]
    for name, (_, kind, keys) in kv_transfer.BY_LABEL.items():
        children = found[f"phalanx:{name}_total"]
        assert len(children) == 2 * len(keys)
        for value, key in keys.items():
            assert children[label(rank="0", **{kind: value})] == RANK_STATS[key]


def test_the_balance_of_experts_is_that_of_the_same_steps_of_all_ranks():
    def rendered(*ranks: dict) -> dict:
        stats = [{**RANK_STATS, "rank": rank, **own} for rank, own in enumerate(ranks)]
        metrics = IngressMetrics()
        metrics.set_model_name("m")
        return parse(metrics.render(stats))

    busy = {"expert_window": LayerRows(64, [0, 90, 3]), "expert_step": LayerRows(65, [0, 9, 2])}
    idle = {"expert_window": LayerRows(64, [0, 30, 9]), "expert_step": LayerRows(65, [0, 3, 6])}
    found = rendered(busy, idle)
    layers = {dict(key)["layer"]: value for key, value in found[f"{EVEN}"].items()}
    assert layers == {"1": pytest.approx(2 / 3), "2": pytest.approx(2 / 3)}
    (step,) = found["phalanx:expert_step_imbalance"].values()
    assert step == pytest.approx((9 + 6) / (6 + 4))
    later = {"expert_window": LayerRows(96, [0, 30, 9]), "expert_step": None}
    assert not {EVEN, "phalanx:expert_step_imbalance"} & rendered(busy, later).keys()


def test_the_snapshot_of_a_real_rank_is_rendered_whole():
    snapshot = {"rank": 0, **EngineStats().snapshot()}
    assert snapshot["expert_balancedness"] is None  # nothing looked at yet: no sample
    found = parse(IngressMetrics().render([snapshot]))
    known = {"rank", "time", "step_seconds", "kinds", "histograms", "process"}
    known |= {"accepted_tokens_by_place", "expert_window", "expert_step"}
    known.add(
        "expert_balancedness_samples"
    )  # a sum and its count, for the mean of an experiment's run
    assert snapshot.keys() - known <= RANK_GAUGES.keys() | COUNTERS.keys()
    assert snapshot["prefill_cap"] is None  # no limit
    assert "phalanx:expert_load_balancedness" not in found
    assert "phalanx:max_prefill_tokens_with_decodes" not in found
    assert found["phalanx:iteration_tokens_total_count"]
    assert len(found["phalanx:step_time_seconds_total"]) == 7


def test_requests_of_one_ingress():
    found = two_ranks()
    assert found["phalanx:request_success_total"] == {label(finished_reason="stop"): 1}
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert found[f"phalanx:{name}_count"] == {label(): 1}
    assert found["phalanx:inter_token_latency_seconds_bucket"][label(le="0.01")] == 1
    assert found["phalanx:inter_token_latency_seconds_bucket"][label(le="0.0075")] == 0
    assert found["phalanx:request_time_per_output_token_seconds_sum"][label()] == pytest.approx(
        0.15
    )
    handler = (("handler", "/v1/completions"),)
    assert found["phalanx:http_request_duration_seconds_sum"] == {handler: 0.5}
    assert found["phalanx:ingress_cpu_seconds_total"].popitem()[1] > 0
    assert all(f"phalanx:{name}" in " ".join(found) for name in FAMILIES)
    assert next(iter(found["phalanx:build_info"].values())) == 1


def test_counts_of_several_ingresses_add_up():
    one, two = filled_metrics(), filled_metrics()
    two.observe_end("stop")
    two.observe_end("length")
    two.observe_inter_token(0.01)
    found = parse(one.render([], add([one.snapshot(), two.snapshot()])))
    ended = found["phalanx:request_success_total"]
    assert ended == {label(finished_reason="stop"): 3, label(finished_reason="length"): 1}
    assert found["phalanx:inter_token_latency_seconds_count"] == {label(): 3}
    assert found["phalanx:inter_token_latency_seconds_sum"] == {label(): pytest.approx(0.03)}
    assert len(found["phalanx:ingress_cpu_seconds_total"]) == 2


def test_what_a_dead_ingress_counted_stays():
    totals = SnapshotTotals()
    one, two = filled_metrics(), filled_metrics()
    totals.put("one", one.snapshot())
    totals.put("two", two.snapshot())
    one.observe_end("stop")
    totals.put("one", one.snapshot())  # replaces, does not add
    assert totals.total()["request_success"] == {("stop",): [3]}
    totals.retire("one", GAUGES)
    totals.retire("unknown", GAUGES)
    assert totals.total()["request_success"] == {("stop",): [3]}
    assert len(totals.total()["ingress_resident_memory_bytes"]) == 1
    totals.put("one", one.snapshot())  # it was only late
    assert totals.total()["request_success"] == {("stop",): [3]}
    assert len(totals.total()["ingress_resident_memory_bytes"]) == 2


def test_rendering_does_not_change_the_snapshots():
    metrics = filled_metrics()
    snapshot = metrics.snapshot()
    add([snapshot, snapshot])
    metrics.render([], snapshot)
    assert snapshot["request_success"] == {("stop",): [1]}


def test_an_observation_per_token_is_cheap():
    observe = IngressMetrics().observe_inter_token
    count = 20_000
    best = min(timeit.repeat(lambda: observe(0.02), number=count, repeat=5))
    assert best / count < 5e-6  # 0.2 us on a quiet machine


def test_ranks_as_json():
    api = Api()
    api.backend.stats = [
        {
            "rank": 0,
            "epoch": 2,
            "running": 3,
            "generation_tokens": 70,
            "draft_tokens": 9,
            "kv_waiting": 0,
            "kv_restored_host": 64,
            "prefill_cap": 512,
            "step_seconds": {"forward": 1.5},
        },
        {"rank": 1, "waiting": 2, "kv_cache_usage": 0.25, "secret": "not shown"},
    ]
    answer = api.get("/ranks").json()
    assert answer["model"] == "tiny/model" and answer["time"] > 1e9
    zero, one = answer["ranks"]
    assert (zero["rank"], zero["running"], zero["generation_tokens"]) == (0, 3, 70)
    assert (zero["epoch"], one["epoch"]) == (2, 0)
    assert (zero["draft_tokens"], one["accepted_tokens"]) == (9, 0)
    assert (zero["kv_waiting"], one["kv_waiting"]) == (0, None)
    assert (zero["kv_restored_host"], one["kv_restored_disk"]) == (64, 0)
    assert zero["step_seconds"] == {"forward": 1.5}
    assert (zero["prefill_cap"], one["prefill_cap"]) == (512, None)
    assert (one["rank"], one["waiting"], one["kv_cache_usage"], one["steps"]) == (1, 2, 0.25, 0)
    assert zero.keys() == one.keys() and "secret" not in one


def test_ranks_that_do_not_answer_are_a_503():
    api = Api(stats_timeout_s=0.01)

    async def silent():
        await asyncio.Event().wait()

    api.backend.rank_stats = silent
    assert_error(api.get("/ranks"), 503, "engine_unavailable")


def test_a_rank_that_does_not_answer_is_named_and_hides_no_other():
    api = Api()
    api.backend.stats = [{"rank": 0, "silent": True}, {"rank": 1, "running": 3}]
    lines = [line for line in api.get("/metrics").text.splitlines() if 'rank="' in line]
    assert [line.rpartition(" ")[2] for line in lines if "rank_answers{" in line] == ["0.0", "1.0"]
    assert [line for line in lines if 'rank="0"' in line] == lines[:1]
    (running,) = [line for line in lines if line.startswith("phalanx:num_requests_running{")]
    assert 'rank="1"' in running and running.endswith(" 3.0")
    answer = api.get("/ranks").json()
    assert [it["rank"] for it in answer["ranks"]] == [1] and answer["silent_ranks"] == [0]
    silent = Api()
    silent.backend.stats = [{"rank": 0, "silent": True}]
    assert_error(silent.get("/ranks"), 503, "engine_unavailable")
