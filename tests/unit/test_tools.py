"""Tool calls in the chat API: what is offered, what comes back, required calls and their grammars."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from cluster.api.tools import FORMATS
from scripts.byte_tokenizer import byte_tokenizer
from tests.unit.api_fakes import (
    IM_END,
    Api,
    FakeBackend,
    assert_error,
    events,
    says,
    tiny_tokenizer,
)
from tests.unit.test_tool_parsers import (
    CALL,
    M2_NOW,
    M2_ROME,
    NOW,
    OTHER,
    ROME,
    SECTIONS,
    TIME,
    TOOLS,
    WEATHER,
    glm,
    minimax,
    parse,
    section,
    tag,
)

TOKENIZER = LLTokenizer(byte_tokenizer().to_str(), n_vocab=300, eos_token=[IM_END])


def api_that_says(text, **settings):
    return Api(FakeBackend(says(text, end=[IM_END])), **settings)


def test_a_message_with_calls():
    choice = (
        api_that_says(f"Sure.\n{tag(CALL)}\n{tag(OTHER)}").chat(tools=TOOLS).json()["choices"][0]
    )
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Sure." and message["role"] == "assistant"
    ids = [call.pop("id") for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(id_.startswith("call_") for id_ in ids)
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in (ROME, NOW)
    ]


def test_content_is_null_beside_calls_alone_and_calls_are_left_out_without_any():
    message = api_that_says(tag(CALL)).chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    choice = api_that_says("No.").chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "No.", "refusal": None}
    assert choice["finish_reason"] == "stop"


def streamed(response):
    """(deltas, finish reasons) of choice 0."""
    choices = [item["choices"][0] for item in events(response) if item["choices"]]
    return [choice["delta"] for choice in choices], [choice["finish_reason"] for choice in choices]


def test_streamed_calls_have_openais_shape():
    deltas, reasons = streamed(api_that_says(f"Hm {tag(CALL)}").chat(tools=TOOLS, stream=True))
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hm"
    (first, *rest) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert first.pop("id").startswith("call_")
    function = {"name": "get_weather", "arguments": ""}
    assert first == {"index": 0, "type": "function", "function": function}
    assert all(set(item) == {"index", "function"} and item["index"] == 0 for item in rest)
    assert len(rest) > 5
    assert "".join(item["function"]["arguments"] for item in rest) == ROME[1]
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


def test_each_choice_has_calls_of_its_own():
    body = api_that_says(tag(CALL)).chat(tools=TOOLS, n=3).json()
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}
    assert len(ids) == 3


def test_a_call_cut_short_says_length():
    choice = api_that_says(tag(CALL)).chat(tools=TOOLS, max_tokens=60).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert ROME[1].startswith(arguments) and arguments != ROME[1]


def test_calls_of_a_plain_json_model():
    api = api_that_says(f"[{CALL}, {OTHER}]", tool_parser="json")
    calls = api.chat(tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather", "time.now"]


def test_parallel_calls_can_be_switched_off():
    api = api_that_says(tag(CALL) + tag(OTHER))
    choice = api.chat(tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1


def test_none_means_text_and_no_tools_in_the_prompt():
    api = api_that_says(tag(CALL))
    choice = api.chat(tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert choice["message"]["content"] == tag(CALL) and choice["finish_reason"] == "stop"
    assert "get_weather" not in prompt_text(api)


def prompt_text(api):
    ((ids, _params),) = api.backend.requests.values()
    return tiny_tokenizer().decode(ids)


def test_the_template_gets_the_tools_and_the_calls_of_the_conversation():
    api = api_that_says("It is warm.")
    call = {"id": "call_1", "type": "function", "function": {"name": ROME[0], "arguments": ROME[1]}}
    messages = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "25 C"},
    ]
    response = api.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    assert response.status_code == 200
    prompt = prompt_text(api)
    assert json.dumps(WEATHER) in prompt and json.dumps(TIME) in prompt
    assert tag(CALL) in prompt and "<tool_response>\n25 C\n</tool_response>" in prompt
    tokens = api.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["count"]
    assert tokens == len(prompt_ids(api))


def prompt_ids(api):
    ((ids, _params),) = api.backend.requests.values()
    return ids


def test_a_template_without_tools_is_an_error(monkeypatch):
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", "{{ messages }}")
    error = assert_error(Api().chat(tools=TOOLS), 400, "no_tools")
    assert error["param"] == "tools"
    assert Api().chat(tools=TOOLS, tool_choice="none").status_code == 200
    assert Api().chat(tools=[]).status_code == 200


def tool(**function):
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [5]}, "tools.0"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools.1.function"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [tool()]}, "tools.0.function.name"),
        ({"tools": [tool(name="")]}, "tools.0.function.name"),
        ({"tools": [tool(name="a b")]}, "tools.0.function.name"),
        ({"tools": [tool(name="x" * 129)]}, "tools.0.function.name"),
        ({"tools": [tool(name="a\n")]}, "tools.0.function.name"),
        ({"tools": [tool(name="a", description=5)]}, "tools.0.function.description"),
        ({"tools": [tool(name="a", description="\ud800")]}, "tools.0.function.description"),
        ({"tools": [tool(name="a", parameters={"enum": ["\ud800"]})]}, "tools.0"),
        ({"tools": [tool(name="a", parameters="x")]}, "tools.0.function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": tool(name="other")}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": tool(name="a")}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_what_is_wrong_with_tools_is_named(fields, param):
    assert assert_error(Api().chat(**fields), 400)["param"] == param


def test_limits():
    many = [tool(name=f"f{i}") for i in range(4)]
    assert assert_error(Api(max_tools=3).chat(tools=many), 400)["param"] == "tools"
    big = [tool(name=f"f{i}", parameters={"enum": ["x" * 80]}) for i in range(3)]
    assert assert_error(Api(max_schema_bytes=300).chat(tools=big), 400)["param"] == "tools"
    deep = {"properties": {"a": {"properties": {"b": {}}}}}
    error = assert_error(Api(max_schema_depth=4).chat(tools=[tool(name="f", parameters=deep)]), 400)
    assert error["param"] == "tools.0"


# required and named: a grammar.


def sent_grammar(**fields):
    api = api_that_says("x", **fields.pop("settings", {}))
    response = api.chat(tools=TOOLS, **fields)
    assert response.status_code == 200, response.text
    ((_ids, params),) = api.backend.requests.values()
    return params.grammar


def accepts(grammar, text):
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


NAMED = {"type": "function", "function": {"name": "time.now"}}


@pytest.mark.parametrize(
    ("name", "fields", "good", "bad"),
    [
        (
            "hermes",
            {"tool_choice": "required"},
            [tag(CALL), f"{tag(CALL)}\n{tag(OTHER)}"],
            ["text", CALL, tag('{"name": "time.now", "arguments": {"a": 1}}')],
        ),
        (
            "hermes",
            {"tool_choice": "required", "parallel_tool_calls": False},
            [tag(CALL)],
            [f"{tag(CALL)}\n{tag(OTHER)}"],
        ),
        (
            "hermes",
            {"tool_choice": NAMED},
            [tag(OTHER)],
            [tag(CALL), f"{tag(OTHER)}\n{tag(OTHER)}"],
        ),
        *(
            (
                name,
                {"tool_choice": "required"},
                [section(name, ROME), section(name, ROME, NOW)],
                ["text", CALL, section(name, ("time.now", '{"a": 1}')), section(name)],
            )
            for name in SECTIONS
        ),
        *(
            (
                name,
                {"tool_choice": "required", "parallel_tool_calls": False},
                [section(name, ROME)],
                [section(name, ROME, NOW)],
            )
            for name in SECTIONS
        ),
        (
            "glm45",
            {"tool_choice": "required"},
            [glm("get_weather", city="a </b>\n", days=3), f"{glm('time.now')}\n{glm('time.now')}"],
            ["text", tag(CALL), glm("get_weather", days=3), glm("get_weather", city="a", days="b")],
        ),
        (
            "minimax_m2",
            {"tool_choice": "required"},
            [minimax(("get_weather", {"city": "a </b>\n", "days": 3})), minimax(M2_NOW, M2_ROME)],
            ["text", minimax(), minimax(("get_weather", {"days": 3})), minimax(("f", {}))],
        ),
        ("glm45", {"tool_choice": NAMED}, [glm("time.now")], [glm("get_weather", city="a")]),
        ("json", {"tool_choice": "required"}, [CALL, f"[{CALL}, {OTHER}]"], ["x", tag(CALL), "[]"]),
        ("json", {"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"[{CALL}]"]),
        ("json", {"tool_choice": NAMED}, [OTHER], [CALL, f"[{OTHER}]"]),
        ("hermes", {"response_format": {"type": "json_object"}}, [tag(CALL), '{"a": 1}'], ["text"]),
        (
            "hermes",
            {"response_format": {"type": "json_object"}, "tool_choice": "required"},
            [tag(CALL)],
            ['{"a": 1}'],
        ),
        (
            "hermes",
            {"response_format": {"type": "json_object"}, "tool_choice": "none"},
            ['{"a": 1}'],
            [tag(CALL)],
        ),
    ],
)
def test_what_a_required_call_may_be(name, fields, good, bad):
    grammar = sent_grammar(settings={"tool_parser": name}, **fields)
    for text in good:
        assert accepts(grammar, text), text
    for text in bad:
        assert not accepts(grammar, text), text


def test_a_free_choice_has_no_grammar():
    assert sent_grammar() is None
    assert sent_grammar(tool_choice="auto") is None


def test_a_broken_schema_matters_only_where_it_is_used():
    broken = [WEATHER, tool(name="f", parameters={"properties": {"a": {"type": "strin"}}})]
    assert api_that_says("x").chat(tools=broken).status_code == 200
    error = assert_error(Api().chat(tools=broken, tool_choice="required"), 400)
    assert error["param"] == "tools.1.function.parameters.properties.a"
    named = tool(name="get_weather")
    assert api_that_says("x").chat(tools=broken, tool_choice=named).status_code == 200


def test_schemas_beyond_grammars_are_followed_as_far_as_they_go_unless_strict():
    parameters = {
        "type": "object",
        "properties": {"s": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
        "required": ["s"],
        "additionalProperties": False,
    }
    fields = {"tool_choice": "required"}
    api = api_that_says("x")
    assert api.chat(tools=[tool(name="f", parameters=parameters)], **fields).status_code == 200
    ((_ids, params),) = api.backend.requests.values()
    assert accepts(params.grammar, tag('{"name": "f", "arguments": {"s":[1,2]}}'))
    assert not accepts(params.grammar, tag('{"name": "f", "arguments": {"s":["a"]}}'))
    strict = [tool(name="f", parameters=parameters, strict=True)]
    error = assert_error(Api().chat(tools=strict, **fields), 400)
    assert error["param"] == "tools.0.function.parameters.properties.s"


@pytest.mark.parametrize(
    ("schema", "others"),
    [
        ({}, False),
        ({"required": ["a"]}, False),
        ({"required": ["b"]}, True),
        ({"additionalProperties": True}, True),
        ({"allOf": [{"required": ["b"]}]}, True),
        ({"properties": {}}, False),
        ({"properties": None}, True),
    ],
)
def test_arguments_have_no_others_than_the_listed_properties(schema, others):
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, **schema}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    api = api_that_says("x")
    tools = [tool(name="f", parameters=parameters)]
    assert api.chat(tools=tools, tool_choice="required").status_code == 200
    ((_ids, params),) = api.backend.requests.values()
    assert accepts(params.grammar, tag('{"name": "f", "arguments": {"a":1,"b":2}}')) == others


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_drawn_from_a_grammar_are_parsed_and_valid(name, choice):
    """Random answers of the grammar, back through the parser of the same format."""
    grammar = sent_grammar(settings={"tool_parser": name}, tool_choice=choice)
    rng = random.Random(name)
    schemas = {"get_weather": WEATHER["function"]["parameters"], "time.now": {"maxProperties": 0}}
    for _ in range(20):
        content, calls = parse(name, [draw(grammar, rng)])
        assert calls and not content
        for called, arguments in calls:
            assert "\n" not in arguments
            jsonschema.validate(json.loads(arguments), schemas[called])
        if choice is NAMED:
            assert [called for called, _ in calls] == ["time.now"]


def draw(grammar, rng):
    """A random complete answer; it ends as soon as it may."""
    matcher, answer = LLMatcher(TOKENIZER, grammar, log_level=0), bytearray()
    while not matcher.is_accepting():
        # of a text that may be anything, of a section of any number of calls, and of a thought
        ends = [b"</arg_value>", b"\n</parameter>\n", b"</parameter>", b"</minimax:tool_call>"]
        thinks = b"analysis" in answer and b"commentary" not in answer
        ends = [*map(list, ends), *([list(b"<|end|>")] * thinks)]
        possible = [end for end in ends if matcher.validate_tokens(end) == len(end)]
        if possible and rng.random() < 0.3:
            end = rng.choice(possible)
            assert matcher.try_consume_tokens(end) == len(end)
            answer += bytes(end)
            continue
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i // 8] >> (i % 8) & 1]
        token = rng.choice([i for i in allowed if i in b'abcdefghij0123456789"}'] or allowed)
        assert matcher.consume_token(token)
        answer.append(token)
    return answer.decode()


def test_finish_reasons_of_required_and_named_calls():
    api = api_that_says(tag(OTHER))
    assert (
        api.chat(tools=TOOLS, tool_choice="required").json()["choices"][0]["finish_reason"]
        == "tool_calls"
    )
    api = api_that_says(tag(OTHER))
    choice = api.chat(tools=TOOLS, tool_choice=NAMED).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["message"]["tool_calls"]
