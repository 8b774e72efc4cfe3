"""KV of one node read by another one over NIXL: equal bytes or none, whatever ends meanwhile."""

import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import zmq

from tests.kv_nodes import OVER_TCP, PATIENT, Node, node, wait_for
from tests.kv_tier_case import LAYOUTS, key, second_client
from workers.kv_transfer.connector import Transfer
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.kv_pull import FetchLimits
from workers.kv_transfer.kv_source import Form, SourceLink
from workers.kv_transfer.nixl_memory import nixl_unavailable

pytestmark = pytest.mark.skipif(nixl_unavailable() is not None, reason=str(nixl_unavailable()))
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_contents_of_another_node_are_equal(layout: str) -> None:
    with node(layout) as there, node(layout) as here:
        places, slots = [3, 7, 8, 40, 41], [2, 4]
        items = there.case.blocks(places)
        states = [there.case.state(slot, number) for number, slot in enumerate(slots, 2)]
        there.case.run(Transfer([*items, *states]), load=False)
        here.case.scramble(1)
        absent = there.case.state(0, 4)
        fetched = here.fetch([*items, *states, absent], there.fetcher.source)
        assert fetched.done == {item.name for item in [*items, states[-1]]}, "the last state"
        assert here.count("bytes") > 0 and not here.count("missed")
        loaded = here.case.run(Transfer([*items, states[-1]]), load=True)
        assert loaded.done == fetched.done
        for is_state, which in ((False, places), (True, slots[-1:])):
            expected = there.case.rows(is_state, which)
            assert torch.equal(here.case.rows(is_state, which), expected)


def test_what_is_here_already_is_not_fetched() -> None:
    with node() as there, node() as here:
        items = there.case.blocks([1, 2, 3])
        there.case.run(Transfer(items), load=False)
        here.case.run(Transfer(here.case.blocks([5])), load=False)
        assert here.fetch(items, there.fetcher.source).done == {it.name for it in items[1:]}


def test_damaged_bytes_are_not_published() -> None:
    with node() as there, node() as here:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items), load=False)
        size = there.case.tier._unit_bytes
        with second_client(there.case) as client:
            assert client.join(there.case.contents.compatibility, size)
            ((units, _, _),) = client.find([items[1].name])  # type: ignore[misc]
            client.memory[units[0] * size + size // 3] ^= 4
        fetched = here.fetch(items, there.fetcher.source)
        assert fetched.done == {items[0].name, items[2].name} and here.count("damaged") == 1
        with second_client(here.case) as client:
            assert client.join(here.case.contents.compatibility, size)
            assert [it is None for it in client.find([it.name for it in items])] == [0, 1, 0]


def test_contents_of_another_form_are_refused() -> None:
    with node() as there, node(compatibility=b"another model...") as here:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items), load=False)
        assert not here.fetch(items, there.fetcher.source).done
        assert here.count("refused") == 3 and not here.count("lost")


def test_what_the_source_lacks_counts_as_missed() -> None:
    with node() as there, node() as here:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items[:2]), load=False)
        assert here.fetch(items, there.fetcher.source).done == {it.name for it in items[:2]}
        assert here.count("missed") == 1


def test_contents_of_adapters_stay_private() -> None:
    with node() as there, node() as here:
        items = there.case.blocks([0])
        there.case.run(Transfer(items, private=True), load=False)
        assert here.wait(here.begin(items, there.fetcher.source, private=True)).done
        assert here.count("fetches") == 1


@pytest.mark.exhaustive
def test_a_source_that_ended_costs_a_time_limit_and_has_a_successor() -> None:
    limits = replace(PATIENT, answer_s=1)
    with node() as there, node(limits=limits) as here:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items), load=False)
        before = there.fetcher.source
        os.kill(there.pid, signal.SIGKILL)
        assert not here.fetch(items, before).done
        assert here.count("source_lost") == 3 and not here.count("lost")
        assert not here.fetch(items, "no source").done
        wait_for(lambda: there.fetcher.source not in ("", before), "the source has a successor")
        assert there.count("lost") == 1
        assert here.fetch(items, there.fetcher.source).done == {it.name for it in items}


