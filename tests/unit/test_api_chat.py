"""POST /v1/chat/completions: messages, template, roles in streams, limits."""

import pytest

from tests.unit.api_fakes import (
    IM_END,
    MODEL,
    Api,
    FakeBackend,
    assert_error,
    events,
    says,
    tiny_tokenizer,
    usage,
)


def prompt_text(api):
    (ids, _params), *_ = api.backend.requests.values()
    return tiny_tokenizer().decode(ids)


def test_answer_has_the_documented_shape():
    api = Api(FakeBackend(says("hello", end=[IM_END])))
    body = api.chat("hi", model=MODEL).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") and body.pop("system_fingerprint")
    prompt_tokens = len("user\nhi\nassistant\n") + 3
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": usage(prompt_tokens, 6),
    }
    assert prompt_text(api) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def post(api, messages, **fields):
    return api.post("/v1/chat/completions", {"messages": messages, **fields})


def test_all_roles_and_content_forms():
    api = Api()
    response = post(
        api,
        [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "42"},
            {"role": "assistant", "content": "ok", "name": "bob"},
            {"role": "user", "content": ""},
        ],
    )
    assert response.status_code == 200
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    turns = [
        "system\nbe brief",
        "user\na\nb",
        "assistant\n" + call,
        "tool\n<tool_response>\n42\n</tool_response>",
        "assistant\nok",
        "user\n",
    ]
    expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert prompt_text(api) == expected + "<|im_start|>assistant\n"


def test_stream_starts_with_the_role():
    api = Api(FakeBackend(says("hey", end=[IM_END])))
    items = events(api.chat(stream=True))
    assert {item["object"] for item in items} == {"chat.completion.chunk"}
    deltas = [item["choices"][0]["delta"] for item in items]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "e"},
        {"content": "y"},
        {"content": ""},
    ]
    reasons = [item["choices"][0]["finish_reason"] for item in items]
    assert reasons == [None] * 4 + ["stop"]


def test_stream_of_several_choices_gives_each_its_role():
    api = Api(FakeBackend(says("abc")))
    options = {"include_usage": True}
    *items, last = events(api.chat(stream=True, n=3, max_tokens=3, stream_options=options))
    assert last["usage"]["completion_tokens"] == 9
    for index in range(3):
        mine = [item["choices"][0] for item in items if item["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in mine) == "abc"
        assert mine[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1000 - 21),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 8}, 8),
        ({"max_tokens": 7, "max_completion_tokens": 8}, 8),
    ],
)
def test_output_limit(fields, expected):
    api = Api()
    assert api.chat("hi", **fields).status_code == 200
    ((ids, params),) = api.backend.requests.values()
    assert len(ids) == 21
    assert params.max_tokens == expected


def test_default_output_is_bounded_by_the_kv_cache():
    api = Api(FakeBackend(max_request_tokens=100))
    api.chat("hi")
    ((_, params),) = api.backend.requests.values()
    assert params.max_tokens == 100 - 21


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": [], "tool_choice": "auto", "logprobs": False, "top_logprobs": 0},
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": True, "functions": []},
        {"modalities": ["text"], "response_format": {"type": "text"}, "reasoning_effort": None},
        {"store": False, "service_tier": "auto", "user": "u", "metadata": {"a": "b"}},
    ],
)
def test_parameters_that_are_switched_off_are_accepted(neutral):
    assert Api().chat(**neutral).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        (["hi"], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "robot", "content": "hi"}], "messages.0.role"),
        ([{"role": ["user"], "content": "hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["hi"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.image_url"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "refusal"}]}], "messages.0.content.0.refusal"),
        ([{"role": "user", "content": "a", "name": 5}], "messages.0.name"),
        ([{"role": "assistant", "tool_calls": 5}], "messages.0.tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_bad_messages_are_named(messages, param):
    assert assert_error(post(Api(), messages), 400)["param"] == param


def test_parts_of_the_responses_api_are_text():
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "refusal", "refusal": "c"},
        {"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}},
    ]
    api = Api()
    assert api.chat(parts).status_code == 200
    assert "user\na\nb\nc\nd<|im_end|>" in prompt_text(api)


@pytest.mark.parametrize("content", ["message.content", "m['content']", 'message["content"]'])
def test_a_template_of_parts_gets_parts(monkeypatch, content):
    name = content.partition("[")[0].partition(".")[0]
    loop = f"{{% for part in {content} %}}<{{{{ part.type }}}}>{{{{ part['text'] }}}}{{% endfor %}}"
    template = f"{{% for {name} in messages %}}{loop}{{% endfor %}}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    for content in ("hi", [{"type": "text", "text": "hi"}]):
        api = Api()
        assert api.chat(content).status_code == 200
        assert prompt_text(api) == "<text>hi"
    api = Api()
    assert post(api, PARTIAL, continue_final_message=True).status_code == 200
    assert prompt_text(api) == "<text>hi<text>Well, "


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    api = Api()
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    assert post(api, messages).status_code == 200
    assert '{"name": "f", "arguments": {}}' in prompt_text(api)


