"""What chat templates of released models need: their own switch for thoughts, and complete definitions of tools."""

import pytest

from scripts.byte_tokenizer import CHAT_TEMPLATE
from tests.unit.api_fakes import IM_END, Api, FakeBackend, assert_error, says, tiny_tokenizer

ANSWER = "Hm.</think>Four."
# As DeepSeek-V3.1's: no thoughts unless `thinking` is set.
SWITCH = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ messages[0].content }}|{{ '<think>' if thinking else '</think>' }}"
)
# As those of Qwen3's Instruct models: the tags are there for thoughts of earlier turns.
HISTORY = CHAT_TEMPLATE + "{% if '</think>' in messages[0].content %}{% endif %}"


@pytest.fixture
def templates(monkeypatch):
    def use(template):
        monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)

    return use


def prompt_text(api):
    ((ids, _params),) = api.backend.requests.values()
    return tiny_tokenizer().decode(ids)


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"thinking": False}}, False),
    ],
)
def test_the_switch_for_thoughts_may_be_thinking(templates, fields, thinks):
    templates(SWITCH)
    api = Api(FakeBackend(says(ANSWER, end=[IM_END])))
    response = api.chat("2+2?", **fields)
    assert response.status_code == 200, response.text
    assert prompt_text(api) == ("2+2?|<think>" if thinks else "2+2?|</think>")
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (
        ("Hm.", "Four.") if thinks else (None, ANSWER)
    )


@pytest.mark.parametrize("template", [SWITCH.replace("thinking", "old_thinking"), CHAT_TEMPLATE])
def test_other_templates_get_no_such_variable(templates, template):
    templates(template + "{{ thinking }}")
    api = Api()
    assert api.chat(enable_thinking=True).status_code == 200
    assert "True" not in prompt_text(api)


def test_a_model_that_never_thinks_needs_no_switch(templates):
    templates(HISTORY)
    for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert Api().chat(**fields).status_code == 200
    templates(HISTORY + "<think>")
    for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        assert_error(Api().chat(**fields), 400, "always_thinks")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ({}, 'f//{"type": "object", "properties": {}}'),
        ({"description": None, "parameters": None}, 'f//{"type": "object", "properties": {}}'),
        ({"description": "D"}, 'f/D/{"type": "object", "properties": {}}'),
        ({"parameters": {"type": "object"}}, 'f//{"type": "object"}'),
    ],
)
def test_fields_of_tools_that_a_template_needs_are_filled(templates, function, text):
    templates(
        "{% for tool in tools %}{% set f = tool.function %}"
        "{{ f.name + '/' + f.description + '/' + f.parameters | tojson }}{% endfor %}"
    )
    api = Api()
    tool = {"type": "function", "function": {"name": "f", **function}}
    response = api.chat(tools=[tool])
    assert response.status_code == 200, response.text
    assert prompt_text(api) == text


def test_defaults_of_listed_values_are_texts_where_a_template_needs_them(templates):
    templates(
        "{% for key, schema in tools[0].function.parameters.properties.items() %}"
        "{{ key + '=' + schema.default + ' ' }}{% endfor %}"
    )
    properties = {
        "a": {"type": "integer", "enum": [1, 2], "default": 1},
        "b": {"oneOf": [{"type": "boolean"}], "default": True},
        "c": {"enum": ["x"], "default": "x"},
        "d": {"default": "5"},
    }
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    api = Api()
    response = api.chat(tools=[{"type": "function", "function": function}])
    assert response.status_code == 200, response.text
    assert prompt_text(api) == "a=1 b=true c=x d=5 "


def test_other_templates_get_tools_as_they_are(templates):
    templates("{{ tools | tojson }}")
    api = Api()
    assert api.chat(tools=[{"type": "function", "function": {"name": "f"}}]).status_code == 200
    assert prompt_text(api) == '[{"type": "function", "function": {"name": "f"}}]'


def test_what_a_template_refuses_for_other_reasons_is_an_error(templates):
    templates("{{ raise_exception('no ' ~ tools[0].function.description) }}")
    for function, reason in (({}, "no "), ({"description": "D", "parameters": {}}, "no D")):
        tool = {"type": "function", "function": {"name": "f", **function}}
        error = assert_error(Api().chat(tools=[tool]), 400, "chat_template_error")
        assert error["message"].endswith(f": {reason}")


# As gpt-oss's and MiniMax-M2's: only the first message is one of the system. As Qwen3.5's: all others are refused.
FIRST = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in rest %}{% if m.role != 'system' %}<{{ m.content }}>{% endif %}{% endfor %}"
)
REFUSED = "{% else %}{{ raise_exception('no') }}"
STRICT = FIRST.replace("{% endif %}{% endfor %}", REFUSED + "{% endif %}{% endfor %}")


