"""Splits the reasoning of a model, between <think> and </think>, from its answer. Knows nothing of tools or JSON."""

from enum import Enum
from typing import Protocol

from cluster.api.tools.base import possible_start

OPEN = "<think>"
CLOSE = "</think>"


class Thinking(Enum):
    """The state in which an answer begins, by the end of its prompt."""

    OPENED = "the prompt opened the thought: the answer goes on with it"
    POSSIBLE = "the answer may open one"
    CLOSED = "there is none: the prompt closed it already"


def thinking_after(prompt_end: str, unfinished: str | None) -> Thinking:
    """Return the state in which an answer begins; `unfinished` is the message that the answer continues, if any."""
    if unfinished is not None:
        if CLOSE in unfinished:
            return Thinking.CLOSED
        return Thinking.OPENED if OPEN in unfinished else Thinking.POSSIBLE
    end = prompt_end.rstrip()
    if end.endswith(OPEN):
        return Thinking.OPENED
    return Thinking.CLOSED if end.endswith(CLOSE) else Thinking.POSSIBLE


class Splitter(Protocol):
    """Splits one answer into reasoning and content as its text arrives."""

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, content) that `text` completes."""
        ...

    def flush(self) -> tuple[str, str]:
        """Return the (reasoning, content) that was held back. Called after the last `push`."""
        ...


class ReasoningSplitter:
    """Splits at the tags. White space next to the tags is dropped.

    begins    the state of the text's beginning
    behind    the text begins next to a tag of the prompt
    """

    def __init__(self, begins: Thinking, *, behind: bool = False) -> None:
        self._state = begins
        self._held = ""
        # White space at the beginning of what is shown next is dropped.
        self._trims = behind or begins is not Thinking.CLOSED

    def push(self, text: str) -> tuple[str, str]:
        """See Splitter."""
        if self._state is Thinking.CLOSED and not self._trims:
            return "", text
        text, self._held = self._held + text, ""
        if self._state is Thinking.POSSIBLE:
            text = self._opening(text)
        reasoning = ""
        if self._state is Thinking.OPENED:
            reasoning, text = self._thought(text)
        if self._state is not Thinking.CLOSED:
            return reasoning, ""
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return reasoning, text

    def flush(self) -> tuple[str, str]:
        """See Splitter."""
        held, self._held = self._held, ""
        if self._state is Thinking.OPENED:
            return held.rstrip(), ""
        return "", held

    def _opening(self, text: str) -> str:
        """Decide whether the answer begins with a thought; return the text behind its tag."""
        begun = text.lstrip()
        if begun.startswith(OPEN):
            self._state = Thinking.OPENED
            return begun[len(OPEN) :]
        if OPEN.startswith(begun):
            self._held = text
            return ""
        self._state, self._trims = Thinking.CLOSED, False
        return text

    def _thought(self, text: str) -> tuple[str, str]:
        """Return (the part of the thought that can be shown, the text behind it)."""
        thought, closed, after = text.partition(CLOSE)
        if self._trims:
            thought = thought.lstrip()
            self._trims = not thought
        if closed:
            self._state, self._trims = Thinking.CLOSED, True
            return thought.rstrip(), after
        shown = thought[: len(thought) - possible_start(thought, CLOSE)].rstrip()
        self._held = thought[len(shown) :]
        return shown, ""


class ThoughtCounter:
    """Counts the output tokens of the thought at the beginning of one answer, as its text arrives.

    The count includes the tokens of the tags. It is 0 for an answer without a thought.
    """

    def __init__(self, begins: Thinking) -> None:
        self._state = begins
        self._seen = ""  # the text that may hold the beginning of a tag
        self.num_tokens = 0

    def push(self, text: str, num_tokens: int) -> bool:
        """Return whether the thought goes on after `text`; `num_tokens` is the number of output tokens so far."""
        seen = self._seen + text
        if self._state is Thinking.POSSIBLE:
            seen = seen.lstrip()
            if seen.startswith(OPEN):
                self._state, seen = Thinking.OPENED, seen[len(OPEN) :]
            elif not OPEN.startswith(seen):
                self._state = Thinking.CLOSED
        if self._state is Thinking.OPENED:
            self.num_tokens = num_tokens
            if CLOSE in seen:
                self._state = Thinking.CLOSED
            seen = seen[1 - len(CLOSE) :]
        self._seen = seen
        return self._state is not Thinking.CLOSED
