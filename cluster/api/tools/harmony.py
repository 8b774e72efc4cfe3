"""Parses the messages of gpt-oss: Harmony's channels carry reasoning, calls and the answer.

An answer is a sequence of messages, each HEADER<|message|>TEXT and one of <|end|>, <|call|>, <|return|>. The header has
a channel and maybe a recipient: <|channel|>commentary to=functions.NAME <|constrain|>json. The channel `analysis` is
reasoning; a message to a function is a call, in any channel; all else is content.
"""

import re
from collections.abc import Callable, Sequence

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Thought, Tool, lark_string
from cluster.api.tools.marked_calls import StateParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
FINAL = f"{CHANNEL}final{MESSAGE}"  # the header of a message that the prompt has begun
_BEGINNINGS = (CHANNEL, START, MESSAGE, " to=", "to=")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(StateParser):
    """Splits one answer, which follows <|start|>assistant, into reasoning, calls and content.

    Text that begins with no header is content. A message to an unknown function, or to a tool of the model's own, is
    reasoning.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(self._begin)
        self._names = frozenset(tool.name for tool in tools)
        self._header = ""
        self._piece: Callable[[str], Piece] = str
        self._in_call = self._has_arguments = False

    def flush(self) -> list[Piece]:
        """See CallParser. A header without a message is left out."""
        rest = self._reader.rest()
        if self._at not in (self._begin, self._text) or not rest:
            return []
        cut = self._in_call and CALL.startswith(rest)
        return [] if cut else [self._piece(rest)]

    def _begin(self, pieces: list[Piece]) -> bool:
        """State: nothing was read yet."""
        text = self._reader.text
        if not text or any(mark.startswith(text) and mark != text for mark in _BEGINNINGS):
            return False
        self._at = self._in_header if text.startswith(_BEGINNINGS) else self._text
        return True

    def _in_header(self, pieces: list[Piece]) -> bool:
        """State: between messages, or in a header."""
        before, mark = self._reader.wait(MESSAGE)
        if mark:
            self._open(before, pieces)
            self._at = self._text
        return bool(mark)

    def _text(self, pieces: list[Piece]) -> bool:
        """State: in the text of a message."""
        added, mark = self._reader.take(END, CALL, RETURN, START, CHANNEL)
        if mark and self._in_call and not added and not self._has_arguments:
            added = "{}"
        if added:
            self._has_arguments = True
            pieces.append(self._piece(added))
        if mark:
            self._num_calls += self._in_call
            self._in_call = False
            self._reader.text = (mark if mark == CHANNEL else "") + self._reader.text
            self._at = self._in_header
        return bool(mark)

    def _open(self, header: str, pieces: list[Piece]) -> None:
        """Begin the message of this header."""
        header = header.rpartition(START)[2]  # what a damaged message left before it is dropped
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(FUNCTIONS) if recipient else ""
        self._in_call, self._has_arguments = name in self._names, False
        if self._in_call:
            index = self._num_calls
            pieces.append(CallDelta(index, name))
            self._piece = lambda text: CallDelta(index, None, text)
        elif recipient or (channel and channel[1] == "analysis"):
            self._piece = Thought
        else:
            self._piece = str


def _lark(tools: Sequence[Tool], _many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of one call: a call ends the answer."""
    rules = ["calls: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = lark_string(f"commentary to={FUNCTIONS}{tool.name} ")
        rules.append(
            f"call_{i}: {marker(CHANNEL)} {head} {marker(CONSTRAIN)} {lark_string('json')} "
            f"{marker(MESSAGE)} @args_{i}"
        )
    return "\n".join(rules)


def answer_rules(ways: Sequence[str], marker: Callable[[str], str]) -> str:
    """Return the rules of a whole answer: reasoning, then one of `ways`, which are calls or grammars of content."""
    final = f"{marker(CHANNEL)} {lark_string('final')} {marker(MESSAGE)}"
    answers = [way if way == "calls" else f"{final} {way}" for way in ways]
    end = marker(END)
    is_text = end == lark_string(END)
    text = (
        "thought_text[lazy]: /(.|\\n)*<\\|end\\|>/"
        if is_text
        else f"thought_text: THOUGHT_TEXT? {end}\nTHOUGHT_TEXT: /(.|\\n)+/"
    )
    return (
        f"start: thought? answer\nanswer: {' | '.join(answers)}\n"
        f"thought: {marker(CHANNEL)} {lark_string('analysis')} {marker(MESSAGE)} thought_text "
        f"{marker(START)} {lark_string('assistant')}\n{text}\n"
    )


HARMONY = CallFormat(
    HarmonyParser,
    _lark,
    (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
    has_channels=True,
)
