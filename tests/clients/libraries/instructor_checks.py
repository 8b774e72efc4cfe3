"""instructor in its default mode, with a schema, and over responses."""

import instructor
import openai
from demo import KEY, MODEL, QUESTION, Weather

APIS = ("chat", "responses")
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}


def asked(api: str) -> dict:
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    return {**ASKED, limit: 300, "temperature": 0, "max_retries": 0, "response_model": Weather}


def client(url: str, api: str, mode: instructor.Mode | None = None) -> instructor.Instructor:
    inner = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    if api == "responses":
        mode = instructor.Mode.RESPONSES_TOOLS
    return instructor.from_openai(inner, **({"mode": mode} if mode else {}))


def check_default_mode(url, api):
    answer = client(url, api).create(**asked(api))
    assert isinstance(answer, Weather) and answer.city in ("Oslo", "Rome")


def check_default_mode_with_completion(url, api):
    answer, completion = client(url, api).create_with_completion(**asked(api))
    assert isinstance(answer, Weather) and completion.usage.total_tokens > 0


def check_json_schema(url, api):
    answer = client(url, api, instructor.Mode.JSON_SCHEMA).create(**asked(api))
    assert isinstance(answer, Weather)


def check_tools_strict(url, api):
    answer = client(url, api, instructor.Mode.TOOLS_STRICT).create(**asked(api))
    assert isinstance(answer, Weather)


def check_partial(url, api):
    """Parts of the form while it streams."""
    parts = list(client(url, api).create_partial(**asked(api)))
    assert len(parts) > 1
    Weather.model_validate(parts[-1].model_dump())


def check_from_provider(url, api):
    """The call of instructor's own documentation."""
    inner = instructor.from_provider(f"openai/{MODEL}", base_url=f"{url}/v1", api_key=KEY)
    fields = {name: value for name, value in asked(api).items() if name != "model"}
    assert isinstance(inner.create(**fields), Weather)


def check_error(url, api):
    try:
        client(url, api).create(**asked(api) | {"temperature": 9})
    except Exception as error:
        assert "temperature" in str(error), error
    else:
        raise AssertionError("no error")


for check in (check_json_schema, check_tools_strict, check_from_provider):
    check.apis = ("chat",)
