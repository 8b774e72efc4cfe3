"""Parses calls in a section with markers of its own: DeepSeek-V3, R1 and V3.1, and Kimi-K2.

OPEN (CALL head ARGUMENTS {...} END)* CLOSE. The markers are added tokens of these models, so arguments never hold
them; arguments are passed on unchanged as they arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.api.tools.base import CallDelta, CallFormat, Piece, Tool, lark_string
from cluster.api.tools.marked_calls import SectionedCallParser


@dataclass(frozen=True)
class Section:
    """The markers of a format.

    ends      what may stand behind the arguments, the usual one first
    name_of   returns the name and the id of a call from its head; an empty name: the text is no call
    """

    open: str
    call: str
    arguments: str
    ends: tuple[str, ...]
    close: str
    name_of: Callable[[str], tuple[str, str | None]]


class SectionParser(SectionedCallParser):
    """The arguments of a call are passed on as the model writes them."""

    def __init__(self, section: Section) -> None:
        super().__init__(section.open, section.call, section.close, bare=True)
        self._marks = section
        self._has_arguments = False

    def _cut_arguments(self, rest: str) -> list[Piece] | None:
        if self._at != self._arguments:
            return None
        cut = any(end.startswith(rest) for end in self._marks.ends)
        return [] if cut else [CallDelta(self._num_calls, None, rest)]

    def _head(self, pieces: list[Piece]) -> bool:
        """Read the head of a call up to its arguments."""
        marks = self._marks
        head, mark = self._reader.wait(marks.arguments, marks.ends[-1], marks.call, marks.close)
        if mark == marks.arguments:
            name, call_id = marks.name_of(head)
            if name:
                pieces.append(CallDelta(self._num_calls, name, call_id=call_id))
                self._raw, self._has_arguments = "", False
                self._at = self._arguments
                return True
        if not mark:
            return False
        self._raw += head + mark
        if mark == marks.close or (mark != marks.call and self._is_bare):
            self._leave(pieces)
        elif mark != marks.call:
            self._at = self._opened
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        """Pass arguments on up to the end of the call."""
        added, mark = self._reader.take(*self._marks.ends, self._marks.close)
        if mark and not added and not self._has_arguments:
            added = "{}"
        if added:
            self._has_arguments = True
            pieces.append(CallDelta(self._num_calls, None, added))
        if mark:
            self._num_calls += 1
            self._at = self._behind_call()
            if mark == self._marks.close:
                self._leave(pieces)
        return bool(mark)


_BLOCK = "\u2581"


def _deepseek_mark(*words: str) -> str:
    """Return a marker of DeepSeek's tokenizers, which have a wide bar and a low block in place of | and _."""
    return f"<\uff5c{_BLOCK.join(words)}\uff5c>"


_SEPARATOR = _deepseek_mark("tool", "sep")
_DEEPSEEK = {
    "open": _deepseek_mark("tool", "calls", "begin"),
    "call": _deepseek_mark("tool", "call", "begin"),
    "close": _deepseek_mark("tool", "calls", "end"),
}
_DEEPSEEK_END = _deepseek_mark("tool", "call", "end")
_FENCE, _FENCE_END = "\n```json\n", "\n```"


def _deepseek_v3_name(head: str) -> tuple[str, None]:
    """`function`, a separator and the name."""
    return head.rpartition(_SEPARATOR)[2].strip(), None


def _kimi_name(head: str) -> tuple[str, str | None]:
    """The id of the call: functions.NAME:NUMBER. The chat template needs it unchanged beside the result."""
    call_id = head.strip()
    name, _, number = call_id.removeprefix("functions.").rpartition(":")
    return (name, call_id) if number.isdigit() else ("", None)


_V3 = Section(
    **_DEEPSEEK,
    arguments=_FENCE,
    ends=(_FENCE_END + _DEEPSEEK_END, "```" + _DEEPSEEK_END, _DEEPSEEK_END),
    name_of=_deepseek_v3_name,
)
_V31 = Section(
    **_DEEPSEEK,
    arguments=_SEPARATOR,
    ends=(_DEEPSEEK_END,),
    name_of=lambda head: (head.strip(), None),
)
_KIMI = Section(
    open="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    ends=("<|tool_call_end|>",),
    close="<|tool_calls_section_end|>",
    name_of=_kimi_name,
)


def _format(
    section: Section, call: Callable[[str, str, Callable[[str], str]], str], between: str = ""
) -> CallFormat:
    """Return the format of a section; `call` writes one call's rule from the tool's name and its arguments' rule."""

    def lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
        more = f"({lark_string(between)} call)*" if between else "call*"
        rules = [
            f"calls: {marker(section.open)} call {more if many else ''} {marker(section.close)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
        ]
        rules += [
            f"call_{i}: {marker(section.call)} {call(tool.name, f'@args_{i}', marker)} "
            f"{marker(section.ends[-1])}"
            for i, tool in enumerate(tools)
        ]
        return "\n".join(rules)

    inner = _SEPARATOR if section.arguments == _FENCE else section.arguments
    markers = (section.open, section.call, inner, section.ends[-1], section.close)
    return CallFormat(
        lambda _tools: SectionParser(section), lark, markers, openings=(section.open, section.call)
    )


def _v3_call(name: str, arguments: str, marker: Callable[[str], str]) -> str:
    head = f'"function" {marker(_SEPARATOR)} {lark_string(name + _FENCE)}'
    return f"{head} {arguments} {lark_string(_FENCE_END)}"


def _v31_call(name: str, arguments: str, marker: Callable[[str], str]) -> str:
    return f"{lark_string(name)} {marker(_SEPARATOR)} {arguments}"


def _kimi_call(name: str, arguments: str, marker: Callable[[str], str]) -> str:
    head = f"{lark_string(f'functions.{name}:')} /[0-9]{{1,4}}/"
    return f"{head} {marker(_KIMI.arguments)} {arguments}"


DEEPSEEK_V3 = _format(_V3, _v3_call, "\n")
DEEPSEEK_V31 = _format(_V31, _v31_call)
KIMI_K2 = _format(_KIMI, _kimi_call)
