"""Finds calls in a thought that nothing follows. Knows nothing of the tags of thoughts and of call formats.

Models such as Kimi-K2-Thinking, GLM and Qwen3.5 sometimes begin a call without an end of their thought. Such a call
counts if the answer ends with it; calls that a model drafts in its thought before it answers stay reasoning.
"""

from collections.abc import Callable

from cluster.api.answer.reasoning import Splitter
from cluster.api.tools.base import CallDelta, CallParser, possible_start


class CallsInThought:
    """Holds back the reasoning from the beginning of a call on, until the answer goes on behind the thought or ends.

    thoughts   splits reasoning from content
    openings   texts that calls begin with
    parser     makes a parser of calls: text that it returns as content is no call
    """

    def __init__(
        self, thoughts: Splitter, openings: tuple[str, ...], parser: Callable[[], CallParser]
    ) -> None:
        self._thoughts = thoughts
        self._openings = openings
        self._new_parser = parser
        self._held = ""
        # Reads the held text behind `_begin`; None: no call began.
        self._trial: CallParser | None = None
        self._begin = 0
        self._is_call = self._is_over = False

    def push(self, text: str) -> tuple[str, str]:
        """See Splitter."""
        return self._split(*self._thoughts.push(text))

    def flush(self) -> tuple[str, str]:
        """See Splitter. A call that was held back is content."""
        reasoning, content = self._split(*self._thoughts.flush())
        held, self._held = self._held, ""
        return (reasoning, content + held) if self._is_call else (reasoning + held, content)

    def _split(self, reasoning: str, content: str) -> tuple[str, str]:
        """Return the (reasoning, content) that is certain."""
        if self._is_over:
            return reasoning, content
        self._held += reasoning
        if content:
            self._is_over = True
            return self._release(len(self._held)), content
        if self._is_call or not reasoning:
            return "", ""
        return self._certain(reasoning), ""

    def _certain(self, added: str) -> str:
        """Return the reasoning before a call, or what may be one; `added` is the end of the held text."""
        shown = ""
        while True:
            if self._trial is None:
                found = [at for mark in self._openings if (at := self._held.find(mark)) >= 0]
                if not found:
                    keep = max(possible_start(self._held, mark) for mark in self._openings)
                    return shown + self._release(len(self._held) - keep)
                shown += self._release(min(found))
                self._begin = len(self._held) - len(self._held.lstrip())
                self._trial, added = self._new_parser(), self._held[self._begin :]
            pieces = self._trial.push(added)
            self._is_call = bool(pieces) and isinstance(pieces[0], CallDelta)
            if self._is_call or not pieces:
                return shown
            self._trial = None  # no call: the search goes on behind its first character
            shown, self._held = shown + self._held[: self._begin + 1], self._held[self._begin + 1 :]

    def _release(self, length: int) -> str:
        """Return the first characters of the held text without white space at their end, which stays."""
        shown = self._held[:length]
        shown = shown if length == len(self._held) else shown.rstrip()
        self._held = self._held[len(shown) :]
        return shown