@pytest.mark.parametrize("template", [FIRST, STRICT])
@pytest.mark.parametrize(
    ("roles", "prompt"),
    [
        (("system", "user"), "[0]<1>"),
        (("system", "developer", "user"), "[0\n\n1]<2>"),
        (("user", "assistant", "system", "user"), "[2]<0><1><3>"),
        (("system", "user", "developer"), "[0\n\n2]<1>"),
        (("user",), "<0>"),
    ],
)
def test_messages_of_the_system_that_a_template_leaves_out_join_the_first(
    templates, template, roles, prompt
):
    """Codex sends instructions and a message of the developer, OpenCode several messages of the system."""
    templates(template)
    api = Api()
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    response = api.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200, response.text
    assert prompt_text(api) == prompt


def test_templates_that_take_them_get_them_where_they_are(templates):
    templates("{% for m in messages %}<{{ m.role }} {{ m.content }}>{% endfor %}")
    api = Api()
    messages = [
        {"role": role, "content": str(i)}
        for i, role in enumerate(("system", "developer", "user", "system"))
    ]
    assert api.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    assert prompt_text(api) == "<system 0><system 1><user 2><system 3>"


def test_instructions_and_developer_messages_of_responses(templates):
    templates(STRICT)
    api = Api(FakeBackend(says("Yes.", end=[IM_END])))
    body = {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Ask before you write."},
            {"role": "user", "content": "Hi"},
        ],
    }
    response = api.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    assert prompt_text(api) == "[Be brief.\n\nAsk before you write.]<Hi>"


def called(*ids, **fields):
    calls = [
        {"id": id_, "type": "function", "function": {"name": f"f{id_}", "arguments": "{}"}}
        for id_ in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def result(id_, text):
    return {"role": "tool", "tool_call_id": id_, "content": text}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([called("1"), result("1", "one")], "(f1 )one|"),
        (
            [called("1", "2", reasoning="Hm."), result("1", "one"), result("2", "two")],
            "(f1 Hm.)one|(f2 )two|",
        ),
        ([called("1", "2"), result("2", "two"), result("1", "one")], "(f1 )one|(f2 )two|"),
        (
            [called("1", "2"), result("1", "a"), result("1", "b"), result("3", "c")],
            "(f1 )a|b|(f2 )c|",
        ),
        (
            [called("1", "2"), {"role": "user", "content": "So?"}, called("3", "4")],
            "(f1 )(f2 )So?|(f3 )(f4 )",
        ),
    ],
)
def test_each_call_has_a_message_where_a_template_has_one_call(templates, messages, prompt):
    """gpt-oss's template: a second call was left out, and its result was that of the first."""
    templates(
        "{% for message in messages %}{% if message.tool_calls %}"
        "({{ message.tool_calls[0].function.name }} {{ message.thinking }})"
        "{% else %}{{ message.content }}|{% endif %}{% endfor %}"
    )
    api = Api()
    response = api.post("/v1/chat/completions", {"messages": messages})
    assert response.status_code == 200, response.text
    assert prompt_text(api) == prompt


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(templates, arguments):
    templates("{{ messages[0].tool_calls[0].function.arguments.items() | list }}")
    message = called("1")
    message["tool_calls"][0]["function"]["arguments"] = arguments
    api = Api()
    assert api.post("/v1/chat/completions", {"messages": [message]}).status_code == 200
    assert prompt_text(api) == "[]"


@pytest.mark.parametrize(("end", "content"), [("</think>", "Four.\n"), ("</think>\n", "\nFour.\n")])
def test_an_answer_next_to_an_empty_thought_has_no_line_end_before_it(templates, end, content):
    """GLM-4.5 without thoughts: its prompt ends with the tag, and the model begins with a line end."""
    templates("{{ messages[0].content }}<think>" + end.replace("\n", "{{ '\\n' }}"))
    message = Api(FakeBackend(says("\nFour.\n", end=[IM_END]))).chat().json()["choices"][0]
    assert message["message"]["content"] == content


def test_an_answer_that_goes_on_keeps_its_white_space(templates):
    templates("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think></think>"},
    ]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    api = Api(FakeBackend(says("\nFour.", end=[IM_END])), reasoning_parser="think")
    choice = api.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "\nFour."


def test_ids_of_calls_have_nine_characters_where_a_template_needs_them(templates):
    """Mixtral's template: ids of other servers, whose conversation goes on here, were a 400."""
    templates(
        "{% for m in messages %}{% set id = m.tool_calls[0].id if m.tool_calls else m.tool_call_id %}"
        "{% if id and id | length != 9 %}{{ raise_exception('id') }}{% endif %}{{ id }} {% endfor %}"
    )
    for given, short in [
        ("abc123XYZ", "abc123XYZ"),
        ("call_0123456789abcdef", "789abcdef"),
        ("toolu_a-b", "00tooluab"),
    ]:
        api = Api()
        messages = [called(given), result(given, "one"), {"role": "user", "content": "So?"}]
        response = api.post("/v1/chat/completions", {"messages": messages})
        assert response.status_code == 200, response.text
        assert prompt_text(api) == f"{short} {short}  "
