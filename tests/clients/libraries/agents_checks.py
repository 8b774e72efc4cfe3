"""openai-agents with its default model, which speaks responses, and with its model for chat completions."""

import asyncio

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from demo import ANSWER, HELLO, KEY, MODEL, QUESTION, REPORT, Weather

APIS = ("chat", "responses")
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
set_tracing_disabled(True)


def agent(url: str, api: str, model: str = MODEL, **fields) -> Agent:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=300, **fields.pop("settings", {}))
    chosen = MODELS[api](model=model, openai_client=client)
    return Agent(name="Demo", model=chosen, model_settings=settings, **fields)


def run(agent: Agent, text, **fields):
    return asyncio.run(Runner.run(agent, text, **fields))


def assert_grew(first, second) -> None:
    """The second turn has the first one in its prompt."""
    counts = [result.raw_responses[0].usage.input_tokens for result in (first, second)]
    assert second.final_output and counts[1] > counts[0] + 20, counts


def check_plain(url, api):
    result = run(agent(url, api), HELLO)
    assert result.final_output.startswith(ANSWER), result
    (response,) = result.raw_responses
    assert response.usage.total_tokens > 0


def check_default_client(url, api):
    """No model object: the library's default, with a client set for all agents."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)
    set_default_openai_api("responses" if api == "responses" else "chat_completions")
    settings = ModelSettings(temperature=0)
    result = run(Agent(name="Demo", model=MODEL, model_settings=settings), HELLO)
    assert result.final_output.startswith(ANSWER), result


def check_streamed(url, api):
    async def stream() -> tuple[str, str]:
        result = Runner.run_streamed(agent(url, api), HELLO)
        text = ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and (
                event.data.type == "response.output_text.delta"
            ):
                text += event.data.delta
        return text, result.final_output

    text, final = asyncio.run(stream())
    assert text == final and text.startswith(ANSWER), (text, final)


def check_tool_round_trip(url, api):
    seen = []

    @function_tool
    def weather(wanted: Weather) -> str:
        """Return the weather."""
        seen.append(wanted)
        return REPORT

    result = run(
        agent(url, api, tools=[weather], settings={"tool_choice": "weather"}),
        QUESTION,
    )
    kinds = [item.type for item in result.new_items]
    assert isinstance(seen[0], Weather)
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert kinds[-1] == "message_output_item" and result.final_output


def check_structured_output(url, api):
    result = run(agent(url, api, output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


def check_handoff(url, api):
    other = agent(url, api)
    first = agent(url, api, handoffs=[other], settings={"tool_choice": "transfer_to_demo"})
    first.name = "First"
    result = run(first, HELLO)
    assert result.last_agent is other and result.final_output


def check_conversation(url, api):
    async def talk():
        demo = agent(url, api, instructions="Be short.")
        first = await Runner.run(demo, HELLO)
        asked = [*first.to_input_list(), {"role": "user", "content": QUESTION}]
        return first, await Runner.run(demo, asked)

    assert_grew(*asyncio.run(talk()))


def check_session(url, api):
    """The library keeps the items of the conversation itself."""

    async def talk():
        demo, session = agent(url, api), SQLiteSession("one")
        first = await Runner.run(demo, HELLO, session=session)
        return first, await Runner.run(demo, QUESTION, session=session)

    assert_grew(*asyncio.run(talk()))


def check_previous_response(url, api):
    async def talk():
        demo = agent(url, api)
        first = await Runner.run(demo, HELLO)
        return first, await Runner.run(demo, QUESTION, previous_response_id=first.last_response_id)

    assert_grew(*asyncio.run(talk()))


check_previous_response.apis = ("responses",)


def check_bad_model(url, api):
    try:
        run(agent(url, api, model="other"), HELLO, run_config=RunConfig(tracing_disabled=True))
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    else:
        raise AssertionError("no error")
