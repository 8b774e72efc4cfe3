"""Kept responses: conversations that go on, GET, DELETE, input items, and the bounds of the store."""

import pytest
from openai.types.responses import ResponseItemList

from cluster.api.responses.conversation import chat_messages
from cluster.api.responses.store import ResponseStore, make_store
from cluster.api.settings import ApiSettings
from cluster.errors import NotFoundError
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, assert_error, says
from tests.unit.responses_case import TIME, WEATHER, respond, streamed, whole
from tests.unit.test_api_openai import with_client
from tests.unit.test_tool_parsers import CALL, tag


def api_that_says(text, **settings):
    return Api(FakeBackend(says(text, end=[IM_END])), **settings)


def prompts(api):
    """The text of each prompt."""
    return [
        bytes(i for i in token_ids if i < 256).decode()
        for token_ids, _ in api.backend.requests.values()
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_without_its_earlier_instructions(stream):
    api = api_that_says("fine")
    answer = streamed if stream else whole
    first = answer(api, "one", instructions="Be brief.")
    first = first[-1]["response"] if stream else first
    second = whole(api, "two", previous_response_id=first["id"], instructions="Be long.")
    assert second["previous_response_id"] == first["id"]
    third = whole(api, "three", previous_response_id=second["id"])
    assert third["instructions"] is None
    spoken = [("user", "one"), ("assistant", "fine"), ("user", "two"), ("assistant", "fine")]
    messages = [{"role": role, "content": text} for role, text in (*spoken, ("user", "three"))]
    assert api.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    *_, ours, theirs = prompts(api)
    assert ours == theirs


def test_a_conversation_with_a_call_goes_on():
    api = api_that_says(tag(CALL))
    first = whole(api, "weather?", tools=[WEATHER])
    (call,) = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    whole(api, [output], previous_response_id=first["id"], tools=[WEATHER])
    prompt = prompts(api)[-1]
    assert prompt.index("weather?") < prompt.index('"Rome"') < prompt.index("sunny")


def test_text_behind_a_call_is_a_turn_of_its_own():
    """In one message, chat templates would put the text before the call."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    text = {"type": "message", "role": "assistant", "content": [{"text": "x"}]}
    first, second = chat_messages(None, [call, text])
    assert first["content"] == "" and len(first["tool_calls"]) == 1
    assert second == {"role": "assistant", "content": "x"}


def test_items_by_their_ids():
    api = api_that_says("fine")
    first = whole(api, [{"role": "user", "content": "one", "id": "mine"}])
    (answer,) = first["output"]
    names = [{"type": "item_reference", "id": name} for name in ("mine", answer["id"])]
    whole(api, [*names, {"role": "user", "content": "two"}])
    whole(api, "two", previous_response_id=first["id"])
    _, by_reference, by_previous = prompts(api)
    assert by_reference == by_previous
    error = assert_error(respond(api, [{"type": "item_reference", "id": "msg_x"}]), 400)
    assert error["param"] == "input.0.id"
    api = api_that_says("fine", num_replicas=2)
    assert_error(respond(api, names), 400, "no_store")


def test_one_response_has_several_continuations():
    api = api_that_says("fine")
    first = whole(api, "one")
    for text in ("two", "three"):
        whole(api, text, previous_response_id=first["id"])
    assert "two" not in prompts(api)[-1]


def test_get_and_delete():
    api = api_that_says("fine")
    response = whole(api)
    path = f"/v1/responses/{response['id']}"
    assert api.get(path).json() == response
    assert api.request("DELETE", path).json() == {
        "id": response["id"],
        "object": "response",
        "deleted": True,
    }
    for call in (api.get(path), api.request("DELETE", path), api.get(f"{path}/input_items")):
        assert assert_error(call, 404)["param"] == "response_id"
    error = assert_error(respond(api, previous_response_id=response["id"]), 400)
    assert (error["param"], error["code"]) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_incomplete_and_failed_responses_are_kept():
    api = api_that_says("fine")
    response = whole(api, max_output_tokens=2)
    assert api.get(f"/v1/responses/{response['id']}").json()["status"] == "incomplete"


def test_a_response_that_is_not_kept():
    api = api_that_says("fine")
    response = whole(api, store=False)
    assert_error(api.get(f"/v1/responses/{response['id']}"), 404)


ITEMS = [
    {"role": "user", "content": "one", "id": "mine"},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
    {"role": "assistant", "content": "two"},
    {"type": "function_call", "call_id": "c", "name": "get_time", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
]


def test_input_items():
    api = api_that_says("fine")
    path = f"/v1/responses/{whole(api, ITEMS, tools=[TIME])['id']}/input_items"
    listed = api.get(path, params={"order": "asc"}).json()
    parsed = ResponseItemList.model_validate(listed, strict=True)
    assert [type(item).__name__ for item in parsed.data] == [
        "ResponseInputMessageItem",
        "ResponseReasoningItem",
        "ResponseOutputMessage",
        "ResponseFunctionToolCallItem",
        "ResponseFunctionToolCallOutputItem",
    ]
    ids = [item["id"] for item in listed["data"]]
    assert ids[0] == listed["first_id"] == "mine" and ids[-1] == listed["last_id"]
    assert [name.split("_")[0] for name in ids[1:]] == ["rs", "msg", "fc", "fco"]
    assert not listed["has_more"]
    seen, after = [], {}
    while True:
        page = api.get(path, params={"limit": 2, **after}).json()
        seen += [item["id"] for item in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ids[::-1]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "x"}, "order"),
        ({"after": "x"}, "after"),
    ],
)
def test_wrong_pages(query, param):
    api = api_that_says("fine")
    path = f"/v1/responses/{whole(api)['id']}/input_items"
    assert assert_error(api.get(path, params=query), 400)["param"] == param


def test_the_official_client():
    async def call(client):
        first = await client.responses.create(model=MODEL, input="one")
        again = await client.responses.retrieve(first.id)
        pages = client.responses.input_items.list(first.id, limit=1)
        texts = [item.content[0].text async for item in pages]
        await client.responses.delete(first.id)
        return first, again, texts

    first, again, texts = with_client(api_that_says("fine"), call)
    assert first == again and texts == ["one"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_replicas": 2}, "serve.replicas"),
        ({"max_stored_responses": 0}, "serve.responses_store"),
    ],
)
def test_without_a_store_the_reason_is_named(settings, words):
    api = api_that_says("fine", **settings)
    response = whole(api, store=True)
    found = [
        assert_error(api.get(f"/v1/responses/{response['id']}"), 400, "no_store"),
        assert_error(respond(api, previous_response_id=response["id"]), 400, "no_store"),
        assert_error(respond(api, background=True), 400, "no_store"),
    ]
    assert all(words in error["message"] for error in found)
    assert [error["param"] for error in found] == [None, "previous_response_id", "background"]


def state(name, text="", status="completed"):
    return {"id": name, "status": status, "output": [], "text": text}


def test_the_least_recently_used_leave_first():
    store = ResponseStore(2, 10**6)
    for name in ("a", "b"):
        store.keep(state(name), b"[]")
    store.find("a")
    store.keep(state("c"), b"[]")
    assert store.find("a") and store.find("c")
    with pytest.raises(NotFoundError):
        store.find("b")


def test_the_bound_of_bytes():
    store = ResponseStore(100, 10_000)
    for name in "abcdef":
        store.keep(state(name, "x" * 3000), b"[]")
    with pytest.raises(NotFoundError):
        store.find("c")
    assert store.find("f") and store.find("e")
    store.keep(state("g", "x" * 20_000), b"[]")
    with pytest.raises(NotFoundError):
        store.find("g")
    assert store.num_bytes == 0
    store.keep(state("h", "x" * 3000), b"[]")
    assert 3000 < store.num_bytes < 4000
    store.keep(state("h", "x" * 1000), b"[]")
    assert 1000 < store.num_bytes < 2000


def test_a_running_response_stays():
    store = ResponseStore(1, 10**6)
    store.keep(state("a", status="in_progress"), b"[]")
    store.keep(state("b"), b"[]")
    assert store.find("a")
    with pytest.raises(NotFoundError):
        store.find("b")


def test_the_default_store_is_on():
    assert not make_store(ApiSettings()).off
