"""Joins the parts of an output into one grammar and has llguidance check it. Knows nothing of requests' fields.

A check takes 1 to 100 ms, in the worst case seconds, and so runs on a thread of its own; the same grammar is checked
once.
"""

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher

from cluster.api.request.schema_place import find_place
from cluster.api.request.structured import Constraint, Node
from cluster.errors import BadRequestError
from workers.sampling.grammar import compile_thread, limits, plain

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
    """Refuses what llguidance cannot compile."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # most servers never need it
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, constraints: list[Constraint]) -> None:
        """Raise a BadRequestError that names the place when `grammar`, made of `constraints`, is wrong."""
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
        place: tuple[str | int, ...] = ()
        if constraint.schema is not None:
            place = find_place(
                constraint.schema,
                message,
                lambda part, node_of=constraint.of_part: _error_of(single_grammar(node_of(part))),
            )
        param = ".".join([constraint.param, *map(str, place)])
        raise BadRequestError(
            f"{param[:300]}: {message}", param=param[:300], code="invalid_grammar"
        )
    param = constraints[0].param  # each is right by itself: together they are too much
    raise BadRequestError(f"{param}: {_error_of(grammar)}", param=param, code="invalid_grammar")


def _error_of(grammar: str) -> str:
    """What is wrong with it, "" when nothing is. Special tokens are left to the rank, which has a tokenizer."""
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return plain(messages[0])[:_MAX_MESSAGE] if wrong else ""
