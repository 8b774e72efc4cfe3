"""litellm over chat completions, responses and Anthropic's messages."""

import asyncio
import json

import litellm
from demo import ANSWER, HELLO, KEY, MODEL, QUESTION, REPORT, Weather

APIS = ("chat", "messages")
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": Weather.model_json_schema()},
}


def complete(url: str, api: str, text: str | list = HELLO, **fields):
    """litellm's completion(), in OpenAI's terms whichever API it speaks."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    provider, base = ("openai", f"{url}/v1") if api == "chat" else ("anthropic", url)
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 300} | fields
    model = f"{provider}/{fields.pop('model')}"
    return litellm.completion(
        model, messages, api_base=base, api_key=KEY, num_retries=0, max_retries=0, **fields
    )


def check_plain(url, api):
    answer = complete(url, api)
    assert answer.choices[0].message.content.startswith(ANSWER), answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_streamed(url, api):
    items = list(complete(url, api, stream=True, stream_options={"include_usage": True}))
    text = "".join(item.choices[0].delta.content or "" for item in items if item.choices)
    assert text == complete(url, api).choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(items)
    assert rebuilt.choices[0].message.content == text and rebuilt.usage.completion_tokens > 5


def check_async(url, api):
    async def ask():
        base = f"{url}/v1" if api == "chat" else url
        provider = "openai" if api == "chat" else "anthropic"
        messages = [{"role": "user", "content": HELLO}]
        return await litellm.acompletion(
            f"{provider}/{MODEL}",
            messages,
            api_base=base,
            api_key=KEY,
            temperature=0,
            max_tokens=50,
        )

    assert asyncio.run(ask()).choices[0].message.content.startswith(ANSWER)


def check_tool_round_trip(url, api):
    named = {"type": "function", "function": {"name": "weather"}}
    first = complete(url, api, QUESTION, tools=[TOOL], tool_choice=named)
    message = first.choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    messages = [{"role": "user", "content": QUESTION}, message.model_dump(), result]
    second = complete(url, api, messages, tools=[TOOL])
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def check_streamed_tool(url, api):
    items = list(complete(url, api, QUESTION, tools=[TOOL], tool_choice="required", stream=True))
    call = litellm.stream_chunk_builder(items).choices[0].message.tool_calls[0]
    Weather.model_validate_json(call.function.arguments)


def check_json_schema(url, api):
    answer = complete(url, api, QUESTION, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def check_bad_model(url, api):
    try:
        complete(url, api, model="other")
    except litellm.NotFoundError as error:
        assert "other" in str(error)
    else:
        raise AssertionError("no error")


def respond(url: str, text: str | list = HELLO, **fields):
    return litellm.responses(
        model=f"openai/{MODEL}",
        input=text,
        api_base=f"{url}/v1",
        api_key=KEY,
        **{"temperature": 0, "max_output_tokens": 300} | fields,
    )


def check_responses(url, api):
    answer = respond(url)
    assert answer.output[-1].content[0].text.startswith(ANSWER)
    events = list(respond(url, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output[-1].content[0].text
    assert events[-1].type == "response.completed"


def check_responses_tool(url, api):
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema()}
    choice = {"type": "function", "name": "weather"}
    first = respond(url, QUESTION, tools=[tool], tool_choice=choice)
    (call,) = (item for item in first.output if item.type == "function_call")
    Weather.model_validate(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}
    asked = {"role": "user", "content": QUESTION}
    again = [asked, dict(call), result]
    assert respond(url, again, tools=[tool]).usage.input_tokens > first.usage.input_tokens


def check_anthropic_messages(url, api):
    """litellm's call in Anthropic's own terms."""

    async def ask():
        return await litellm.anthropic_messages(
            model=f"anthropic/{MODEL}",
            messages=[{"role": "user", "content": HELLO}],
            max_tokens=300,
            temperature=0,
            api_base=url,
            api_key=KEY,
        )

    answer = asyncio.run(ask())
    assert answer["content"][0]["text"].startswith(ANSWER), answer
    assert answer["stop_reason"] == "end_turn"


check_responses.apis = check_responses_tool.apis = ("responses",)
check_anthropic_messages.apis = ("messages",)
