"""A host tier over caches of a device, without a scheduler: contents go out and come back, or are not found."""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from kernels.host.processes import start_ticks
from kernels.interface.kv_layout import KVGroup, PagedFp8Heads, PagedHeads, PagedLatents
from workers.kv_transfer.connector import Item, Transfer
from workers.kv_transfer.contents import CacheContents, Rows, block_pieces
from workers.kv_transfer.host_tier import HostTier
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient

LAYOUTS = {
    "heads": PagedHeads(2, 64),
    "fp8": PagedFp8Heads(2, 64),
    "latents": PagedLatents(576),
}


def kill_process(pid: int) -> None:
    """Kill a process and wait for its end: nothing may reap an orphan, which stays a zombie then."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        assert select.select([process], [], [], 60)[0], "the process has not ended"
    finally:
        os.close(process)


def key(*path: object) -> bytes:
    return blake2b(repr(path).encode(), digest_size=32).digest()


class TierCase:
    """Caches of random bytes, the rows of their contents, and a tier over them.

    Blocks have `num_layers` layers of one layout, states one piece of `state_bytes` a slot.
    """

    def __init__(
        self,
        tier: HostTier,
        device: torch.device,
        layout: str,
        *,
        num_blocks: int = 48,
        num_layers: int = 3,
        state_bytes: int = 40_000,
    ):
        self.tier, self.device, size = tier, device, 16
        shape = LAYOUTS[layout].shape(num_blocks, size)
        in_bytes = LAYOUTS[layout].in_bytes
        self.caches = [
            torch.empty(shape, dtype=torch.uint8 if in_bytes else torch.bfloat16, device=device)
            for _ in range(num_layers)
        ]
        self.states = torch.empty(6, state_bytes, dtype=torch.uint8, device=device)
        group = KVGroup(LAYOUTS[layout], tuple(range(num_layers)))
        pieces = block_pieces([group], self.caches, num_blocks, size, 2)
        self.contents = CacheContents(Rows(pieces), Rows([self.states]), key(layout)[:16], device)
        self.scramble(0)

    def scramble(self, seed: int) -> None:
        """Fill all caches with other bytes."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in (*self.caches, self.states):
            tensor.view(-1).view(torch.uint8).random_(0, 255, generator=generator)

    def rows(self, is_state: bool, places: list[int]) -> torch.Tensor:
        kind = self.contents.of(is_state)
        found = torch.zeros(len(places), kind.row_bytes, dtype=torch.uint8, device=self.device)
        kind.pack(places, found)
        return found.cpu()

    def blocks(self, places: list[int], session: str = "s") -> list[Item]:
        """A chain of blocks in these places."""
        keys = [b"", *(key(session, number) for number in range(len(places)))]
        return [Item(keys[n + 1], b"", False, it, keys[n], n) for n, it in enumerate(places)]

    def state(self, slot: int, number: int, session: str = "s") -> Item:
        parent = key(session, number - 1) if number else b""
        return Item(key(session, number), b"s", True, slot, parent, number)

    def run(self, transfer: Transfer, *, load: bool) -> Transfer:
        """Run a transfer to its end."""
        (self.tier.load if load else self.tier.save)(transfer)
        return self.end_of(transfer)

    def end_of(self, transfer: Transfer) -> Transfer:
        """Wait for the end of the only transfer that is under way."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for ended in self.tier.ended():
                assert ended is transfer
                return ended
            time.sleep(1e-3)
        raise AssertionError("the transfer does not end")


def keeper_config(num_bytes: int, disk_path: str | None = None) -> KeeperConfig:
    """Of a keeper that no other test has."""
    return KeeperConfig(
        name=os.urandom(16).hex(),
        num_bytes=num_bytes,
        owner=(os.getpid(), start_ticks(os.getpid())),
        disk_path=disk_path,
        disk_bytes=num_bytes,
    )


@contextmanager
def tier_case(
    device: str, layout: str, *, num_bytes: int = 2**22, disk_path: str | None = None, **sizes: int
) -> Iterator[TierCase]:
    """A tier with a keeper of its own."""
    config = keeper_config(num_bytes, disk_path)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    tier = HostTier(config, place)
    try:
        case = TierCase(tier, place, layout, **sizes)
        tier.bind(case.contents)
        assert tier.wait_ready(60), "the tier does not start"
        yield case
        tier.unbind()
    finally:
        tier.close()


@contextmanager
def second_client(case: TierCase) -> Iterator[KeeperClient]:
    """A connection of the test: the one of the tier belongs to the tier's thread."""
    client = KeeperClient(case.tier._config)
    try:
        yield client
    finally:
        client.close()


def there_and_back(case: TierCase) -> None:
    """Blocks and a state come back byte for byte into other places, beside contents that were never saved."""
    items = [*case.blocks(list(range(40))), case.state(2, 39)]
    blocks, state = case.rows(False, list(range(40))), case.rows(True, [2])
    saved = case.run(Transfer(items), load=False)
    assert saved.done == {item.name for item in items}
    assert case.run(Transfer(items), load=False).done == set(), "everything is there"
    case.scramble(1)
    # Blocks 7 to 46 are other places; a session that was not saved is not there.
    wanted = [*case.blocks([*range(7, 47)]), case.state(4, 39), *case.blocks([1, 2], "other")]
    loaded = case.run(Transfer(wanted), load=True)
    assert loaded.done == {item.name for item in items} and loaded.origin == {"host": 41}
    assert torch.equal(case.rows(False, list(range(7, 47))), blocks)
    assert torch.equal(case.rows(True, [4]), state)


def damaged_rows(case: TierCase) -> None:
    """A row that changed in host memory is not used, and is gone."""
    items = case.blocks([0, 1, 2])
    case.run(Transfer(items), load=False)
    size = case.tier._unit_bytes
    with second_client(case) as client:
        client.layout(case.contents.compatibility, size, 0)
        ((units, _, _),) = client.find([items[1].name])  # type: ignore[misc]
        client.memory[units[0] * size + size // 3] ^= 4
    assert case.run(Transfer(items), load=True).done == {items[0].name, items[2].name}
    assert case.run(Transfer(items), load=True).done == {items[0].name, items[2].name}
    assert case.tier.counts()["missed"] == 1