def test_a_message_with_calls_does_not_go_on():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "So", "tool_calls": [call]}]
    error = assert_error(post(Api(), messages, continue_final_message=True), 400)
    assert error["param"] == "continue_final_message" and "tool_calls" in error["message"]


def test_a_thought_of_the_message_that_goes_on_is_kept(monkeypatch):
    template = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }}<end>{% endfor %}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    api = Api()
    messages = [{"role": "assistant", "content": "So ", "reasoning": "Hm"}]
    assert post(api, messages, continue_final_message=True).status_code == 200
    assert prompt_text(api) == "<think>Hm</think>So "


def test_template_variables(monkeypatch):
    monkeypatch.setattr(
        tiny_tokenizer()._hf, "chat_template", "{{ 'think' if enable_thinking else 'plain' }}"
    )
    api = Api()
    api.chat(chat_template_kwargs={"enable_thinking": True})
    assert prompt_text(api) == "think"
    error = assert_error(api.chat(chat_template_kwargs={"tokenize": True}), 400)
    assert error["param"] == "chat_template_kwargs"


def test_documents_reach_the_template(monkeypatch):
    template = "{% for d in documents %}{{ d.title }}={{ d.text }};{% endfor %}{{ tools }}"
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    api = Api()
    documents = [{"title": "a", "text": "1"}, {"title": "b", "text": "2"}]
    assert api.chat(documents=documents).status_code == 200
    assert prompt_text(api) == "a=1;b=2;None"
    assert assert_error(api.chat(documents=["a"]), 400)["param"] == "documents.0"
    long = [{"title": "t", "text": "x" * 900}]
    api = Api(inline_body_bytes=50)  # rendered in a thread
    assert api.chat(documents=long).status_code == 200
    assert prompt_text(api).startswith("t=xxx")


PARTIAL = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
OPEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nWell,"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, f"{OPEN} <|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, f"{OPEN} <|im_end|>\n"),
        ({"continue_final_message": True}, f"{OPEN} "),
        ({"continue_final_message": True, "add_generation_prompt": False}, f"{OPEN} "),
        ({"continue_final_message": False}, f"{OPEN} <|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_how_the_prompt_ends(fields, expected):
    api = Api()
    assert post(api, PARTIAL, **fields).status_code == 200
    assert prompt_text(api) == expected


def test_continued_message_and_a_new_turn_exclude_each_other():
    fields = {"continue_final_message": True, "add_generation_prompt": True}
    assert assert_error(post(Api(), PARTIAL, **fields), 400)["param"] == "continue_final_message"


def test_continued_message_that_the_template_drops(monkeypatch):
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", "{{ messages[0].content }}")
    error = assert_error(post(Api(), PARTIAL, continue_final_message=True), 400)
    assert error["code"] == "chat_template_error"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_the_message_that_goes_on(stream):
    api = Api(FakeBackend(says("hello", end=[IM_END])))
    response = post(api, PARTIAL, continue_final_message=True, echo=True, stream=stream)
    if stream:
        text = "".join(item["choices"][0]["delta"]["content"] for item in events(response))
    else:
        text = response.json()["choices"][0]["message"]["content"]
    assert text == "Well, hello"


def test_echo_without_a_message_of_the_assistant():
    body = Api(FakeBackend(says("x", end=[IM_END]))).chat("hi", echo=True).json()
    assert body["choices"][0]["message"]["content"] == "x"


def test_developer_role_reaches_a_template_that_knows_it(monkeypatch):
    monkeypatch.setattr(
        tiny_tokenizer()._hf, "chat_template", "{{ messages[0].role }}{# developer #}"
    )
    api = Api()
    post(api, [{"role": "developer", "content": "x"}])
    assert prompt_text(api) == "developer"


def test_no_template(monkeypatch):
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", None)
    error = assert_error(Api().chat(), 400, "no_chat_template")
    assert "/v1/completions" in error["message"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.nothing.here }}",
        "{{ messages[7].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% for %}",
    ],
)
def test_template_that_raises(monkeypatch, template):
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", template)
    assert_error(Api().chat(), 400, "chat_template_error")


def test_empty_rendering_is_an_empty_prompt(monkeypatch):
    monkeypatch.setattr(tiny_tokenizer()._hf, "chat_template", "{{ '' }}")
    assert "empty" in assert_error(Api().chat(), 400)["message"]
