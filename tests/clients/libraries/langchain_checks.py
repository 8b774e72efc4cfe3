"""langchain-openai over chat completions and over responses."""

import asyncio

import openai
from demo import ANSWER, HELLO, KEY, MODEL, QUESTION, REPORT, Weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

APIS = ("chat", "responses")
LOOP = asyncio.new_event_loop()  # one, because models of one URL share their connections


def chat(url: str, api: str, **fields) -> ChatOpenAI:
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 300, "max_retries": 0} | fields
    is_responses = api == "responses"
    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=KEY,
        use_responses_api=is_responses,
        stream_usage=True,
        **fields,
    )


def check_plain(url, api):
    answer = chat(url, api).invoke(HELLO)
    assert answer.text.startswith(ANSWER), answer
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0


def check_streamed(url, api):
    chunks = list(chat(url, api).stream(HELLO))
    whole = chat(url, api).invoke(HELLO)
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) > 5
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]


def check_async(url, api):
    async def ask() -> list[str]:
        model = chat(url, api)
        answers = await asyncio.gather(*(model.ainvoke(HELLO) for _ in range(4)))
        return [answer.text for answer in answers]

    assert all(text.startswith(ANSWER) for text in LOOP.run_until_complete(ask()))


def check_tool_round_trip(url, api):
    named = chat(url, api).bind_tools([Weather], tool_choice="Weather")
    question = HumanMessage(QUESTION)
    answer = named.invoke([question])
    (call,) = answer.tool_calls
    Weather.model_validate(call["args"])
    result = ToolMessage(REPORT, tool_call_id=call["id"])
    final = chat(url, api).bind_tools([Weather]).invoke([question, answer, result])
    assert final.text or final.tool_calls
    assert final.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def check_streamed_tool(url, api):
    model = chat(url, api).bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    total = None
    for chunk in model.stream(QUESTION):
        total = chunk if total is None else total + chunk
    (call,) = total.tool_calls
    Weather.model_validate(call["args"])


def check_function_calling(url, api):
    model = chat(url, api).with_structured_output(Weather, method="function_calling")
    assert isinstance(model.invoke(QUESTION), Weather)


def check_json_schema(url, api):
    model = chat(url, api).with_structured_output(Weather, method="json_schema")
    assert isinstance(model.invoke(QUESTION), Weather)


def check_json_mode(url, api):
    model = chat(url, api).with_structured_output(None, method="json_mode", include_raw=True)
    found = model.invoke("Answer as JSON.")
    assert isinstance(found["parsed"], dict), found


def check_bad_model(url, api):
    try:
        chat(url, api, model="other").invoke(HELLO)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("no error")
