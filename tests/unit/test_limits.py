"""Overload and abuse: a bounded queue, requests that take too long, bodies that keep us waiting."""

import asyncio

import httpx
import pytest

from cluster.api.admission import AdmissionGate
from cluster.api.app import create_app
from cluster.api.request.json_body import is_deeper
from cluster.api.settings import ApiSettings
from cluster.config.serve_section import ServeConfig, open_choices_limit
from cluster.errors import BadRequestError, EngineDeadError, OverloadedError
from tests.unit.api_fakes import Api, assert_error, events, tiny_tokenizer

COMPLETIONS = "/v1/completions"


def hanging(**settings) -> Api:
    """An API whose engine gives one token and then nothing."""
    api = Api(**settings)
    api.backend.hang_after = 1
    return api


def gated(**settings) -> tuple[Api, AdmissionGate]:
    """An API and its gate."""
    api, gate = Api(), AdmissionGate()
    api.app = create_app(lambda: api.backend, tiny_tokenizer(), ApiSettings(**settings), gate)
    return api, gate


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class TestQueue:
    def test_beyond_the_limit_a_429_and_then_room_again(self):
        api = hanging(max_open_choices=3)

        async def scenario():
            async with api.client() as client:
                body = {"prompt": "a", "n": 2, "max_tokens": 5}
                first = asyncio.create_task(client.post(COMPLETIONS, json=body))
                await until(lambda: len(api.backend.open) == 2)
                refused = await client.post(COMPLETIONS, json=body)
                streamed = await client.post(COMPLETIONS, json={**body, "stream": True})
                one = asyncio.create_task(client.post(COMPLETIONS, json={**body, "n": 1}))
                await until(lambda: len(api.backend.open) == 3)
                full = await client.post(COMPLETIONS, content=b"not even JSON")
                load = await client.get("/load")
                first.cancel(), one.cancel()
                await asyncio.gather(first, one, return_exceptions=True)
                await until(lambda: not api.backend.open)
                api.backend.hang_after = None
                return refused, streamed, full, load, await client.post(COMPLETIONS, json=body)

        refused, streamed, full, load, good = asyncio.run(scenario())
        for response in (refused, streamed, full):
            error = assert_error(response, 429, "overloaded")
            assert "limit is 3" in error["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert load.json() == {"server_load": 2}
        assert good.status_code == 200

    @pytest.mark.parametrize(
        "fields",
        [
            {"n": 5},
            {"prompt": ["a"] * 5},
            {"prompt": [[1]] * 5},
            {"prompt": ["a", "b", "c"], "n": 2},
        ],
    )
    def test_more_than_the_queue_can_ever_hold_is_a_400(self, fields):
        assert_error(Api(max_open_choices=4).complete(**{"prompt": "a"} | fields), 400)

    def test_a_list_of_token_ids_is_one_choice(self):
        assert Api(max_open_choices=1).complete([1, 2, 3]).status_code == 200

    @pytest.mark.parametrize(
        ("path", "body", "status"),
        [
            (COMPLETIONS, b"{", 400),
            (COMPLETIONS, b'{"prompt": ""}', 400),
            (COMPLETIONS, b'{"prompt": "a", "model": "other"}', 404),
            ("/v1/chat/completions", b'{"messages": 5}', 400),
            (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1}', 200),
            (COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "stream": true}', 200),
        ],
    )
    def test_however_a_request_ends_its_place_is_free(self, path, body, status):
        api = Api(max_open_choices=1)
        for _ in range(3):
            assert api.body(body, path).status_code == status
        assert api.get("/load").json() == {"server_load": 0}

    def test_a_failing_engine_frees_the_place(self):
        api = Api(max_open_choices=1)
        api.backend.fail_before = EngineDeadError("gone")
        for _ in range(3):
            assert api.complete().status_code == 503
        api.backend.fail_before, api.backend.fail_after = None, (1, EngineDeadError("gone"))
        for _ in range(3):
            assert events(api.complete(stream=True))[-1]["error"]

    def test_retry_after_follows_the_rate(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr("cluster.api.admission.time.monotonic", lambda: now[0])
        gate = AdmissionGate(4)
        for _ in range(3):  # a choice each 5 s
            ticket = gate.admit(1)
            now[0] += 5
            ticket.release()
        gate.admit(4)
        with pytest.raises(OverloadedError) as error:
            gate.check(1)
        assert error.value.retry_after_s == 4  # 3 ends in 10 s
        with pytest.raises(OverloadedError) as error:
            gate.check(4)
        assert error.value.retry_after_s == 14

    def test_releasing_twice_counts_once(self):
        gate = AdmissionGate(2)
        ticket, other = gate.admit(1), gate.admit(1)
        ticket.release(), ticket.release()
        assert (gate.num_choices, gate.num_requests) == (1, 1)
        other.release()
        with pytest.raises(BadRequestError):
            gate.admit(3)

    @pytest.mark.parametrize(
        ("queued", "replicas", "running", "limit"),
        [
            (0, 1, 16, 16),
            (100, 1, 16, 116),
            (100, 3, 16, 39),
            ("auto", 1, 16, 1040),
            ("auto", 2, 1024, 4608),
        ],
    )
    def test_share_of_an_ingress(self, queued, replicas, running, limit):
        config = ServeConfig(max_queued_requests=queued, replicas=replicas)
        assert open_choices_limit(config, running) == limit


def late(**fields) -> tuple[Api, httpx.Response]:
    """An API, and its answer to a request with a limit of 30 s that ends when each choice has a token."""
    api, gate = gated(request_timeout_s=30.0)
    api.backend.hang_after = 1

    async def scenario():
        async with api.client() as client:
            answer = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", **fields}))
            await until(lambda: len(api.backend.hanging) == fields.get("n", 1))
            (ticket,) = gate._tickets
            limit, now = ticket.timeout.when(), asyncio.get_running_loop().time()
            assert limit - now < 30
            ticket.timeout.reschedule(now)
            return await answer

    return api, asyncio.run(scenario())


class TestTimeout:
    def test_whole_answer(self):
        api, response = late(n=2)
        error = assert_error(response, 504, "timeout")
        assert "30 s" in error["message"] and error["type"] == "timeout_error"
        assert api.backend.open == set() and len(api.backend.aborted) == 2

    def test_before_the_first_token_a_stream_gets_the_status(self):
        api = hanging(request_timeout_s=0.05)
        api.backend.hang_after = 0
        assert_error(api.complete(stream=True), 504, "timeout")
        assert api.backend.open == set()

    def test_stream(self):
        api, response = late(stream=True)
        *items, last = events(response)
        assert items and last["error"]["code"] == "timeout"
        assert api.backend.open == set() and api.get("/load").json() == {"server_load": 0}

    def test_quick_answers_do_not_notice(self):
        api = Api(request_timeout_s=30.0)
        assert api.complete().status_code == 200
        assert "error" not in events(api.complete(stream=True))[-1]


class TestClosing:
    def test_new_requests_are_refused_and_old_ones_finish(self):
        api, gate = gated()

        async def scenario():
            async with api.client() as client:
                gate.close("the server is stopping")
                refused = [
                    await client.post(COMPLETIONS, json={"prompt": "a"}),
                    await client.post("/v1/chat/completions", content=b"x"),
                    await client.get("/ready"),
                    await client.get("/health"),
                ]
                return refused, await client.get("/live"), await client.get("/metrics")

        refused, *others = asyncio.run(scenario())
        for response in refused:
            assert "stopping" in assert_error(response, 503, "engine_unavailable")["message"]
            assert response.headers["retry-after"] == "1"
        assert [response.status_code for response in others] == [200, 200]
        assert api.backend.requests == {}

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_runs_too_long_is_told_why(self, stream):
        api, gate = gated()
        api.backend.hang_after = 1

        async def scenario():
            async with api.client() as client:
                body = {"prompt": "a", "stream": stream}
                answer = asyncio.create_task(client.post(COMPLETIONS, json=body))
                await until(lambda: api.backend.hanging)
                gate.close("the server is stopping")
                assert gate.num_requests == 1
                gate.end_all()
                await asyncio.wait_for(gate.wait_empty(), 60)
                return await answer

        response = asyncio.run(scenario())
        if stream:
            assert events(response)[-1]["error"]["message"] == "the server is stopping"
        else:
            assert_error(response, 503, "engine_unavailable")
        assert api.backend.open == set()


class TestBodies:
    @pytest.mark.parametrize(("depth", "status"), [(10, 200), (11, 400)])
    def test_nesting(self, depth, status):
        inner = depth - 1  # the body itself is a level
        api = Api(max_json_depth=10)
        for left, right in ((b"[", b"]"), (b'{"a":', b"}")):
            value = left * inner + b"1" + right * inner
            body = b'{"prompt": "a", "metadata": ' + value + b"}"
            response = api.body(body)
            assert response.status_code == status
            if status == 400:
                assert "10 levels" in assert_error(response, 400, "invalid_json")["message"]

    def test_many_brackets_are_not_deep(self):
        body = {"prompt": "a", "metadata": [[{}] * 50] * 50}
        assert Api(max_json_depth=10).post(COMPLETIONS, body).status_code == 200

    def test_brackets_in_a_text_are_not_deep(self):
        assert Api(max_json_depth=10).complete("[" * 500).status_code == 200

    def test_is_deeper(self):
        assert not is_deeper(5, 0)
        assert is_deeper([], 0) and not is_deeper([], 1)
        assert is_deeper({"a": [1]}, 1) and not is_deeper({"a": [1]}, 2)

    def test_a_body_that_does_not_come(self):
        async def parts():
            yield b'{"prompt"'
            await asyncio.sleep(30)

        api = Api(client_timeout_s=0.05)
        headers = {"content-type": "application/json"}
        response = api.request("POST", COMPLETIONS, content=parts(), headers=headers)
        assert_error(response, 408, "request_timeout")
        assert response.headers["connection"] == "close"