@pytest.mark.exhaustive
def test_the_end_of_the_own_process_ends_what_waits() -> None:
    with node() as there, node() as here:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items), load=False)
        os.kill(there.pid, signal.SIGSTOP)  # the fetch waits for the source
        try:
            transfer = here.begin(items, there.fetcher.source)
            os.kill(here.pid, signal.SIGKILL)
            assert not here.wait(transfer).done and here.count("lost") == 1
        finally:
            os.kill(there.pid, signal.SIGCONT)
        assert here.fetcher.wait_ready(60)
        assert here.fetch(items, there.fetcher.source).done == {it.name for it in items}


@pytest.mark.exhaustive
def test_a_process_that_does_not_answer_is_replaced() -> None:
    limits = FetchLimits(answer_s=60, fetch_s=0.2, part_s=0.2, lease_s=60)
    with node() as there, node(limits=limits) as here:
        os.kill(here.pid, signal.SIGSTOP)
        transfer = here.begin(there.case.blocks([0, 1]), there.fetcher.source)
        assert not here.wait(transfer).done
        assert transfer.seconds >= limits.wait_s and here.count("lost") == 1
        assert here.fetcher.wait_ready(60)


@pytest.mark.exhaustive
def test_the_end_of_a_keeper_costs_its_contents_and_no_more() -> None:
    with node() as there, node() as here:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items), load=False)
        with second_client(there.case) as client:
            os.kill(client.keeper[0], signal.SIGKILL)
        wait_for(lambda: there.count("lost"), "the process ends with the keeper")
        assert there.fetcher.wait_ready(60)
        saves = partial(there.case.run, load=False)
        wait_for(lambda: saves(Transfer(items)).done, "the tier has another keeper")
        assert here.fetch(items, there.fetcher.source).done == {it.name for it in items}


def test_without_a_form_or_a_source_a_fetch_ends_at_once() -> None:
    with node() as there, node() as here:
        here.fetcher.unbind()
        assert not here.fetch(there.case.blocks([0]), there.fetcher.source).done
        assert here.count("source_lost") == 1 and not here.count("fetches")


def all_units_are_free(there: Node) -> bool:
    """Whether nothing is pinned: everything can be reserved at once."""
    tier = there.case.tier
    with second_client(there.case) as client:
        assert client.join(there.case.contents.compatibility, tier._unit_bytes)
        num_units = tier._config.num_bytes // tier._unit_bytes
        names = [key("all", number) for number in range(num_units)]
        found = client.reserve([Place(name, b"", b"", 0, 1) for name in names])
        client.publish(dict.fromkeys(names))
    return None not in found


def begin_lease(there: Node, link: SourceLink) -> None:
    items = there.case.blocks([0, 1, 2])
    there.case.run(Transfer(items), load=False)
    form = Form(there.case.contents.compatibility, there.case.tier._unit_bytes)
    _, held = link.find(form, [item.name for item in items], 60)
    assert None not in held


def test_a_lease_pins_contents_until_its_reader_ends_it_or_sends_no_beat() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with node() as there:
        with closing(SourceLink(context, there.fetcher.source)) as link:
            begin_lease(there, link)
            assert not all_units_are_free(there)
        wait_for(lambda: all_units_are_free(there), "the reader ends its lease")
    limits = replace(PATIENT, lease_s=0.5)
    with node(limits=limits) as there, closing(SourceLink(context, there.fetcher.source)) as link:
        begin_lease(there, link)
        wait_for(lambda: all_units_are_free(there), "the lease ends without beats")


WITHOUT_INTERFACE = """
from workers.kv_transfer.nixl_memory import NixlMemory, NixlStartError
try:
    NixlMemory("here", memoryview(bytearray(2**16)))
except NixlStartError as error:
    print("caught", error, flush=True)
"""


