"""When steps are cut: by configuration, by measurement, and the same on every rank."""

import json

import pytest

from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.deepep import DeepEpAllToAll
from kernels.all2all.local import LocalAllToAll
from kernels.all2all.shm import ShmAllToAll
from workers.config import OverlapConfig
from workers.overlap import tuning as overlap_tuning
from workers.overlap.cache import cache_path, load_policy, save_policy, software
from workers.overlap.policy import (
    OverlapPolicy,
    Sample,
    configured,
    never,
    threshold,
    with_measured,
)
from workers.overlap.tuning import best_comm_sms, tune
from workers.stats import versions
from workers.stats.versions import OURS
from workers.step.step_sync import ForwardMode

DECODE, EXTEND, MIXED, IDLE = (
    ForwardMode.DECODE,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
    ForwardMode.IDLE,
)


def alone(value):
    return [value]


def test_off_is_off():
    policy, unknown = configured(OverlapConfig(mode="off", min_decode_tokens=1), AllGatherAllToAll)
    assert not unknown and not policy.enabled
    assert not policy.wants(DECODE, 10_000) and not policy.wants(EXTEND, 10_000)


@pytest.mark.parametrize("all2all", [LocalAllToAll, ShmAllToAll])
def test_auto_is_off_where_there_is_nothing_to_hide(all2all):
    policy, unknown = configured(OverlapConfig(), all2all)
    assert not unknown and not policy.enabled
    assert all(f"{all2all.name}: {all2all.no_overlap_reason}" in x for x in policy.lines())


def test_on_cuts_all_that_can_be_cut():
    policy, unknown = configured(OverlapConfig(mode="on", num_ubatches=3), ShmAllToAll)
    assert not unknown
    assert policy.wants(DECODE, 3) and policy.wants(MIXED, 3) and not policy.wants(EXTEND, 2)


def test_ranks_without_tokens_run_along():
    policy, _ = configured(OverlapConfig(mode="on"), AllGatherAllToAll)
    assert policy.wants(IDLE, 0)


def test_numbers_of_the_configuration_need_no_measurement():
    policy, unknown = configured(
        OverlapConfig(min_decode_tokens=64, comm_sms=16), AllGatherAllToAll
    )
    assert unknown == {"prefill"}
    assert policy.wants(DECODE, 64) and not policy.wants(DECODE, 63)
    assert not policy.wants(EXTEND, 10_000), "not before it is measured"
    assert policy.comm_sms == 16
    assert "overlap.min_decode_tokens" in policy.lines()[0]


@pytest.mark.parametrize(("wanted", "granted"), [(41, 32), (7, 6), (1, 2), (16, 16)])
def test_the_experts_get_what_the_exchange_does_not_take(wanted: int, granted: int):
    """DeepEP takes an even number of at most 32, and SMs beyond would idle."""
    policy, _ = configured(OverlapConfig(comm_sms=wanted), DeepEpAllToAll)
    assert policy.comm_sms == granted
    reason = policy.reasons["comm_sms"]
    assert (f"is {wanted}, deepep takes {granted} of them" in reason) == (wanted != granted)


def samples(**seconds: tuple[float, float]) -> list[Sample]:
    return [Sample(int(name[1:]), *pair) for name, pair in seconds.items()]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], None),
        (samples(t128=(1.0, 2.0), t256=(2.0, 2.1)), None),
        (samples(t128=(1.0, 2.0), t256=(2.0, 1.5), t512=(4.0, 3.0)), 256),
        (samples(t128=(1.0, 0.9), t256=(2.0, 1.5)), 128),
        # a win below a loss is no reason to cut
        (samples(t128=(1.0, 0.5), t256=(2.0, 2.1), t512=(4.0, 3.0)), 512),
        (samples(t128=(1.0, 0.5), t256=(2.0, 2.1)), None),
        # less than two percent is noise
        (samples(t128=(1.0, 0.99)), None),
        (samples(t128=(1.0, 0.97)), 128),
    ],
)
def test_the_threshold_is_where_ubatches_begin_to_win_for_good(measured, expected):
    assert threshold(measured) == expected
    policy = with_measured(never("not measured"), "prefill", measured)
    assert policy.min_prefill_tokens == expected and policy.min_decode_tokens is None
    assert policy.wants(EXTEND, 10_000) == (expected is not None)
    assert not policy.wants(DECODE, 10_000)


def test_the_reason_has_the_numbers():
    policy = with_measured(
        never(""), "decode", samples(t128=(1.0, 2.0), t256=(2e-3, 1.5e-3), t512=(4.0, 3.0))
    )
    line = policy.lines()[0]
    assert "from 256 sequences on" in line
    assert "2.00 ms whole, 1.50 ms in ubatches, +33 %" in line


