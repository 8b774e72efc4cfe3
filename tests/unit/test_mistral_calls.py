"""Calls of Mixtral-8x22B-Instruct: a JSON list behind a marker, and ids of the length that its chat template needs."""

import random

import pytest

from cluster.api.tools import FORMATS, choose_format
from tests.unit.test_tool_parsers import CALL, NOW, OTHER, ROME, message_of, parse
from tests.unit.test_tools import NAMED, accepts, api_that_says, sent_grammar

MARK = "[TOOL_CALLS]"
BOTH = f"[{CALL}, {OTHER}]"
CASES = [  # text, content, calls
    (f"{MARK} {BOTH}", "", [ROME, NOW]),
    (f" {MARK}{BOTH}\n", "", [ROME, NOW]),
    (f"[{CALL}]", "", [ROME]),  # the marker is a special token that is not shown
    (f'{MARK} [{CALL[:-1]}, "id": "a1B2c3D4e"}}]', "", [ROME]),
    (f"{MARK} [{CALL[:-2]}", "", [("get_weather", '{"city": "Rome"')]),
    ("[TOOL_CALLS are", "[TOOL_CALLS are", []),
    (f"{MARK} text",) * 2 + ([],),
    ("[1, 2]", "[1, 2]", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_do_not_depend_on_how_the_text_comes(text, content, calls):
    assert parse("mistral", [text]) == (content, calls)
    assert parse("mistral", list(text)) == (content, calls)
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse("mistral", pieces) == (content, calls), pieces


def test_ids_have_nine_characters_and_differ():
    ids = [call.call_id for call in message_of("mistral", f"{MARK} {BOTH}").calls]
    assert len(set(ids)) == 2
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)


def test_auto_finds_the_marker_in_the_template():
    assert choose_format("auto", '{{- "[TOOL_CALLS] [" }}') is FORMATS["mistral"]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"tool_choice": "required"}, [f"{MARK} {BOTH}", f"{MARK}[{CALL}]"], [BOTH, "text"]),
        ({"tool_choice": NAMED}, [f"{MARK} [{OTHER}]"], [f"{MARK} [{CALL}]", f"{MARK} {BOTH}"]),
    ],
)
def test_required_calls(fields, good, bad):
    grammar = sent_grammar(settings={"tool_parser": "mistral"}, **fields)
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


def test_an_answer_with_calls():
    api = api_that_says(f"{MARK} {BOTH}", tool_parser="mistral")
    tools = [
        {"type": "function", "function": {"name": name}} for name in ("get_weather", "time.now")
    ]
    choice = api.chat(tools=tools).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert [len(call["id"]) for call in choice["message"]["tool_calls"]] == [9, 9]
