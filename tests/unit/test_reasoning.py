"""Reasoning: what a model thinks is split from what it answers, in messages, streams and grammars."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.api.answer.reasoning import (
    ReasoningSplitter,
    Thinking,
    ThoughtCounter,
    thinking_after,
)
from scripts.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.unit.api_fakes import (
    IM_END,
    Api,
    FakeBackend,
    assert_error,
    events,
    says,
    tiny_tokenizer,
)
from tests.unit.split_case import splits
from tests.unit.test_tool_parsers import CALL, ROME, TOOLS, tag

TOKENIZER = LLTokenizer(byte_tokenizer().to_str(), n_vocab=300, eos_token=[IM_END])
OPENED, POSSIBLE, CLOSED = Thinking.OPENED, Thinking.POSSIBLE, Thinking.CLOSED
CASES = [
    (POSSIBLE, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    (POSSIBLE, "\n<think>a</think>b", "a", "b"),
    (POSSIBLE, "just <think>text</think>", "", "just <think>text</think>"),
    (POSSIBLE, "  text", "", "  text"),
    (POSSIBLE, "<thin", "", "<thin"),
    (POSSIBLE, "<think>never ends < / </think", "never ends < / </think", ""),
    (POSSIBLE, "<think> ends with space \n", "ends with space", ""),
    (POSSIBLE, "<think></think>", "", ""),
    (POSSIBLE, "<think>\n\n</think>\n\nb", "", "b"),
    (POSSIBLE, "", "", ""),
    (OPENED, "\nHm.</think>Yes </think> <think>x", "Hm.", "Yes </think> <think>x"),
    (OPENED, "still thinking", "still thinking", ""),
    (OPENED, "a </thin</think> b", "a </thin", "b"),
    (CLOSED, " text </think>", "", " text </think>"),
]


@pytest.mark.parametrize(("begins", "text", "reasoning", "content"), CASES)
def test_the_split_does_not_depend_on_how_the_text_comes(begins, text, reasoning, content):
    for found in splits(lambda: ReasoningSplitter(begins), text):
        assert found == [reasoning, content]


@pytest.mark.parametrize(("begins", "text", "reasoning", "content"), CASES)
def test_the_count_ends_with_the_closing_tag(begins, text, reasoning, content):
    """One character is a token here."""
    inside = begins is OPENED or (begins is POSSIBLE and text.lstrip().startswith("<think>"))
    expected = 0
    if inside:
        expected = text.find("</think>") + len("</think>") if "</think>" in text else len(text)
    for size in (1, 3, 5):
        counter = ThoughtCounter(begins)
        goes_on = True
        for start in range(0, len(text), size):
            if goes_on:
                goes_on = counter.push(text[start : start + size], min(start + size, len(text)))
        assert expected <= counter.num_tokens <= min(-(-expected // size) * size, len(text))
        if inside:
            assert goes_on == ("</think>" not in text)


def test_thoughts_are_shown_as_they_come():
    splitter = ReasoningSplitter(OPENED)
    shown = "".join(splitter.push(char)[0] for char in "one two th")
    assert shown == "one two th"


def test_how_an_answer_begins():
    assert thinking_after("<|im_start|>assistant\n<think>\n", None) is OPENED
    assert thinking_after("assistant\n<think>\n\n</think>\n\n", None) is CLOSED
    assert thinking_after("what is <think>?<|im_start|>assistant\n", None) is POSSIBLE
    assert thinking_after("...", "<think>I begin") is OPENED
    assert thinking_after("...", "<think>a</think>b") is CLOSED
    assert thinking_after("...", "Hello") is POSSIBLE


@pytest.fixture
def thinking(monkeypatch):
    """A chat template like Qwen's: the model opens its thought, unless enable_thinking is false."""
    template = CHAT_TEMPLATE + (
        "{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{%- if opens is defined %}{{- '<think>\\n' }}{%- endif %}"
    )
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)


