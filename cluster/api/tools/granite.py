"""Calls of Granite 3: a marker, then a JSON list of {"name": ..., "arguments": {...}}."""

from collections.abc import Callable, Sequence
from functools import partial

from cluster.api.tools.base import CallFormat, Tool
from cluster.api.tools.marked_list import MarkedListParser, list_rules

OPEN = "<|tool_call|>"
MARKS = (OPEN, "<tool_call>")  # Granite 3.1 also writes the second


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    return list_rules(marker(OPEN), tools, many)


GRANITE = CallFormat(partial(MarkedListParser, MARKS), _lark, (OPEN,))
