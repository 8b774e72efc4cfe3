"""The adapters of a rank process in host memory, by id, and their copies into slots.

An adapter is read and checked in the thread of the caller, beside the steps; a step copies it into a slot when a
sequence needs it. Knows nothing of requests.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from workers import hub
from workers.adapters.peft_folder import PeftFolder
from workers.adapters.pools import AdapterPools
from workers.lora_config import AdapterError, LoadedAdapter

logger = logging.getLogger(__name__)

Gather = Callable[[Any], Sequence[Any]]

# Adapters that are read side by side: digests, copies and pinned memory take long, and release Python's lock.
READERS = 4


class AdapterStore:
    """The adapters of one rank process; every method may be called from any thread.

    errors   why adapters of the configuration cannot be used, by id: requests for them are refused
    """

    def __init__(self, pools: AdapterPools):
        self.pools = pools
        self.errors: Mapping[int, str] = {}
        self._wanted: set[int] = set()
        self._staged: dict[int, torch.Tensor] = {}
        self._digests: dict[int, str] = {}
        self._changing = threading.Lock()

    def __contains__(self, adapter: int) -> bool:
        return adapter in self._staged

    def __len__(self) -> int:
        return len(self._staged)

    def begin(self, adapter: LoadedAdapter) -> Callable[[], str]:
        """Return a call that reads an adapter into host memory, for any thread, and returns the digest of its files.

        It keeps nothing if `drop` comes before its end, because another rank may fail while this one reads. Raises
        AdapterError and HubError.
        """
        self._wanted.add(adapter.id)
        return partial(self._stage, adapter)

    def _stage(self, adapter: LoadedAdapter) -> str:
        digest = self._digests.get(adapter.id)
        if digest is not None:  # `drop` may come at any time
            return digest
        hub.fetch_adapter(adapter.path, adapter.revision)
        folder = PeftFolder.read(adapter.folder)
        staged = self.pools.stage(folder)
        with self._changing:
            if adapter.id in self._wanted:
                self._digests[adapter.id] = folder.digest
                self._staged[adapter.id] = staged
        return folder.digest

    def drop(self, adapter: int) -> None:
        """Free the host memory of an adapter; ids that are not there are ignored."""
        with self._changing:
            self._wanted.discard(adapter)
            self._staged.pop(adapter, None)
            self._digests.pop(adapter, None)

    def agree(self, adapters: Collection[LoadedAdapter], gather: Gather | None) -> None:
        """Hold these adapters and no others, as far as every rank can read them from equal files. Collective.

        What a rank cannot read, for example because its folder is gone, is in no rank and in `errors`.
        gather   returns a value of every rank; None: there are no other ranks
        """
        for gone in self._wanted - {it.id for it in adapters}:
            self.drop(gone)
        with ThreadPoolExecutor(READERS, "adapters") as pool:
            read = pool.map(self._try, adapters)
            own = {str(it.id): found for it, found in zip(adapters, read, strict=True)}
        of_ranks = [own] if gather is None else gather(own)
        errors = {}
        for adapter in adapters:
            found = [of_rank[str(adapter.id)] for of_rank in of_ranks]
            problem = next((reason for _, reason in found if reason), "")
            if not problem and len({digest for digest, _ in found}) > 1:
                problem = f"the ranks read different files in {adapter.folder}"
            if problem:
                logger.error("adapter %s cannot be used: %s", adapter.name, problem)
                errors[adapter.id] = problem
                self.drop(adapter.id)
        self.errors = errors

    def _try(self, adapter: LoadedAdapter) -> tuple[str, str]:
        """Read an adapter into host memory; return the digest of its files, or why it cannot be used."""
        try:
            return self.begin(adapter)(), ""
        except (AdapterError, hub.HubError) as error:
            return "", str(error)

    def write(self, slot: int, adapter: int, piece: int) -> None:
        """Copy a piece of an adapter into a slot, see AdapterPools.

        An adapter may be dropped while a sequence of an ended request still waits for a slot, or for its last piece.
        """
        staged = self._staged.get(adapter)
        if staged is not None:
            self.pools.write(slot, staged, piece)
        elif piece == 0:
            logger.warning("adapter %d was unloaded before it came into slot %d", adapter, slot)
