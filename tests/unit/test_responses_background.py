"""Responses without their connection: states, streams that are read again, cancellation, limits, the gate."""

import asyncio
import json

import pytest

from cluster.api.admission import AdmissionGate
from cluster.api.app import create_app
from cluster.api.responses.event_log import EventLog
from cluster.api.settings import ApiSettings
from cluster.errors import EngineDeadError
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, assert_error, says, tiny_tokenizer
from tests.unit.responses_case import judged, kinds, respond, stream_events
from tests.unit.test_api_openai import with_client
from tests.unit.test_api_stream import WAIT_S, Connection, run, until
from tests.unit.test_responses import MESSAGE

QUEUED = ["created", "queued", "in_progress"]


class Step(FakeBackend):
    """A backend whose outputs wait for `go`."""

    def __init__(self, script) -> None:
        super().__init__(script)
        self.go = asyncio.Event()

    async def generate(self, request_id, prompt_token_ids, params, **options):
        stream = super().generate(request_id, prompt_token_ids, params, **options)
        try:
            async for output in stream:
                await self.go.wait()
                yield output
        finally:
            await stream.aclose()


def in_background(test, text="hello", **settings):
    """Run `await test(client, api)` in one event loop."""

    async def main():
        api = Api(Step(says(text, end=[IM_END])), **settings)
        async with api.client() as client:
            await test(client, api)
        assert not api.backend.open

    run(main)


async def start(client, **fields):
    response = await client.post(
        "/v1/responses", json={"input": "hi", "background": True, **fields}
    )
    assert response.status_code == 200, response.text
    return judged(response.json())


async def state_of(client, response):
    answer = await client.get(f"/v1/responses/{response['id']}")
    return judged(answer.json())


async def until_status(client, response, status):
    async with asyncio.timeout(WAIT_S):
        while (found := await state_of(client, response))["status"] != status:
            await asyncio.sleep(0.001)
    return found


def test_states():
    async def test(client, api):
        response = await start(client)
        assert response["status"] == "queued" and response["background"]
        assert (await state_of(client, response))["status"] == "queued"
        answer = await client.post(
            "/v1/responses", json={"input": "a", "previous_response_id": response["id"]}
        )
        assert assert_error(answer, 400)["param"] == "previous_response_id"
        api.backend.go.set()
        done = await until_status(client, response, "completed")
        assert done["output"][0]["content"][0]["text"] == "hello"
        assert done["usage"]["output_tokens"] == 6
        cancelled = await client.post(f"/v1/responses/{response['id']}/cancel")
        assert cancelled.json() == done
        answer = await client.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
        assert assert_error(answer, 400)["param"] == "stream"

    in_background(test)


def test_cancel_frees_the_ranks():
    async def test(client, api):
        api.backend.hang_after = 2
        api.backend.go.set()
        response = await start(client, stream=False)
        await until_status(client, response, "in_progress")
        assert api.backend.open
        cancelled = await client.post(f"/v1/responses/{response['id']}/cancel")
        assert not api.backend.open and len(api.backend.aborted) == 1
        assert judged(cancelled.json())["status"] == "cancelled"
        assert await state_of(client, response) == cancelled.json()
        assert (await client.get("/load")).json()["server_load"] == 0

    in_background(test)


def test_delete_cancels():
    async def test(client, api):
        api.backend.hang_after = 2
        api.backend.go.set()
        response = await start(client)
        await until(lambda: api.backend.open)
        await client.delete(f"/v1/responses/{response['id']}")
        assert not api.backend.open
        assert_error(await client.get(f"/v1/responses/{response['id']}"), 404)

    in_background(test)


def test_a_failure():
    async def test(client, api):
        api.backend.fail_after = (2, EngineDeadError("a rank ended"))
        api.backend.go.set()
        response = await start(client)
        failed = await until_status(client, response, "failed")
        assert failed["error"] == {"code": "server_error", "message": "a rank ended"}
        assert failed["output"][0]["content"][0]["text"] == "he"

    in_background(test)


def test_the_time_limit():
    async def test(client, api):
        response = await start(client)
        failed = await until_status(client, response, "failed")
        assert "longer than 0.05 s" in failed["error"]["message"]

    in_background(test, request_timeout_s=0.05)