OPENS = {"chat_template_kwargs": {"opens": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ANSWER = "<think>\nLet me see.\n</think>\n\nFour."


def api_that_says(text, **settings):
    return Api(FakeBackend(says(text, end=[IM_END])), **settings)


def message(api, **fields):
    return api.chat(**fields).json()["choices"][0]["message"]


@pytest.mark.usefixtures("thinking")
def test_a_message_with_reasoning():
    found = message(api_that_says(ANSWER))
    assert found["content"] == "Four."
    assert found["reasoning_content"] == found["reasoning"] == "Let me see."


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize(
    ("text", "fields", "reasoning", "content"),
    [
        ("Let me see.\n</think>\n\nFour.", OPENS, "Let me see.", "Four."),
        ("Four </think>.", OFF, None, "Four </think>."),
        ("Four.", {}, None, "Four."),
        (ANSWER, {"include_reasoning": False}, None, "Four."),
        (ANSWER, {"max_tokens": 12}, "Let", None),
    ],
)
def test_the_prompt_decides_where_it_begins(text, fields, reasoning, content):
    found = message(api_that_says(text), **fields)
    assert (found["reasoning_content"], found["content"]) == (reasoning, content)


@pytest.mark.usefixtures("thinking")
def test_a_continued_thought_goes_on():
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>It"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    api = api_that_says(" is easy.</think>4")
    found = api.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (found["reasoning_content"], found["content"]) == ("is easy.", "4")
    api = api_that_says(" is easy.</think>4")
    found = api.post("/v1/chat/completions", body | {"echo": True}).json()["choices"][0]["message"]
    assert (found["reasoning_content"], found["content"]) == ("It is easy.", "4")


@pytest.mark.usefixtures("thinking")
def test_streamed_reasoning():
    choices = [item["choices"][0] for item in events(api_that_says(ANSWER).chat(stream=True))]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("content", "") for delta in deltas) == "Four."
    first_content = next(i for i, delta in enumerate(deltas) if delta.get("content"))
    assert not any("reasoning" in delta for delta in deltas[first_content:])
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.usefixtures("thinking")
def test_thoughts_before_calls():
    choice = api_that_says(f"<think>Hm <tool_call></think>\n{tag(CALL)}").chat(tools=TOOLS)
    choice = choice.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    found = choice["message"]
    assert found["reasoning_content"] == "Hm <tool_call>" and found["content"] is None
    function = found["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ROME


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize(
    ("text", "fields", "count"),
    [
        (ANSWER, {}, ANSWER.index("\n\nFour")),
        (ANSWER, {"include_reasoning": False}, ANSWER.index("\n\nFour")),
        (ANSWER, {"n": 2}, 2 * ANSWER.index("\n\nFour")),
        (ANSWER, {"max_tokens": 12}, 12),
        ("Let me see.</think>Four.", OPENS, len("Let me see.</think>")),
        ("Four.", {}, 0),
        (ANSWER, OFF, 0),
    ],
)
def test_usage_counts_the_tokens_of_thoughts(text, fields, count):
    def reasoning_tokens(usage):
        return usage["completion_tokens_details"]["reasoning_tokens"]

    api = api_that_says(text)
    assert reasoning_tokens(api.chat(**fields).json()["usage"]) == count
    options = {"include_usage": True, "continuous_usage_stats": True}
    items = events(api.chat(stream=True, stream_options=options, **fields))
    assert reasoning_tokens(items[-1]["usage"]) == count
    assert max(reasoning_tokens(item["usage"]) for item in items) == count


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none", "enable_thinking": True}, True),
        ({"reasoning_effort": "high", **OFF}, False),
        ({"enable_thinking": False, **OFF}, False),
        ({"enable_thinking": None, "reasoning_effort": None}, True),
    ],
)
def test_thinking_is_turned_off_by_each_of_its_fields(fields, thinks):
    found = message(api_that_says(ANSWER), **fields)
    assert found["content"] == ("Four." if thinks else ANSWER)


