"""Calls of Granite 3: a marker, then a JSON list of {"name": ..., "arguments": {...}}."""

from collections.abc import Callable, Sequence
from functools import partial

from cluster.api.tools.base import CallFormat, Tool
from cluster.api.tools.json_calls import call_rules
from cluster.api.tools.marked_list import MarkedListParser

OPEN = "<|tool_call|>"
MARKS = (OPEN, "<tool_call>")  # Granite 3.1 also writes the second


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of a list, of one call unless there may be many."""
    more = '(", " call)*' if many else ""
    return "\n".join([f'calls: {marker(OPEN)} "[" call {more} "]"', *call_rules(tools)])


GRANITE = CallFormat(partial(MarkedListParser, MARKS), _lark, (OPEN,))
