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
    """A part of call number `index`. The first part has the name; the arguments of all parts join to the JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


Piece = str | CallDelta
"""Content to show, or a part of a call."""


class CallParser(Protocol):
    """Splits one answer into content and calls as its text arrives. Text outside calls is content, unchanged."""

    def push(self, text: str) -> list[Piece]:
        """Return the content and calls that `text` completes."""
        ...

    def flush(self) -> list[Piece]:
        """Return the text that was held back. Called after the last `push`."""
        ...


@dataclass(frozen=True)
class CallFormat:
    """The way in which a family of models writes calls.

    parser   makes a parser of one answer; its argument holds the names of the tools
    lark     makes Lark rules; the rule `calls` matches one call of the tools, or any number if the second argument is
             true. @args_0, @args_1 ... are the grammars of the arguments. The third argument writes a marker such as
             <tool_call> for the grammar, because some models have it as text and some as a token.
    markers  texts that occur in calls only
    """

    parser: Callable[[frozenset[str]], CallParser]
    lark: Callable[[Sequence[Tool], bool, Callable[[str], str]], str]
    markers: tuple[str, ...] = ()


def lark_string(text: str) -> str:
    """Return `text` as a string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
