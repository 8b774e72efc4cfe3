"""Keeps responses in memory, the last used first, within a number of responses and of bytes.

Belongs to one ingress: replicas share no memory. Knows nothing of HTTP.
"""

import json
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from cluster.api.answer.events import to_json
from cluster.api.responses.background import BackgroundJob
from cluster.api.responses.items import Item
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError, NotFoundError

_DECODER = json.JSONDecoder()


@dataclass(slots=True)
class StoredResponse:
    """One response.

    response    the response object
    items       the conversation that it answers, as the JSON of a list of items, each with its id first
    owner       the key of its client; other keys do not find it
    job         its run without a connection, if it has one
    """

    response: dict[str, Any]
    items: bytes
    owner: str
    job: BackgroundJob | None
    num_bytes: int = 0

    def item(self, item_id: str) -> Item | None:
        """Return an item of the output or of the conversation; None if there is none with this id."""
        for item in reversed(self.response["output"]):
            if item["id"] == item_id:
                found: Item = item
                return found
        # In the text of an item the quotes would be escaped.
        start = self.items.rfind(b'{"id":' + to_json(item_id))
        if start < 0:
            return None
        found, _ = _DECODER.raw_decode(self.items[start:].decode("ascii"))
        return found

    @property
    def is_running(self) -> bool:
        """Whether the response is queued or in progress."""
        return self.response["status"] in ("queued", "in_progress")

    def count_bytes(self) -> int:
        """Return the memory of the response. Objects that several responses share count in each."""
        log = self.job.log if self.job is not None else None
        return _size(self.response) + len(self.items) + (log.num_bytes if log is not None else 0)


class ResponseStore:
    """The kept responses. `keep` may run in any thread.

    off     the reason for which responses are not kept; empty = they are kept
    """

    def __init__(self, max_responses: int, max_bytes: int, off: str = "") -> None:
        self.off = off
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def check_on(self, param: str | None) -> None:
        """Raise BadRequestError if responses are not kept; `param` is the field that needs it."""
        if self.off:
            what = f"{param} needs kept responses, but " if param else ""
            raise BadRequestError(
                f"{what}this server keeps no responses: {self.off}", param=param, code="no_store"
            )

    def find(self, response_id: str, owner: str = "") -> StoredResponse:
        """Return a response. Raises NotFoundError."""
        self.check_on(None)
        stored = self._find(response_id, owner)
        if stored is None:
            raise NotFoundError(self._missing(response_id), param="response_id")
        return stored

    def find_previous(self, response_id: str, owner: str = "") -> StoredResponse:
        """Return the response that a request goes on after. Raises BadRequestError."""
        param = "previous_response_id"
        self.check_on(param)
        stored = self._find(response_id, owner)
        if stored is None:
            raise BadRequestError(
                self._missing(response_id), param=param, code="previous_response_not_found"
            )
        if stored.is_running:
            raise BadRequestError(
                f"the response {response_id!r} is still {stored.response['status']}; "
                "wait until it is completed",
                param=param,
            )
        return stored

    def find_item(self, item_id: str, param: str, owner: str = "") -> Item:
        """Return an item of a kept response: of its output or of its conversation. Raises BadRequestError."""
        self.check_on(param)
        with self._lock:
            for stored in reversed(self._responses.values()):  # mostly of the last response
                item = stored.item(item_id) if stored.owner == owner else None
                if item is not None:
                    return item
        raise BadRequestError(
            f"{param}: no kept response has an item {item_id[:100]!r}", param=param
        )

    def attach(self, response_id: str, job: BackgroundJob) -> StoredResponse:
        """Add the job of a kept response, and return the response."""
        with self._lock:
            stored = self._responses[response_id]
            stored.job = job
            return stored

    def keep(self, response: dict[str, Any], items: bytes, owner: str = "") -> None:
        """Keep a response, or its new state. Drops the responses that were unused for longest, but none that runs."""
        with self._lock:
            earlier = self._responses.get(response["id"])
            job = earlier.job if earlier is not None else None
            stored = StoredResponse(response, items, owner, job)
            stored.num_bytes = stored.count_bytes()
            self._drop(response["id"])
            self._responses[response["id"]] = stored
            self.num_bytes += stored.num_bytes
            if len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
                self._shrink()

    def delete(self, response_id: str) -> None:
        """Forget a response."""
        with self._lock:
            self._drop(response_id)

    def _shrink(self) -> None:
        for response_id, stored in list(self._responses.items()):
            if not stored.is_running:
                self._drop(response_id)
            if len(self._responses) <= self._max_responses and self.num_bytes <= self._max_bytes:
                return

    def _find(self, response_id: str, owner: str) -> StoredResponse | None:
        with self._lock:
            stored = self._responses.get(response_id)
            if stored is None or stored.owner != owner:
                return None
            self._responses.move_to_end(response_id)
            return stored

    def _drop(self, response_id: str) -> None:
        stored = self._responses.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes

    def _missing(self, response_id: str) -> str:
        return (
            f"there is no response {response_id[:100]!r}; this server keeps the last "
            f"{self._max_responses} (serve.responses_store) until it stops, except those with store: false"
        )


def make_store(settings: ApiSettings) -> ResponseStore:
    """Return the store of an ingress."""
    off = ""
    if settings.max_stored_responses == 0:
        off = "serve.responses_store.max_responses is 0"
    elif settings.num_replicas > 1:
        off = (
            f"serve.replicas is {settings.num_replicas}, and replicas share no memory; "
            "set serve.replicas to 1, or send the whole conversation as input"
        )
    return ResponseStore(settings.max_stored_responses, settings.max_stored_bytes, off)


def _size(value: Any) -> int:
    """Return the bytes of a JSON value in memory."""
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        size += sum(map(_size, value.values()))  # the keys are constants, mostly
    elif isinstance(value, list):
        size += sum(map(_size, value))
    return size