def test_a_host_without_its_interface_is_a_start_error() -> None:
    paths = os.pathsep.join([".", *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_INTERFACE],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **OVER_TCP, "UCX_NET_DEVICES": "absent0", "PYTHONPATH": paths},
        cwd=ROOT,
    )
    assert "caught NIXL does not start on this host" in ended.stdout, ended.stdout + ended.stderr


READER = """
import json, os, signal, sys, time, zmq
from workers.kv_transfer.connector import Item
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient
from workers.kv_transfer.kv_pull import FetchJob, FetchLimits, Pull
from workers.kv_transfer.kv_source import Form, SourceLink
from workers.kv_transfer.nixl_memory import NixlMemory, ReadFailedError
from kernels.host.processes import start_ticks

source, other, how, names = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
beside = sys.argv[7:] == ["beside"]
owner = os.getpid(), start_ticks(os.getpid())
client = KeeperClient(KeeperConfig(os.urandom(8).hex(), 2**22, owner))
form = Form(bytes.fromhex(sys.argv[5]), int(sys.argv[6]))
client.layout(*form, 0)

class Interrupted(NixlMemory):
    def begin_read(self, there, runs):
        os.kill(other, getattr(signal, how))  # the source has answered, and no byte was read
        if beside:
            link = SourceLink(zmq.Context.instance(), source)
            link._socket.send(json.dumps(("find", form[0].hex(), form[1], [])).encode())
            time.sleep(0.5)  # the source takes it meanwhile
        return super().begin_read(there, runs)

memory = Interrupted("reader", client.memory)
items = [Item(bytes.fromhex(name), b"", False, -1, b"", n) for n, name in enumerate(names)]
limits = FetchLimits(answer_s=60, fetch_s=60, part_s=1, lease_s=60)
job = FetchJob(0, source, form, items, False, time.monotonic() + 60)
pull = Pull(job, memory, client.memory, client, limits)
begun = time.monotonic()
try:
    pull.run(lambda source: SourceLink(zmq.Context.instance(), source))
    print("done", len(pull.result.done), flush=True)
except ReadFailedError as error:
    assert how == "SIGKILL" or time.monotonic() - begun >= 1
    found = client.find([item.name for item in items])
    print("failed", pull.result.done, found.count(None), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_source_that_ends_or_stops_in_the_middle_of_a_read(how: str, tmp_path: Path) -> None:
    """The reader gets an error and publishes nothing; the end of its process frees what it had reserved."""
    with node() as there:
        output = read_from(there, there.pid, how, tmp_path)
    assert "failed set() 3" in output, output


def test_a_read_goes_on_while_the_keeper_of_the_source_is_stopped(tmp_path: Path) -> None:
    """Another reader asks for contents meanwhile, which the keeper does not find."""
    with node() as there:
        with second_client(there.case) as client:
            keeper, _ = client.keeper
        output = read_from(there, keeper, "SIGSTOP", tmp_path, "beside")
    assert "done 3" in output, output


def read_from(there: Node, pid: int, how: str, tmp_path: Path, *more: str) -> str:
    """Read from a node in a process that sends a signal to `pid` before the first byte; return its output."""
    output = tmp_path / "output"
    with output.open("w") as file:
        items = there.case.blocks([0, 1, 2])
        there.case.run(Transfer(items), load=False)
        names = ",".join(item.key.hex() for item in items)
        form = there.case.contents.compatibility.hex(), str(there.case.tier._unit_bytes)
        arguments = [there.fetcher.source, str(pid), how, names, *form, *more]
        try:
            # Its keeper holds the output open until the process is reaped, so the output is no pipe.
            subprocess.run(
                [sys.executable, "-c", READER, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=120,
                env={**os.environ, **OVER_TCP, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
                cwd=ROOT,
            )
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    return output.read_text()
