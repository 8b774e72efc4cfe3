"""Fields that clients send by default or with null: they change neither the prompt nor the sampling."""

import pytest

from tests.unit.api_fakes import IM_END, Api, FakeBackend, assert_error, events, says

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": None,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
# What each client adds to messages and model when it is used without options.
CLIENTS = {
    "langchain-openai": {"stream": False, "n": 1, "temperature": None, "seed": None},
    "litellm": {"extra_body": {}, "user": None, "max_retries": 0, "metadata": {}},
    "instructor": {"max_tokens": None, "strict": True, "validation_context": None},
    "openai-agents": {
        "store": None,
        "metadata": None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "stream_options": None,
        "top_logprobs": None,
        "prompt_cache_retention": None,
        "verbosity": None,
        "reasoning_effort": None,
        "response_format": None,
    },
    "ai-sdk": {
        "max_completion_tokens": None,
        "logit_bias": None,
        "logprobs": False,
        "top_logprobs": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "prediction": None,
        "service_tier": "auto",
        "verbosity": "medium",
        "stop": None,
    },
    "openai": {
        "store": False,
        "metadata": {"run": "1"},
        "service_tier": "default",
        "safety_identifier": "u",
        "prompt_cache_key": "k",
        "user": "u",
        "web_search_options": None,
        "modalities": ["text"],
        "audio": None,
        "functions": None,
        "function_call": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
    },
    "vllm": {
        "best_of": 1,
        "use_beam_search": False,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "truncate_prompt_tokens": None,
        "prompt_logprobs": None,
        "chat_template": None,
        "chat_template_kwargs": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "documents": None,
        "priority": 0,
        "logits_processors": None,
        "include_reasoning": True,
        "vllm_xargs": None,
    },
}


def sent(**fields):
    """The prompt and the sampling parameters that reach the engine, and the message."""
    api = Api(FakeBackend(says("Four.", end=[IM_END])))
    response = api.chat("2+2?", **{"seed": 1, **fields})
    assert response.status_code == 200, response.text
    ((ids, params),) = api.backend.requests.values()
    return ids, params, response.json()["choices"][0]["message"]


@pytest.mark.parametrize("client", CLIENTS)
def test_defaults_of_clients_change_nothing(client):
    assert sent(**{**CLIENTS[client], "seed": 1}) == sent()


@pytest.mark.parametrize("client", CLIENTS)
def test_defaults_of_clients_change_no_stream(client):
    fields = {**CLIENTS[client], "stream": True, "stream_options": {"include_usage": True}}
    api = Api(FakeBackend(says("Four.", end=[IM_END])))
    *items, last = events(api.chat("2+2?", **fields))
    text = "".join(item["choices"][0]["delta"].get("content", "") for item in items)
    assert text == "Four." and last["usage"]["completion_tokens"] == 6


def test_a_seed_of_null_is_a_random_one():
    seeds = {sent(seed=None)[1].seed for _ in range(4)}
    assert len(seeds) == 4


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("choice", [None, "auto"])
def test_strict_tools_with_a_free_choice_leave_the_answer_free(strict, choice):
    function = {**TOOL["function"], "strict": strict}
    tools = [{"type": "function", "function": function}]
    _, params, message = sent(tools=tools, tool_choice=choice, parallel_tool_calls=True)
    assert params.grammar is None and message["content"] == "Four."


def test_tools_and_a_form_together_allow_either():
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    _, params, _ = sent(tools=[TOOL], response_format=form)
    assert "calls | @answer" in params.grammar
    _, params, _ = sent(tools=[TOOL], response_format=form, tool_choice="none")
    assert "calls" not in params.grammar


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 4, "max_completion_tokens": None}, 4),
        ({"max_tokens": 4, "max_completion_tokens": 3}, 3),
    ],
)
def test_the_newer_name_of_the_limit_wins(fields, limit):
    assert sent(**fields)[1].max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"verbosity": "high"}, "verbosity"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 0}, "n"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields, param):
    assert assert_error(Api().chat(**fields), 400)["param"] == param
