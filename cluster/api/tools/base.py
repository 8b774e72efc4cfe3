"""The interface of the parsers that find tool calls in a model's text. One file per format beside this one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Tool:
    """A function that the model may call: as the client defined it, and what of it is used here.

    parameters   the JSON schema of its arguments, None = it takes none
    strict       arguments that a grammar makes must match all of the schema, not only what grammars can say
    """

    name: str
    parameters: dict[str, Any] | None
    strict: bool
    definition: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call number `index`. The first one has the name; arguments add up to the JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


Piece = str | CallDelta
"""What a parser makes of text: content to show, or a part of a call."""


class CallParser(Protocol):
    """Takes one answer apart as it comes. What is no call is content, character for character."""

    def push(self, text: str) -> list[Piece]:
        """What this text completes."""
        ...

    def flush(self) -> list[Piece]:
        """No more text comes: what was held back."""
        ...


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    parser   makes a parser of one answer, given the names of the tools
    lark     Lark rules of which `calls` matches one call of these tools, or any number when the second argument is
             true; @args_0, @args_1 ... are the grammars of their arguments. The last argument writes a marker
             such as <tool_call> for the grammar: models have it as text or as a special token.
    markers  texts that only calls have
    """

    parser: Callable[[frozenset[str]], CallParser]
    lark: Callable[[Sequence[Tool], bool, Callable[[str], str]], str]
    markers: tuple[str, ...] = ()
