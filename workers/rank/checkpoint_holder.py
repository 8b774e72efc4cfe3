"""The checkpoint on one node: its files, a server that sends them to other nodes, a copy from such a server."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait

from workers import hub
from workers.config import ModelSection
from workers.weights.checkpoint_copy import CheckpointServer, CopyAddress, copy_files
from workers.weights.checkpoint_files import CheckpointFiles, FileFacts, find_files

PROGRESS_S = 1.0  # between two reports of a fetch


class CheckpointHolder:
    """The files of `model` on the node with `address`. Calls read and write files; one call at a time."""

    def __init__(self, model: ModelSection, address: str):
        self._model, self._address = model, address
        self._server: CheckpointServer | None = None

    def fetch(self, token: str | None, progress: Callable[[int, int], None]) -> None:
        """Fetch a model of the Hub, if this node lacks files of it. Raises HubError.

        token      of the Hub; None = that of this node, if it has one
        progress   gets the bytes in the cache, and 0 for their total, which is unknown
        """
        model = self._model
        if model.revision is None:
            return
        if token is not None:
            os.environ["HF_TOKEN"] = token  # where the Hub's client looks for it
        fetch = hub.fetch_description if model.weights == "dummy" else hub.fetch_weights
        with ThreadPoolExecutor(1) as thread:
            fetching = thread.submit(fetch, model.path, model.revision)
            while not wait([fetching], PROGRESS_S).done:
                progress(hub.fetched_bytes(model.path, model.revision), 0)
            fetching.result()

    def files(self) -> CheckpointFiles:
        """Return the files that ranks read."""
        return find_files(self._model.folder, weights=self._model.weights == "checkpoint")

    def share(self) -> CopyAddress:
        """Send the files to holders of the returned key, until `close`."""
        self.close()
        self._server = CheckpointServer(
            self._model.folder, frozenset(self.files().files), self._address
        )
        return self._server.address

    def copy(
        self,
        address: CopyAddress,
        files: Mapping[str, FileFacts],
        progress: Callable[[int, int], None],
    ) -> None:
        """Copy those of `files` that this node lacks. Raises CopyError."""
        copy_files(address, files, self._model.folder, progress)

    def close(self) -> None:
        """Stop the server, if it runs."""
        if self._server is not None:
            self._server.close()
            self._server = None
