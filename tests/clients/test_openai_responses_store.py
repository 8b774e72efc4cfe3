"""The official Python client on kept responses: conversations by id, runs in the background, their streams."""

import time

import openai
import pytest
from openai.types.responses import Response

from tests.clients.conftest import HELLO
from tests.clients.test_openai_responses import ENDLESS, MANY, body

QUESTION = "What is a dict?"
GREEDY_ENDLESS = {**ENDLESS, "temperature": 0}


def ended(client: openai.OpenAI, response: Response) -> Response:
    """The response when it runs no more."""
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline, response
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


def test_previous_response_id(client):
    first = client.responses.create(**body(instructions="Be short.", **MANY))
    second = client.responses.create(
        **body(QUESTION, previous_response_id=first.id, max_output_tokens=20)
    )
    assert second.previous_response_id == first.id
    turns = [*HELLO, {"role": "assistant", "content": first.output_text}]
    same = client.responses.create(
        **body([*turns, {"role": "user", "content": QUESTION}], max_output_tokens=20)
    )
    assert second.output_text == same.output_text
    assert second.usage.input_tokens == same.usage.input_tokens


def test_a_tool_by_id_of_the_call(client):
    """Only the output of the call is sent; the call itself is kept."""
    tool = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    asked = body(QUESTION, tools=[tool], tool_choice={"type": "function", "name": "now"}, **MANY)
    first = client.responses.create(**asked)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Noon."}
        for item in first.output
        if item.type == "function_call"
    ]
    second = client.responses.create(
        **body(outputs, tools=[tool], previous_response_id=first.id, **MANY)
    )
    assert outputs and second.usage.input_tokens > first.usage.input_tokens + 10


def test_retrieve_list_and_delete(client):
    response = client.responses.create(**body(**MANY))
    assert client.responses.retrieve(response.id) == response
    (item,) = client.responses.input_items.list(response.id)
    assert (item.role, item.content[0].text) == ("user", "Hello")
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)) as info:
        client.responses.create(**body(previous_response_id=response.id))
    assert info.value.param == "previous_response_id"


def test_not_stored(client):
    response = client.responses.create(**body(store=False, **MANY))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_in_the_background(client):
    started = client.responses.create(**body(background=True, **MANY))
    assert started.status in ("queued", "in_progress") and started.background
    response = ended(client, started)
    assert response.status == "completed"
    assert response.output_text == client.responses.create(**body(**MANY)).output_text


def test_cancelled_in_the_background(client, server):
    started = client.responses.create(**body(background=True, **GREEDY_ENDLESS))
    cancelled = client.responses.cancel(started.id)
    assert cancelled.status == "cancelled"
    server.wait_free()
    assert client.responses.retrieve(started.id).status == "cancelled"
    assert client.responses.cancel(started.id).status == "cancelled"


def test_deleted_in_the_background(client, server):
    started = client.responses.create(**body(background=True, **GREEDY_ENDLESS))
    client.responses.delete(started.id)
    server.wait_free()


def test_a_stream_in_the_background_goes_on(client):
    """A client that leaves reads the remaining events later; the response does not end with its connection."""
    fields = body(background=True, **MANY)
    with client.responses.create(**fields, stream=True) as stream:
        seen = []
        for event in stream:
            seen.append(event)
            if len(seen) == 4:
                break
    with client.responses.retrieve(
        seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
    ) as rest:
        seen += list(rest)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(deltas) == seen[-1].response.output_text
    assert ended(client, seen[-1].response).output_text == seen[-1].response.output_text
