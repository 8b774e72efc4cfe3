"""The seam for what a chat message has besides plain content, such as reasoning and tool calls."""

from typing import Any, Protocol


class MessageParser(Protocol):
    """Takes one choice's text apart as it comes. Choices without one show all of it as content."""

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas that this piece gives, perhaps none; with the last piece nothing is held back."""
        ...

    def message(self) -> dict[str, Any]:
        """After the last piece: the whole message's fields, those of a plain one replaced or added to."""
        ...

    def finish_reason(self, reason: str) -> str:
        """After the last piece: what the client is told, given how the text ended."""
        ...