def test_the_slowest_rank_counts_and_all_agree():
    seconds = {128: ((1.0, 0.5), (1.0, 1.1)), 256: ((2.0, 1.0), (2.0, 1.5))}

    def run_on(rank):
        return lambda phase, size, ubatched: seconds[size][rank][ubatched]

    def gather_of(rank):
        """What both ranks would bring, of which this one knows its own."""

        def gather(mine):
            size = next(s for s, pairs in seconds.items() if pairs[rank] == mine[:2])
            return [(*seconds[size][r], mine[2]) for r in range(2)]

        return gather

    found = [
        tune(never(""), ["prefill"], {"prefill": 256}, run_on(rank), gather_of(rank))
        for rank in range(2)
    ]
    assert found[0] == found[1]
    assert found[0].min_prefill_tokens == 256


def test_sizes_are_powers_of_two_up_to_the_largest():
    assert overlap_tuning.sizes_to_measure("prefill", 700) == [128, 256, 512, 700]
    assert overlap_tuning.sizes_to_measure("decode", 16) == [16]
    assert overlap_tuning.sizes_to_measure("decode", 15) == []


@pytest.mark.parametrize(
    ("gains", "expected", "asked"),
    [
        ({}, None, [1000]),
        ({1000: 1}, 1000, [1000, 512]),
        ({1000: 1, 512: 1, 128: 1}, 512, [1000, 512, 256]),
        ({1000: 1, 512: 1, 256: 1, 128: 1}, 128, [1000, 512, 256, 128]),
        ({128: 1, 256: 1}, None, [1000]),
    ],
)
def test_measuring_goes_down_to_the_first_size_that_loses(gains, expected, asked):
    runs = []

    def run(phase, size, ubatched):
        runs.append((size, ubatched))
        return 0.5 if ubatched and size in gains else 1.0

    policy = tune(never(""), ["prefill"], {"prefill": 1000}, run, alone)
    assert policy.min_prefill_tokens == expected
    assert runs == [(size, ubatched) for size in asked for ubatched in (False, True)]
    everything = [Sample(s, 1.0, 0.5 if s in gains else 1.0) for s in (128, 256, 512, 1000)]
    assert threshold(everything) == expected, "sizes that were left out count"


def test_measuring_ends_with_its_budget():
    asked = []

    def run(phase, size, ubatched):
        asked.append(size)
        return 0.5 if ubatched else 1.0

    policy = tune(never(""), ["decode"], {"decode": 1024}, run, alone, budget_s=-1.0)
    assert asked == [1024, 1024]
    assert policy.min_decode_tokens == 1024, "what was not measured is not cut"


def test_sizes_that_are_cut_run_before_there_is_traffic():
    sizes = overlap_tuning.sizes_to_warm_up
    assert sizes("prefill", None, 1000) == []
    assert sizes("prefill", 2, 1000) == [128, 256, 512, 1000]
    assert sizes("prefill", 300, 1000) == [256, 512, 1000]
    assert sizes("decode", 4, 15) == []


def test_the_exchange_gets_the_multiprocessors_that_make_a_step_fastest():
    limits = []
    times = {None: 3.0, 8: 2.5, 16: 2.0, 24: 2.2}

    def run(phase, size, ubatched):
        assert (phase, size, ubatched) == ("prefill", 4096, True)
        return times[limits[-1]]

    assert best_comm_sms((8, 16, 24), 4096, run, alone, limits.append) == 16
    times[None] = 1.0
    assert best_comm_sms((8, 16, 24), 4096, run, alone, limits.append) is None


def test_the_slowest_rank_chooses_the_multiprocessors():
    limits = []
    times = {None: (3.0, 3.0), 8: (1.0, 2.9), 16: (2.0, 2.1)}

    def gather(mine):
        return times[limits[-1]]

    def run(phase, size, ubatch):
        return times[limits[-1]][0]

    assert best_comm_sms((8, 16), 4096, run, gather, limits.append) == 16


def test_software_covers_kernels_and_workers():
    for folder, file in zip(OURS, ("pending.py", "config.py"), strict=True):
        assert (folder / file).is_file()


def test_other_software_is_measured_anew(tmp_path, monkeypatch):
    """A change of any of our sources, or of a library, may move a threshold."""
    (tmp_path / "inner").mkdir()
    source, other = tmp_path / "inner" / "kernel.c", tmp_path / "notes.md"
    for path in (source, other):
        path.write_text("one")
    found = software([tmp_path])
    other.write_text("two")
    assert software([tmp_path]) == found
    monkeypatch.setattr(versions, "version", lambda library: "9.9")
    assert software([tmp_path]) != found
    monkeypatch.undo()
    source.write_text("two")
    assert software([tmp_path]) != found
    assert software() == software() != software([tmp_path])


def test_a_policy_is_kept_under_its_facts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path({"num_ranks": 2, "hardware": "this"})
    assert path == cache_path({"hardware": "this", "num_ranks": 2})
    assert path != cache_path({"hardware": "this", "num_ranks": 4})
    assert load_policy(path) is None
    policy = OverlapPolicy(None, 512, 16, {"decode": "a", "prefill": "b", "comm_sms": "c"})
    save_policy(path, policy)
    assert load_policy(path) == policy
    path.write_text(json.dumps({"another": "version"}))
    assert load_policy(path) is None
