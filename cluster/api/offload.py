"""Works on the bodies of requests where the event loop stays free: in the loop, in a thread, or in a process, by size.

The event loop may not stop for over 50 ms, also where a thread holds the interpreter lock in one call: json.loads takes
450 ms for 4 MB of `[1],`, and 6 ms for 128 KiB. A process has its own lock. Knows nothing of the fields of a body.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from cluster.api.request.draft import Drafter, EngineFacts, load_drafter
from cluster.api.request.grammar_check import GrammarChecker
from cluster.api.request.json_body import parse_json_object
from cluster.api.request.sender import Sender
from cluster.api.work.processes import WorkLimitError, WorkProcesses
from cluster.api.work.turns import Turns
from cluster.errors import BadRequestError

_Result = TypeVar("_Result")
_THREADS = 2  # each waits for the interpreter lock together with the event loop
_PROCESSES = 2


class Offload:
    """The work of one ingress on bodies."""

    def __init__(self, drafter: Drafter) -> None:
        settings = drafter.settings
        self._drafter = drafter
        self._inline_bytes = settings.inline_body_bytes
        self._thread_bytes = settings.thread_body_bytes
        self._cpu_s = settings.body_cpu_s
        self._processes = WorkProcesses(partial(load_drafter, drafter.tokenizer.source, settings))
        self._threads, self._children = Turns(_THREADS), Turns(_PROCESSES)
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
        return await self.run(_with_body, work, body, *args, sender=sender)

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
    return work(drafter, parse_json_object(body, drafter.settings.max_json_depth), *args)
