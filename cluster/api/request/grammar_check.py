"""Joins the parts of an output into one grammar and checks it with llguidance. Knows nothing of requests' fields.

A check takes 1 to 100 ms, in the worst case seconds, so it runs on a thread of its own. The result is cached.
"""

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from llguidance import LLMatcher

from cluster.api.request.schema_path import SchemaPath, find_error_path
from cluster.api.request.structured import Constraint, Node
from cluster.errors import BadRequestError
from workers.sampling.grammar_compiler import compile_thread, limits
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


class GrammarChecker:
    """Refuses grammars that llguidance cannot compile."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # most servers never need it
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, constraints: list[Constraint]) -> None:
        """Raise a BadRequestError that names the wrong field if `grammar`, made of `constraints`, does not compile."""
        if grammar in self._good:
            self._good.move_to_end(grammar)
            return
        if self._thread is None:
            self._thread = compile_thread("grammar-check")
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, _check, grammar, constraints)
        self._good[grammar] = None
        if len(self._good) > _MAX_REMEMBERED:
            self._good.popitem(last=False)


def _check(grammar: str, constraints: list[Constraint]) -> None:
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