def test_the_effort_is_a_variable_of_the_template(monkeypatch):
    template = "{{ reasoning_effort }}/{{ enable_thinking }}/{{ tone }}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    for fields, prompt in [
        ({"reasoning_effort": "minimal"}, "minimal/True/"),
        ({"reasoning_effort": "none"}, "none/False/"),
        ({"chat_template_kwargs": {"tone": "dry"}, "enable_thinking": False}, "/False/dry"),
        (
            {"chat_template_kwargs": {"reasoning_effort": "max"}, "reasoning_effort": "low"},
            "max/True/",
        ),
    ]:
        api = Api()
        assert api.chat(**fields).status_code == 200
        ((ids, _params),) = api.backend.requests.values()
        assert tiny_tokenizer().decode(ids) == prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": False}, "enable_thinking"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_a_model_that_always_thinks_refuses_to_stop(fields, param):
    api = Api(reasoning_parser="think")
    error = assert_error(api.chat(**fields), 400, "always_thinks")
    assert error["param"] == param and "include_reasoning" in error["message"]
    for other in ({"reasoning_effort": "low"}, {"enable_thinking": True}, OFF):
        assert api.chat(**other).status_code == 200
    assert Api().chat(**fields).status_code == 200, "a model without thoughts has none to stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"enable_thinking": True, **OFF}, "enable_thinking"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_wrong_thinking_fields_are_named(fields, param):
    assert assert_error(Api().chat(**fields), 400)["param"] == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_thoughts_reach_the_template(monkeypatch, name):
    template = "{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    api = Api()
    messages = [{"role": "assistant", "content": "4", name: "Hm."}]
    assert api.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    ((ids, _params),) = api.backend.requests.values()
    assert tiny_tokenizer().decode(ids) == "[Hm.]"


def test_models_that_do_not_think_have_no_such_fields():
    assert set(message(api_that_says(ANSWER))) == {"role", "content", "refusal"}
    assert message(api_that_says(ANSWER))["content"] == ANSWER


@pytest.mark.usefixtures("thinking")
def test_it_can_be_switched_off_and_on():
    assert message(api_that_says(ANSWER, reasoning_parser="none"))["content"] == ANSWER
    tiny_tokenizer()._hf.chat_template = CHAT_TEMPLATE
    assert message(api_that_says(ANSWER, reasoning_parser="think"))["content"] == "Four."


def accepts(grammar, text):
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def sent_grammar(**fields):
    api = api_that_says("x")
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    ((_ids, params),) = api.backend.requests.values()
    return params.grammar


@pytest.mark.usefixtures("thinking")
@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, ['<think>a {"</think>\n\n{"n":1}', '{"n":1}'], ["<think>a", "<think>a</think>b", "a"]),
        (OPENS, ['a\n</think>{"n":1}', '</think>\n{"n":1}'], ['{"n":1}', "a</think>"]),
        (OFF, ['{"n":1}'], ['<think>a</think>{"n":1}']),
    ],
)
def test_a_grammar_holds_after_the_thought(fields, good, bad):
    grammar = sent_grammar(response_format={"type": "json_object"}, **fields)
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


@pytest.mark.usefixtures("thinking")
def test_required_calls_come_after_the_thought():
    grammar = sent_grammar(tools=TOOLS, tool_choice="required")
    assert accepts(grammar, f"<think>a</think>\n\n{tag(CALL)}") and accepts(grammar, tag(CALL))
    assert not accepts(grammar, "<think>a</think>text")


@pytest.mark.usefixtures("thinking")
def test_a_schema_that_is_wrong_is_still_named():
    schema = {"properties": {"a": {"type": "strin"}}}
    error = assert_error(Api().chat(guided_json=schema), 400)
    assert error["param"] == "guided_json.properties.a"
