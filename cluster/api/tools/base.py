"""The interface of tool call formats: a parser of a model's text, and a grammar. Each format has its own file.

Knows nothing of requests or messages.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `definition` is the client's JSON.

    parameters   the JSON schema of the arguments; None = no arguments
    strict       a grammar must enforce all of the schema; otherwise keywords without a grammar are left out
    """

    name: str
    parameters: dict[str, Any] | None
    strict: bool
    definition: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of call number `index`. The first part has the name; the arguments of all parts join to the JSON text.

    call_id   of the first part: the id that the model wrote, or of a form that its chat template needs; None = any
    """

    index: int
    name: str | None = None
    arguments: str = ""
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of the reasoning, in formats with channels."""

    text: str


Piece = str | CallDelta | Thought
"""Content to show, a part of a call, or a part of the reasoning."""


class CallParser(Protocol):
    """Splits one answer into content and calls as its text arrives. Text outside calls is content, unchanged."""

    def push(self, text: str) -> list[Piece]:
        """Return the content and calls that `text` completes."""
        ...

    def flush(self) -> list[Piece]:
        """Return the text that was held back. Called after the last `push`."""
        ...


Schemas = dict[str, tuple[str, dict[str, Any]]]
"""Grammars of arguments by name: (path in the tool's parameters, schema)."""

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def whole_arguments(index: int, tool: Tool) -> Schemas:
    """Return the schema of all arguments of tool number `index` as args_0, args_1 ..."""
    return {f"args_{index}": ("", {"type": "object", **(tool.parameters or _NO_PARAMETERS)})}


@dataclass(frozen=True)
class CallFormat:
    """The way in which a family of models writes calls.

    parser   makes a parser of one answer to a request with these tools
    lark     makes Lark rules; the rule `calls` matches one call of the tools, or any number if the second argument is
             true. @args_0, @args_1 ... are the grammars of the arguments. The third argument writes a marker such as
             <tool_call> for the grammar, because some models have it as text and some as a token.
    markers  texts that occur in calls only
    schemas  the schemas of the grammars that the rules of tool number i refer to
    openings       texts that calls begin with, where text before them is content
    has_channels   the parser splits reasoning and content too, and reads answers to requests without tools
    """

    parser: Callable[[Sequence[Tool]], CallParser]
    lark: Callable[[Sequence[Tool], bool, Callable[[str], str]], str]
    markers: tuple[str, ...] = ()
    schemas: Callable[[int, Tool], Schemas] = whole_arguments
    openings: tuple[str, ...] = ()
    has_channels: bool = False


def lark_string(text: str) -> str:
    """Return `text` as a string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def possible_start(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
