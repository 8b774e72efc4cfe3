"""Calls of MiniMax-M2: a section of <invoke name="NAME"> with <parameter name="KEY">VALUE</parameter> inside."""

from collections.abc import Callable, Sequence
from functools import partial

from cluster.api.tools.base import CallFormat, Tool, lark_string
from cluster.api.tools.invoked_calls import CallMarks, InvokedCallParser
from cluster.api.tools.typed_values import schemas, text_rule, value_rules

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
CALL, CALL_END = '<invoke name="', "</invoke>"
KEY, VALUE_END = '<parameter name="', "</parameter>"
NAME_END = '">'
MARKS = CallMarks(OPEN, CLOSE, CALL, CALL_END, KEY, NAME_END, (VALUE_END,))


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls; strings are free texts, or one of the listed ones."""
    line, end = lark_string("\n"), lark_string(VALUE_END)
    rules = [f"calls: {marker(OPEN)} {line} call {'call*' if many else ''} {marker(CLOSE)}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    rules.append(text_rule(VALUE_END, end))
    for i, tool in enumerate(tools):
        arguments = []
        for key, (value, required) in value_rules(i, tool, end).items():
            pair = f"{lark_string(KEY + key + NAME_END)} {value} {line}"
            arguments.append(pair if required else f"({pair})?")
        head, tail = (
            lark_string(f"{CALL}{tool.name}{NAME_END}\n"),
            lark_string(f"{CALL_END}\n"),
        )
        rules.append(f"call_{i}: {head} {' '.join(arguments)} {tail}")
    return "\n".join(rules)


MINIMAX_M2 = CallFormat(
    partial(InvokedCallParser, MARKS), _lark, (OPEN, CLOSE), schemas=schemas, openings=(OPEN,)
)
