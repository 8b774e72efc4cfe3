"""Tool calls of Granite 3: a marker and a JSON list, however the text comes, and the grammar of a required call."""

import random

import pytest

from tests.unit.test_tool_parsers import CALL, JSON, NOW, OTHER, ROME, parse
from tests.unit.test_tools import accepts, sent_grammar

CASES = [
    *(case for case in JSON if "tool_call" not in case[0]),
    (f"<|tool_call|>[{CALL}, {OTHER}]", "", [ROME, NOW]),
    (f" <tool_call>\n[{CALL}]\n", "", [ROME]),
    (f"<|tool_call|>{CALL}", "", [ROME]),
    (f"<|tool_call|>[{CALL[:-2]}", "", [("get_weather", '{"city": "Rome"')]),
    # No call at all: text.
    ("<|tool_call|>", "<|tool_call|>", []),
    ("<|tool_call|>[]", "<|tool_call|>[]", []),
    (" <|tool_call|> [1, 2]", " <|tool_call|> [1, 2]", []),
    ('<tool_call>{"name": "f", "arguments": {}}',) * 2 + ([],),
    (" <|tool", " <|tool", []),
    (f"a <|tool_call|>[{CALL}]",) * 2 + ([],),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_do_not_depend_on_how_the_text_comes(text, content, calls) -> None:
    assert parse("granite", [text]) == (content, calls)
    assert parse("granite", list(text)) == (content, calls)
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse("granite", pieces) == (content, calls), pieces


@pytest.mark.parametrize(
    ("parallel", "good", "bad"),
    [
        (True, [f"<|tool_call|>[{CALL}]", f"<|tool_call|>[{CALL}, {OTHER}]"], ["<|tool_call|>[]"]),
        (False, [f"<|tool_call|>[{CALL}]"], [f"<|tool_call|>[{CALL}, {OTHER}]"]),
    ],
)
def test_what_a_required_call_may_be(parallel: bool, good: list[str], bad: list[str]) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": parallel}
    grammar = sent_grammar(settings={"tool_parser": "granite"}, **fields)
    assert all(accepts(grammar, text) for text in good)
    for text in [*bad, "x", CALL, f"<|tool_call|>{CALL}", f"<tool_call>[{CALL}]"]:
        assert not accepts(grammar, text), text
