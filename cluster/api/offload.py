"""Works on the bodies of requests where the event loop stays free: in the loop, in a thread, or in a process.

The event loop may not stop for over 50 ms, also where a thread holds the interpreter lock in one call: json.loads takes
450 ms for 4 MB of `[1],`, and 6 ms for 128 KiB. A process has its own lock. The size of a body decides, and images are
decoded in a process always. Knows nothing of the fields of a body.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from cluster.api.images.body_size import check_before_parsing, check_parsed
from cluster.api.images.fetch import Fetcher
from cluster.api.images.medium import Medium, UnreadImages
from cluster.api.request.draft import Drafter, EngineFacts, load_drafter
from cluster.api.request.grammar_check import GrammarChecker
from cluster.api.request.json_body import parse_json_object
from cluster.api.request.sender import Sender
from cluster.api.settings import ApiSettings
from cluster.api.work.processes import WorkLimitError, WorkProcesses
from cluster.api.work.turns import Turns
from cluster.errors import BadRequestError

_Result = TypeVar("_Result")
_THREADS = 2  # each waits for the interpreter lock together with the event loop
_PROCESSES = 2
_MAX_IMAGE_PROCESSES = 8


class Offload:
    """The work of one ingress on bodies."""

    def __init__(self, drafter: Drafter) -> None:
        settings = drafter.settings
        self._drafter = drafter
        self._inline_bytes = settings.inline_body_bytes
        self._thread_bytes = settings.thread_body_bytes
        self._cpu_s = settings.body_cpu_s
        self._processes = WorkProcesses(partial(load_drafter, drafter.tokenizer.source, settings))
        self._threads, self._children = Turns(_THREADS), Turns(_num_processes(settings))
        self._fetcher: Fetcher | None = None
        if settings.images is not None:
            self._fetcher = Fetcher(settings.images)
            self._processes.start()  # the first image need not wait for it
        self.grammars = GrammarChecker(self._processes, settings.grammar_timeout_s)

    def drafts(
        self, work: Callable[..., _Result]
    ) -> Callable[[bytes, EngineFacts, Sender], Awaitable[_Result]]:
        """Return a function that makes the draft of a body by `work`."""

        async def draft(body: bytes, facts: EngineFacts, sender: Sender) -> _Result:
            return await self.on_body(work, body, facts, sender=sender)

        return draft

    async def on_body(
        self, work: Callable[..., _Result], body: bytes, *args: Any, sender: Sender
    ) -> _Result:
        """Return work(drafter, the body as a dict, *args). Raises what it raises, and ClientDisconnect."""
        try:
            return await self.run(_with_body, work, body, *args, sender=sender)
        except UnreadImages as images:
            return await sender.while_connected(
                self._with_images(sender.name, images.remote, work, body, args)
            )

    async def run(self, work: Callable[..., _Result], *args: Any, sender: Sender) -> _Result:
        """Return work(drafter, *args). Raises what it raises, and ClientDisconnect.

        Work, arguments and result travel by pickle; the arguments of type `bytes` decide where it runs.
        """
        size = sum(len(part) for part in args if isinstance(part, bytes))
        if size <= self._inline_bytes:
            return work(self._drafter, *args)
        if size <= self._thread_bytes:
            async with self._threads.place(sender.name):
                return await asyncio.to_thread(work, self._drafter, *args)
        return await sender.while_connected(self._in_process(sender.name, work, args))

    async def _with_images(
        self,
        caller: str,
        remote: list[Medium],
        work: Callable[..., _Result],
        body: bytes,
        args: tuple[Any, ...],
    ) -> _Result:
        assert self._fetcher is not None, "the model takes text alone"
        async with self._fetcher.fetched(remote) as files:
            return await self._in_process(caller, _with_files, (files, work, body, *args))

    async def _in_process(
        self, caller: str, work: Callable[..., _Result], args: tuple[Any, ...]
    ) -> _Result:
        async with self._children.place(caller):
            try:
                return await self._processes.run(work, *args, cpu_s=self._cpu_s)
            except WorkLimitError:
                raise BadRequestError(
                    f"the body takes more than {self._cpu_s:g} s to prepare; make it smaller"
                ) from None


def _with_body(drafter: Drafter, work: Callable[..., _Result], body: bytes, *args: Any) -> _Result:
    """Parse the body and call the work."""
    settings = drafter.settings
    check_before_parsing(body, settings.max_body_bytes)
    fields = parse_json_object(body, settings.max_json_depth)
    check_parsed(body, fields, settings.max_body_bytes)
    return work(drafter, fields, *args)


def _with_files(
    drafter: Drafter, files: Mapping[str, bytes], work: Callable[..., _Result], *args: Any
) -> _Result:
    """Do the work with the files of http(s) URLs."""
    return _with_body(drafter.with_images(files), work, *args)


def _num_processes(settings: ApiSettings) -> int:
    """Return the processes at once; images take more processor time than texts."""
    if settings.images is None:
        return _PROCESSES
    return min(max((os.cpu_count() or 1) // 4, _PROCESSES), _MAX_IMAGE_PROCESSES)
