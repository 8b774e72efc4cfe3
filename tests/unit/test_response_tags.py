"""The tags of ERNIE-4.5-Thinking around its answers."""

import pytest

from cluster.api.answer.reasoning import ReasoningSplitter, Thinking
from cluster.api.answer.response_tags import ResponseTags
from tests.unit.api_fakes import tiny_tokenizer
from tests.unit.split_case import splits
from tests.unit.test_reasoning import CHAT_TEMPLATE, api_that_says
from tests.unit.test_tool_parsers import CALL, ROME, TOOLS, tag

ANSWER = "Hm.\n</think>\n\n<response>\nHello </b>\n\nyou.\n</response>\n"
CASES = [  # answer behind <think>, reasoning, content
    (ANSWER, "Hm.", "Hello </b>\n\nyou."),
    ("Hm.</think><response>a</response>", "Hm.", "a"),
    ("Hm.</think>\n\n<response>\n\n</response>\n", "Hm.", ""),
    ("Hm.</think>\n<response>\na\n</response>\n<tool_call>", "Hm.", "a<tool_call>"),
    # Cut, or without tags.
    ("Hm.</think>\n<response>\na\n</resp", "Hm.", "a"),
    ("Hm.</think>\n<response>\na < b", "Hm.", "a < b"),
    ("Hm.</think>\n<respon", "Hm.", "<respon"),
    ("Hm.</think>\nHello <response> </response> ", "Hm.", "Hello <response> </response> "),
    ("Hm.", "Hm.", ""),
    ("Hm. <response> is a tag", "Hm. <response> is a tag", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), CASES)
def test_the_split_does_not_depend_on_how_the_text_comes(text, reasoning, content):
    for found in splits(lambda: ResponseTags(ReasoningSplitter(Thinking.OPENED)), text):
        assert found == [reasoning, content]


def test_answers_stream():
    splitter = ResponseTags(ReasoningSplitter(Thinking.OPENED))
    shown = "".join(splitter.push(char)[1] for char in ANSWER.partition("you")[0] + "yo")
    assert shown == "Hello </b>\n\nyo"


@pytest.fixture
def ernie(monkeypatch):
    """A chat template like that of ERNIE-4.5-21B-A3B-Thinking, which opens the thought."""
    template = (
        "<global_setting>\nthink_mode=True\n</global_setting>{{ tools | tojson if tools }}"
        + CHAT_TEMPLATE
        + "{% if messages[-1].role == 'assistant' %}<response>\n</response>{% endif %}<think>\n"
    )
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)


@pytest.mark.usefixtures("ernie")
def test_auto_finds_the_tags_in_the_template():
    message = api_that_says(ANSWER).chat().json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Hello </b>\n\nyou.")
    message = api_that_says(ANSWER, reasoning_parser="think").chat().json()["choices"][0]["message"]
    assert message["content"].startswith("<response>")


@pytest.mark.usefixtures("ernie")
def test_calls_behind_the_thought():
    choice = (
        api_that_says(f"Hm.\n</think>\n\n\n{tag(CALL)}\n").chat(tools=TOOLS).json()["choices"][0]
    )
    message = choice["message"]
    assert (choice["finish_reason"], message["reasoning"], message["content"]) == (
        "tool_calls",
        "Hm.",
        None,
    )
    assert message["tool_calls"][0]["function"] == {"name": ROME[0], "arguments": ROME[1]}


def test_other_templates_with_such_a_tag_keep_it(monkeypatch):
    template = CHAT_TEMPLATE + "{% if false %}<response></response>{% endif %}<think>\n"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    message = api_that_says(ANSWER).chat().json()["choices"][0]["message"]
    assert message["content"].startswith("<response>")
