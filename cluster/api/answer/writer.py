"""The interface between a generation and the bytes of its answer: one implementation for each format of answers.

Knows nothing of sockets or engines.
"""

from typing import Protocol

from cluster.api.answer.generation import Choice
from cluster.errors import ServingError


class AnswerWriter(Protocol):
    """Builds the bytes of one answer: `body` of a whole answer, all other methods of a stream.

    A method that has nothing to send returns b"".
    """

    def begin(self, choice: Choice, text: str) -> bytes:
        """Return the first items of a choice; `text` is its echo and the text of its first output."""
        ...

    def text(self, choice: Choice, text: str) -> bytes:
        """Return the items of the text of the next output; `choice.text.finish_reason` is set if it is the last."""
        ...

    def end(self) -> bytes:
        """Return the last items of a stream after all choices are complete."""
        ...

    def error(self, error: ServingError) -> bytes:
        """Return the last items of a stream that ends with an error."""
        ...

    def body(self, texts: list[str]) -> bytes:
        """Return the whole answer; `texts` has the text of each choice. May run in a thread."""
        ...
