"""Calls of Qwen3-Coder, Qwen3-Coder-Next and Qwen3.5: <function=NAME> with <parameter=KEY> lines, each call in tags."""

from collections.abc import Callable, Sequence
from functools import partial

from cluster.api.tools.base import CallFormat, Tool, lark_string
from cluster.api.tools.invoked_calls import CallMarks, InvokedCallParser
from cluster.api.tools.typed_values import schemas, text_rule, value_rules

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL, CALL_END = "<function=", "</function>"
KEY, VALUE_END = "<parameter=", "</parameter>"
NAME_END = ">"
MARKS = CallMarks(
    OPEN,
    CLOSE,
    CALL,
    CALL_END,
    KEY,
    NAME_END,
    (f"\n{VALUE_END}", VALUE_END),
    value_start="\n",
    next_marks=(f"\n{KEY}", f"\n{CALL_END}\n{CLOSE}"),
    bare=True,
)


def _lark(tools: Sequence[Tool], many: bool, marker: Callable[[str], str]) -> str:
    """Return the rules of calls; strings are free texts, or one of the listed ones."""
    line, end = lark_string("\n"), lark_string(f"\n{VALUE_END}\n")
    rules = [
        f"calls: section{f' ({line} section)*' if many else ''}",
        f"section: {marker(OPEN)} {line} call {marker(CLOSE)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
        text_rule(f"\\n{VALUE_END}\\n", end),
    ]
    for i, tool in enumerate(tools):
        arguments = []
        for key, (value, required) in value_rules(i, tool, end).items():
            head = lark_string(f"{KEY}{key}{NAME_END}\n")
            pair = f"{head} {value}"
            arguments.append(pair if required else f"({pair})?")
        head = lark_string(f"{CALL}{tool.name}{NAME_END}\n")
        tail = lark_string(f"{CALL_END}\n")
        rules.append(f"call_{i}: {head} {' '.join(arguments)} {tail}")
    return "\n".join(rules)


QWEN3_CODER = CallFormat(
    partial(InvokedCallParser, MARKS),
    _lark,
    (OPEN, CLOSE, CALL, KEY),
    schemas=schemas,
    openings=(OPEN, CALL),
)
