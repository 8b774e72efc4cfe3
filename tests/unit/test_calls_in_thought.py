"""A call without an end of the thought before it: it is a call if the answer ends with it."""

import random

import pytest

from cluster.api.answer.calls_in_thought import CallsInThought
from cluster.api.answer.message_parser import MessageParser
from cluster.api.answer.reasoning import ReasoningSplitter, Thinking
from cluster.api.tools import FORMATS
from tests.unit.api_fakes import tiny_tokenizer
from tests.unit.test_reasoning import CHAT_TEMPLATE, api_that_says
from tests.unit.test_tool_parsers import CALL, CALLABLE, NOW, RENDERED, ROME, TOOLS, section, tag

HERMES = tag(CALL)
OTHER = tag('{"name": "time.now", "arguments": {}}')
MARKED = [name for name, call_format in FORMATS.items() if call_format.openings]
DRAFT = f"Maybe {HERMES}? Yes."

CASES = [  # format, answer behind <think>, reasoning, content, calls
    *((name, f"Hm.\n\n{RENDERED[name]}", "Hm.", "", [ROME]) for name in MARKED),
    ("kimi_k2", section("kimi_k2", ROME, NOW), "", "", [ROME, NOW]),
    ("hermes", f"Hm.\n{HERMES}\n{OTHER}\n", "Hm.", "", [ROME, NOW]),
    ("hermes", f"Hm. {HERMES}\n</think>\n\n", "Hm.", "", [ROME]),
    ("hermes", f"Hm. {HERMES[:-15]}", "Hm.", "", [("get_weather", '{"city": "Rome"')]),
    # The answer goes on behind the thought, so a draft stays reasoning.
    ("hermes", f"{DRAFT}</think>Hello", DRAFT, "Hello", []),
    ("hermes", f"{DRAFT}\n</think>\n\n{OTHER}", DRAFT, "", [NOW]),
    ("qwen3_coder", f"{RENDERED['qwen3_coder']}</think>Hi", RENDERED["qwen3_coder"], "Hi", []),
    # No call, though it looks like the beginning of one.
    ("hermes", "I write <tool_call> or <tool_call>\n{ ...", "I write <tool_call> or <tool_call>\n{ ...", "", []),
    ("hermes", "I write <tool_call> {", "I write <tool_call> {", "", []),
    ("hermes", f"I write <tool_call> {HERMES}", "I write <tool_call>", "", [ROME]),
    ("hermes", f"a <tool_call>b {HERMES} c", "a <tool_call>b", "c", [ROME]),
    ("hermes", "a < b <tool", "a < b <tool", "", []),
    ("qwen3_coder", "x <function=get_weather> y", "x <function=get_weather> y", "", []),
    ("glm45", "x <tool_call>y</tool_call> z", "x <tool_call>y</tool_call> z", "", []),
]  # fmt: skip


def parsed(name, pieces):
    new_parser = lambda: FORMATS[name].parser(CALLABLE)  # noqa: E731
    parser = MessageParser(
        thoughts=CallsInThought(
            ReasoningSplitter(Thinking.OPENED), FORMATS[name].openings, new_parser
        ),
        calls=new_parser(),
    )
    for piece in pieces:
        parser.push(piece, last=False)
    parser.push("", last=True)
    calls = [(call.name, call.arguments) for call in parser.calls]
    return parser.reasoning, parser.content, calls


@pytest.mark.parametrize(("name", "text", "reasoning", "content", "calls"), CASES)
def test_the_parts_do_not_depend_on_how_the_text_comes(name, text, reasoning, content, calls):
    expected = (reasoning, content, calls)
    assert parsed(name, [text]) == expected
    assert parsed(name, list(text)) == expected
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), 5)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(name, pieces) == expected, pieces


def test_reasoning_with_a_tag_that_begins_no_call_streams_on():
    parser = FORMATS["hermes"].parser
    found = CallsInThought(
        ReasoningSplitter(Thinking.OPENED), ("<tool_call>",), lambda: parser(CALLABLE)
    )
    assert found.push("I write <tool_call> tags") == ("I write <tool_call> tags", "")
    assert found.push(" and more") == (" and more", "")


def test_an_answer_that_ends_with_such_a_call_is_a_call(monkeypatch):
    template = CHAT_TEMPLATE + "{{ '<think>\\n' }}{% if '</think>' in '' %}{% endif %}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    choice = api_that_says(f"Hm.\n{HERMES}").chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", None)
    assert message["tool_calls"][0]["function"] == {"name": ROME[0], "arguments": ROME[1]}
