"""Prefill and decode groups on two hosts, KV over NIXL: in the middle of a fetch a cable is cut, and ranks are killed.

Every stream has the tokens of a server without roles. The ingress is on the host of the decode group, which then
answers without the cable, or on the host of the prefill group.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import wait_for
from tests.cluster.split import NUM_REQUESTS, START_S, Asked, Split, split
from workers.kv_transfer.nixl_memory import nixl_unavailable

REASON = hosts.unavailable() or nixl_unavailable()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(1500),
]

WAIT_S = 10.0
"""Longest time that a request waits for KV."""
LONG_ANSWERS = (0, 4)
BOTH_SERVE = {"prefill": "serving", "decode": "serving"}


def serve_a_mix(now: Split) -> None:
    """Long and short prompts at once."""
    asked = [now.ask(number) for number in range(NUM_REQUESTS)]
    for it in asked:
        it.end()
    assert now.metric("prompts_by_place_total", 'place="prefill"') > 0
    assert now.metric("prompts_by_place_total", 'place="decode"') > 0
    now.wait_fetched()


def stop_in_a_fetch(now: Split) -> tuple[Asked, list[Asked]]:
    """Return a request that waits in the middle of a fetch, and requests with tokens that come."""
    others = [now.ask(number) for number in LONG_ANSWERS]
    wait_for(lambda: all(it.runs for it in others), 60, "tokens come")
    now.reads.hold()
    asked = now.ask()
    wait_for(lambda: now.reads.held, 60, "a fetch is in its middle")
    return asked, others


def end(asked: Asked, others: Sequence[Asked], what: str) -> None:
    for it in (asked, *others):
        it.end()
    pauses = ", ".join(f"{it.pause:.1f}" for it in others)
    print(f"{what}: the request of the fetch paused {asked.pause:.1f} s, others {pauses} s")


def cut_the_cable_beside_the_decode_group(now: Split) -> None:
    """Requests end while the cable is out."""
    asked, others = stop_in_a_fetch(now)
    before = now.metric("kv_fetch_seconds_total")
    now.bed.pull_cable(now.other)
    now.reads.go()
    new, began = now.ask(), time.monotonic()
    asked.end()
    waited = now.metric("kv_fetch_seconds_total") - before
    assert 0 < waited < WAIT_S
    assert now.metric("kv_failures_total", 'kind="fetch_source_lost"') > 0
    new.end()
    print(f"a request without the cable: {time.monotonic() - began:.1f} s")
    now.bed.plug_cable(now.other)
    end(asked, others, f"the cable, {waited:.1f} s for KV")


def cut_the_cable_beside_the_prefill_group(now: Split, seconds: float) -> None:
    """All requests go on once the cable is back."""
    asked, others = stop_in_a_fetch(now)
    now.bed.pull_cable(now.other)
    now.reads.go()
    time.sleep(seconds)
    now.bed.plug_cable(now.other)
    end(asked, others, f"{seconds:g} s without the cable")


def serves_again(now: Split) -> None:
    began = time.monotonic()
    wait_for(lambda: now.states() == BOTH_SERVE, START_S, "both groups serve")
    now.wait_fetched()
    print(f"KV is fetched again after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_a_cable_that_is_cut_and_ranks_that_start_again(tmp_path: Path, first: str) -> None:
    with split(tmp_path, first) as now:
        serve_a_mix(now)
        if now.decode is now.head:
            cut_the_cable_beside_the_decode_group(now)
            serves_again(now)
        else:
            for seconds in (2, 9):
                cut_the_cable_beside_the_prefill_group(now, seconds)
                serves_again(now)
        for host, role in ((now.prefill, "prefill"), (now.decode, "decode")):
            asked, others = stop_in_a_fetch(now)
            now.kill_ranks(host)
            now.reads.go()
            end(asked, others, f"{role} ranks killed")
            serves_again(now)
