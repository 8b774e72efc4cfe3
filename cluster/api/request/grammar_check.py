"""Joins the parts of an output into one grammar and checks it with llguidance. Knows nothing of requests' fields.

Most checks take 1 to 100 ms. The time rises faster than the number of an object's optional properties: 0.13 s for 1,000
(12 kB), 1.1 s for 5,000, 18 s for 20,000. The result is cached.
"""

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from llguidance import LLMatcher

from cluster.api.request.schema_path import SchemaPath, find_error_path
from cluster.api.request.sender import Sender
from cluster.api.request.structured import Constraint, Node
from cluster.api.work.processes import WorkLimitError, WorkProcesses
from cluster.api.work.turns import Turns
from cluster.errors import BadRequestError
from workers.sampling.grammar_compiler import SMALL_CHARS, compile_thread, limits
from workers.step.grammar import plain

_MAX_REMEMBERED = 64
_MAX_MESSAGE = 500


def join_grammars(lark: str, nodes: dict[str, Node]) -> str:
    """llguidance's grammar of a Lark grammar with a rule `start` that refers to `nodes` as @name."""
    grammars: list[dict[str, Any]] = [{"name": "output", "lark_grammar": lark}]
    grammars += [{"name": name, **node} for name, node in nodes.items()]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def single_grammar(node: Node) -> str:
    """llguidance's grammar of one node alone."""
    return json.dumps({"grammars": [node]}, ensure_ascii=False)


@dataclass(frozen=True)
class GrammarCheck:
    """A grammar to compile, and the constraints it was made of, for the error."""

    grammar: str
    constraints: list[Constraint]


class GrammarChecker:
    """Refuses grammars that llguidance cannot compile, or not within `limit_s` seconds of processor time.

    Small grammars are compiled on a thread, because none takes long; all others in a process that ends at the limit, or
    when the client leaves. Clients get their turns in both, and neither waits for the other.
    """

    def __init__(self, processes: WorkProcesses, limit_s: float) -> None:
        self._processes = processes
        self._limit_s = limit_s
        self._thread: ThreadPoolExecutor | None = None  # most servers never need it
        self._thread_turns, self._process_turns = Turns(1), Turns(1)
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, check: GrammarCheck, sender: Sender) -> None:
        """Raise a BadRequestError that names the wrong field if the grammar does not compile."""
        if check.grammar in self._good:
            self._good.move_to_end(check.grammar)
            return
        if len(check.grammar) <= SMALL_CHARS:
            async with self._thread_turns.place(sender.name):
                await self._on_thread(check)
        else:
            await sender.while_connected(self._in_process(check, sender.name))
        self._good[check.grammar] = None
        if len(self._good) > _MAX_REMEMBERED:
            self._good.popitem(last=False)

    async def _on_thread(self, check: GrammarCheck) -> None:
        if self._thread is None:
            self._thread = compile_thread("grammar-check")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, _check, check)

    async def _in_process(self, check: GrammarCheck, caller: str) -> None:
        try:
            async with self._process_turns.place(caller):
                await self._processes.run(_check_in_child, check, cpu_s=self._limit_s)
        except WorkLimitError:
            param = check.constraints[0].param
            raise BadRequestError(
                f"{param}: it takes more than {self._limit_s:g} s to compile, the limit; make it smaller, such as by "
                "fewer optional properties in an object",
                param=param,
                code="grammar_too_slow",
            ) from None


def _check_in_child(_context: object, check: GrammarCheck) -> None:
    """Check in a process, on a thread for its large stack."""
    with compile_thread("grammar-check") as thread:
        thread.submit(_check, check).result()


def _check(check: GrammarCheck) -> None:
    grammar, constraints = check.grammar, check.constraints
    if not _error_of(grammar):
        return
    for constraint in constraints:
        message = _error_of(single_grammar(constraint.node))
        if not message:
            continue
        path: SchemaPath = ()
        if constraint.schema is not None:
            path = find_error_path(constraint.schema, message, partial(_part_error, constraint))
        param = ".".join([constraint.param, *map(str, path)])
        raise BadRequestError(
            f"{param[:300]}: {message}", param=param[:300], code="invalid_grammar"
        )
    param = constraints[
        0
    ].param  # each constraint compiles by itself, but together they exceed a limit
    raise BadRequestError(f"{param}: {_error_of(grammar)}", param=param, code="invalid_grammar")


def _part_error(constraint: Constraint, part: dict[str, Any]) -> str:
    """Return the error of a part of the constraint's schema by itself; "" for none."""
    return _error_of(single_grammar(constraint.of_part(part)))


def _error_of(grammar: str) -> str:
    """Return the error of a grammar; "" for none. The rank checks token ids, because a tokenizer is needed for them."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return plain(messages[0])[:_MAX_MESSAGE] if wrong else ""