def test_a_stream_outlives_its_connection():
    async def test():
        api = Api(Step(says("hello", end=[IM_END])))
        body = {"input": "a", "stream": True, "background": True}
        connection = Connection(api, "/v1/responses", body)
        await connection.until_sent(2)
        await connection.leave()
        first = connection.sent[1]["body"]
        response_id = json.loads(first.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        assert api.backend.open
        async with api.client() as client:
            path = f"/v1/responses/{response_id}"
            query = {"stream": "true", "starting_after": "1"}
            reading = asyncio.create_task(client.get(path, params=query))
            await asyncio.sleep(0.01)
            api.backend.go.set()
            events = stream_events(await reading, 2)
            assert kinds(events) == ["in_progress", *MESSAGE, "completed"]
            everything = stream_events(await client.get(path, params={"stream": "true"}))
            assert kinds(everything) == [*QUEUED, *MESSAGE, "completed"]
            assert everything[2:] == events
            assert everything[0]["response"]["status"] == "queued"
            for after in range(len(everything) + 2):
                query["starting_after"] = str(after)
                part = await client.get(path, params=query)
                assert stream_events(part, after + 1) == everything[after + 1 :]
        assert len(asyncio.all_tasks()) == 1

    run(test)


def test_the_official_client():
    async def call(client):
        stream = await client.responses.create(
            model=MODEL, input="hi", background=True, stream=True
        )
        async for event in stream:
            if event.type == "response.created":
                break
        await stream.close()
        async with client.responses.stream(response_id=event.response.id) as stream:
            return [e.delta async for e in stream if e.type == "response.output_text.delta"]

    assert with_client(Api(FakeBackend(says("hi", end=[IM_END]))), call) == ["h", "i"]


def test_admission_and_drain():
    async def test():
        backend = Step(says("hello", end=[IM_END]))
        gate = AdmissionGate(1)
        app = create_app(lambda: backend, tiny_tokenizer(), ApiSettings(), gate)
        api = Api()
        api.app = app
        async with api.client() as client:
            response = await start(client)
            busy = await client.post("/v1/responses", json={"input": "a"})
            assert_error(busy, 429)
            gate.close("the server is stopping")
            drained = asyncio.create_task(gate.wait_empty())
            await asyncio.sleep(0.01)
            assert not drained.done()
            backend.go.set()
            await asyncio.wait_for(drained, WAIT_S)
            assert (await state_of(client, response))["status"] == "completed"

    run(test)


def test_the_end_of_the_drain():
    async def test():
        backend = Step(says("hello", end=[IM_END]))
        gate = AdmissionGate(1)
        app = create_app(lambda: backend, tiny_tokenizer(), ApiSettings(), gate)
        api = Api()
        api.app = app
        async with api.client() as client:
            response = await start(client)
            await until(lambda: backend.open)
            gate.close("the server is stopping")
            gate.end_all()
            await asyncio.wait_for(gate.wait_empty(), WAIT_S)
            failed = await until_status(client, response, "failed")
            assert failed["error"]["message"] == "the server is stopping"

    run(test)


@pytest.mark.parametrize(
    ("fields", "param"), [({"store": False}, "background"), ({"model": "x"}, "model")]
)
def test_wrong_requests(fields, param):
    api = Api()
    response = respond(api, background=True, **fields)
    assert assert_error(response, 404 if param == "model" else 400)["param"] == param


def test_only_background_responses_are_cancelled():
    api = Api(FakeBackend(says("a", end=[IM_END])))
    response = respond(api).json()
    answer = api.post(f"/v1/responses/{response['id']}/cancel", {})
    assert assert_error(answer, 400)["param"] == "response_id"


def test_readers_of_a_log():
    async def test():
        log = EventLog()
        log.add(b"a\n\nb\n\n")
        readers = [asyncio.create_task(read(log, after)) for after in (-1, 0, 1, 2, 9)]
        await asyncio.sleep(0)
        log.add(b"")
        log.add(b"c\n\n")
        log.add(b"d\n\ne\n\n")
        log.end()
        found = await asyncio.gather(*readers)
        assert found == [b"abcde", b"bcde", b"cde", b"de", b""]
        assert await read(log, 3) == b"e"
        assert log.num_bytes == 15

    async def read(log, after):
        return b"".join([part async for part in log.follow(after)]).replace(b"\n\n", b"")

    run(test)
