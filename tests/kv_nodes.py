"""Two nodes on one machine: a host tier with a keeper of its own and a fetcher each. Needs the package nixl-cu12."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.kv_tier_case import TierCase, tier_case
from workers.kv_transfer.connector import NOWHERE, Item, Transfer
from workers.kv_transfer.kv_pull import FetchLimits
from workers.kv_transfer.nixl_fetcher import NixlFetcher
from workers.wire.request import NO_OUTPUT, EngineRequest

OVER_TCP = {"UCX_TLS": "tcp"}
"""Otherwise UCX reads the memory of another process of this machine at once."""
PATIENT = FetchLimits(answer_s=60, fetch_s=60, part_s=60, lease_s=60)


@dataclass
class Node:
    case: TierCase
    fetcher: NixlFetcher

    def fetch(self, items: list[Item], source: str) -> Transfer:
        """Wait for the end of a fetch."""
        transfer = self.begin(items, source)
        return self.wait(transfer)

    def begin(self, items: list[Item], source: str, *, private: bool = False) -> Transfer:
        request = EngineRequest(
            request_id="x", ingress_id="", prompt_token_ids=[], params=NO_OUTPUT, kv_source=source
        )
        transfer = Transfer([it._replace(place=NOWHERE) for it in items], request, private)
        self.fetcher.fetch(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> Transfer:
        ended = wait_for(self.fetcher.ended, "the fetch ends")
        assert ended == [transfer]
        return transfer

    def count(self, name: str) -> float:
        return self.fetcher.counts().get(name, 0)

    @property
    def pid(self) -> int:
        """Of the process that runs NIXL."""
        process = self.fetcher._process
        assert process is not None
        return process._popen.pid


def wait_for(condition, what: str, seconds: float = 60):
    """Return the first true result of `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds:g} s: {what}")


@contextmanager
def node(
    layout: str = "heads",
    limits: FetchLimits = PATIENT,
    *,
    compatibility: bytes | None = None,
    num_bytes: int = 2**22,
    **sizes: int,
) -> Iterator[Node]:
    """A node whose caches have random bytes. `compatibility`: of its contents, if not that of the layout."""
    with tier_case("cpu", layout, num_bytes=num_bytes, **sizes) as case:
        if compatibility is not None:
            case.tier.unbind()
            case.contents.compatibility = compatibility
            case.tier.bind(case.contents)
            assert case.tier.wait_ready(60)
        fetcher = NixlFetcher(case.tier._config, "127.0.0.1", OVER_TCP, replace(limits))
        try:
            fetcher.bind(case.contents)
            assert fetcher.wait_ready(60), "there is no source"
            yield Node(case, fetcher)
            fetcher.unbind()
        finally:
            fetcher.close()
