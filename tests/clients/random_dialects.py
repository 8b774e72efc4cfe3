"""Translates random chat bodies to bodies of the responses API and of Anthropic's messages, with their own fields."""

import random
from typing import Any

Fields = dict[str, Any]

# Of chat completions; the other routes refuse them or give their names another meaning.
_CHAT_ONLY = (
    *("messages", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "echo"),
    *("tools", "tool_choice", "response_format", "prompt_logprobs", "truncate_prompt_tokens"),
    *(
        "return_token_ids",
        "return_tokens_as_token_ids",
        "request_id",
        "documents",
        "stream_options",
    ),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_BOTH = ("model", "temperature", "top_p", "stream", "seed")


def as_response(chat: Fields, rng: random.Random) -> Fields:
    """A body of /v1/responses."""
    body = {name: value for name, value in chat.items() if name not in _CHAT_ONLY}
    items = [item for message in chat["messages"] for item in _items(message)]
    body |= {"input": rng.choice((items, items, "Hello")), "max_output_tokens": chat["max_tokens"]}
    if "tools" in chat:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
        choice = chat["tool_choice"]
        is_named = isinstance(choice, dict)
        body["tool_choice"] = (
            {"type": "function", "name": choice["function"]["name"]} if is_named else choice
        )
    if (form := chat.get("response_format")) and form["type"] == "json_schema":
        form = {"type": "json_schema", **form["json_schema"]}
    if form:
        body["text"] = {"format": form}
    own = {
        "instructions": "Be short.",
        "include": ["message.output_text.logprobs"],
        "store": rng.random() < 0.5,
        "background": rng.random() < 0.5,
        "truncation": rng.choice(("auto", "disabled")),
        "metadata": {"a": "b"},
        "reasoning": {"effort": rng.choice(("low", "none")), "summary": "auto"},
        "previous_response_id": "resp_1",
    }
    return body | _some(own, rng)


def _items(message: Fields) -> list[Fields]:
    """The items of a message."""
    content, calls = message["content"], message.get("tool_calls") or ()
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": "call_1", "output": content}]
    items: list[Fields] = []
    if content is not None:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        if isinstance(content, list):
            content = [{"type": kind, "text": part["text"]} for part in content]
        items.append({"role": message["role"], "content": content})
    for call in calls:
        items.append({"type": "function_call", "call_id": "call_1", **call["function"]})
    return items


def as_message(chat: Fields, rng: random.Random) -> Fields:
    """A body of /v1/messages."""
    body = {name: chat[name] for name in _BOTH if name in chat}
    body |= {"max_tokens": chat["max_tokens"]}
    body["messages"] = [_message(message) for message in chat["messages"]]
    if "tools" in chat:
        functions = [tool["function"] for tool in chat["tools"]]
        schema = {"type": "object"}
        body["tools"] = [
            {"name": function["name"], "input_schema": function.get("parameters", schema)}
            for function in functions
        ]
        kinds = ("auto", "any", "none")
        choices = [*({"type": kind} for kind in kinds), {"type": "tool", "name": "tool_0"}]
        body["tool_choice"] = rng.choice(choices)
    own = {
        "system": rng.choice(("Be short.", [{"type": "text", "text": "Be short."}])),
        "stop_sequences": rng.choice(([], ["e"])),
        "top_k": rng.choice((1, 50)),
        "thinking": {"type": rng.choice(("adaptive", "disabled")), "budget_tokens": 1024},
        "output_config": rng.choice(
            ({}, {"effort": "low"}, {"format": {"type": "json_schema", "schema": {}}})
        ),
        "metadata": {"user_id": "a"},
        "thread": {"type": "create"},
    }
    return body | _some(own, rng)


def _message(message: Fields) -> Fields:
    role, content = message["role"], message["content"]
    if role == "tool":
        block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        return {"role": "user", "content": [block]}
    blocks = content or []
    if message.get("tool_calls"):
        blocks = [{"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}]
    return {"role": "system" if role == "developer" else role, "content": blocks}


def _some(fields: Fields, rng: random.Random) -> Fields:
    return {name: fields[name] for name in rng.sample(sorted(fields), rng.choice((0, 0, 1, 3)))}
