"""Calls of Mixtral-8x22B-Instruct: [TOOL_CALLS], then a JSON list of {"name": ..., "arguments": {...}}."""

import uuid
from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallFormat, Tool
from cluster.api.tools.marked_list import MarkedListParser, list_rules

OPEN = "[TOOL_CALLS]"
_ID_LENGTH = 9  # the chat template refuses all other lengths in the next request


class MistralParser(MarkedListParser):
    """The model writes no ids, or writes them behind the arguments, too late for a stream."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__((OPEN,), tools)

    def _call_id(self) -> str:
        return uuid.uuid4().hex[:_ID_LENGTH]


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    return list_rules(f'{marker(OPEN)} " "?', tools, many)


MISTRAL = CallFormat(MistralParser, _lark, (OPEN,))
