"""Whatever a client gets wrong: the right 4xx, the envelope, the parameter's name."""

import asyncio
import pickle

import pytest

from cluster.api.routes.other_models import OTHER_ROUTES
from cluster.errors import ContextLengthError, EngineDeadError, OverloadedError
from tests.unit.api_fakes import MODEL, Api, FakeBackend, assert_error, events, shared_api

__all__ = ["shared_api"]  # a fixture

HUGE = 10**400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": HUGE}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": HUGE}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": HUGE}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"top_k": HUGE}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -HUGE}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": "\udcff"}, "stop"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids.0"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [HUGE]}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"logit_bias": {"5": True}}, "logit_bias.5"),
        ({"logit_bias": {"5": HUGE}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {" 5": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"priority": 1.5}, "priority"),
        ({"priority": HUGE}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": "x" * 201}, "request_id"),
        ({"request_id": "x\n"}, "request_id"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": "no"}},
            "stream_options.continuous_usage_stats",
        ),
        ({"model": 5}, "model"),
        ({"echo": 1}, "echo"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [HUGE]}, "prompt"),
        ({"prompt": "a\ud800b"}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
    ],
)
def test_bad_values_are_named(fields, param):
    api = Api()
    error = assert_error(api.complete(**{"prompt": "hi"} | fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    assert api.backend.requests == {}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"best_of": 3}),
        ("/v1/completions", {"suffix": "x"}),
        ("/v1/completions", {"use_beam_search": True}),
        ("/v1/chat/completions", {"best_of": 2}),
        ("/v1/chat/completions", {"chat_template": "{{ messages }}"}),
        ("/v1/chat/completions", {"modalities": ["audio"]}),
    ],
)
def test_unsupported_values_are_refused_by_name(path, fields):
    base = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    error = assert_error(Api().request("POST", path, json=base | fields), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == next(iter(fields))


def test_several_findings_come_at_once():
    error = assert_error(Api().complete(n=0, temperature=9, top_p="a"), 400)
    for name in ("n", "temperature", "top_p"):
        assert f"{name}: " in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "a",}',
        b"{'prompt': 'a'}",
        b'{"prompt": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'{"prompt": "\xff\xfe"}',
        b"\xff\xfe{\x00}\x00",
        b'{"n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b"[]",
        b"5",
        b"null",
        b'"text"',
        b'{"prompt": "a"} {}',
        b'{"prompt": "a\nb"}',
    ],
)
def test_bodies_that_are_no_json_object(shared_api, path, body):
    assert_error(shared_api.body(body, path), 400, "invalid_json")


def test_numbers_too_big_for_a_float_are_refused():
    error = assert_error(Api().body(b'{"prompt": "a", "temperature": 1e999}'), 400)
    assert error["param"] == "temperature"


def test_nested_values_in_ignored_fields_do_no_harm():
    deep = b"[" * 500 + b"]" * 500
    assert Api().body(b'{"prompt": "a", "metadata": ' + deep + b"}").status_code == 200
    assert_error(Api().body(b'{"prompt": ' + deep + b"}"), 400)
    assert_error(Api().body(b'{"prompt": "a", "response_format": ' + deep + b"}"), 400)


def test_body_limit():
    api = Api(max_body_bytes=1000)
    assert_error(api.complete("x" * 1000), 413, "body_too_large")
    assert api.complete("x" * 500).status_code == 200


def test_body_limit_without_content_length():
    async def parts():
        for _ in range(100):
            yield b"x" * 100

    api = Api(max_body_bytes=1000)
    headers = {"content-type": "application/json"}
    response = api.request("POST", "/v1/completions", content=parts(), headers=headers)
    assert_error(response, 413, "body_too_large")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_content_type(content_type):
    headers = {"content-type": content_type} if content_type else {}
    response = Api().request("POST", "/v1/completions", content=b"{}", headers=headers)
    assert_error(response, 415, "unsupported_content_type")


def test_content_type_with_charset():
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    body = b'{"prompt": "a"}'
    response = Api().request("POST", "/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


MISSING = [path for path, lacks in OTHER_ROUTES.items() if lacks != "text"]


@pytest.mark.parametrize("path", MISSING)
def test_routes_of_other_models(path):
    api = Api()
    error = assert_error(api.post(path, {"model": "m", "input": "x"}), 400, "unsupported_route")
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert route in error["message"]
    documented = api.get("/openapi.json").json()["paths"]
    assert OTHER_ROUTES[path] in error["message"] and documented.keys().isdisjoint(MISSING)
    assert_error(api.get(path), 405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/v1/completions/", "/v1/m\u00f6dels"])
def test_unknown_routes(path):
    assert_error(Api().get(path), 404, "not_found")
    assert_error(Api().request("POST", path, json={}), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/completions"),
        ("PUT", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/models/x"),
        ("POST", "/health"),
    ],
)
def test_wrong_method(method, path):
    response = Api().request(method, path)
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"]


@pytest.mark.parametrize("name", ["other", "", MODEL + "x", "\ud800", "a" * 5000])
def test_wrong_model(name):
    for call in (Api().complete, Api().chat):
        error = assert_error(call(model=name), 404, "model_not_found")
        assert error["param"] == "model"
        assert MODEL in error["message"]


def test_context_length():
    api = Api(FakeBackend(max_model_len=50, max_request_tokens=50))
    assert api.complete("x" * 40, max_tokens=10).status_code == 200
    error = assert_error(api.complete("x" * 40, max_tokens=11), 400, "context_length_exceeded")
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("50", "40", "11"))
    assert api.complete("x" * 49).status_code == 200
    for size in (50, 51, 5000):
        error = assert_error(api.complete("x" * size), 400, "context_length_exceeded")
        assert error["param"] == "prompt"
        assert str(size) in error["message"]
    assert_error(api.chat("x" * 60), 400, "context_length_exceeded")


def test_request_larger_than_the_kv_cache():
    api = Api(FakeBackend(max_model_len=500, max_request_tokens=64))
    error = assert_error(api.complete("x" * 64), 400, "context_length_exceeded")
    assert "64" in error["message"] and "KV cache" in error["message"]
    assert api.complete("x" * 60).status_code == 200
    ((_, params),) = api.backend.requests.values()
    assert params.max_tokens == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"), [(OverloadedError("queue is full"), 429), (EngineDeadError("gone"), 503)]
)
def test_engine_refusal_has_its_status_even_for_streams(stream, failure, status):
    api = Api()
    api.backend.fail_before = failure
    for response in (api.complete(stream=stream), api.chat(stream=stream, n=3)):
        assert assert_error(response, status)["message"] == str(failure)
        assert response.headers["retry-after"] == "1"
    assert api.backend.open == set()


@pytest.mark.parametrize("n", [1, 3])
def test_engine_death_in_a_running_stream(n):
    api = Api()
    api.backend.fail_after = (2, EngineDeadError("rank 1 died"))
    response = api.complete(stream=True, n=n)
    assert response.status_code == 200
    *items, last = events(response)
    assert len(items) >= 2
    assert last["error"]["message"] == "rank 1 died"
    assert last["error"]["type"] == "service_unavailable_error"
    assert api.backend.open == set()


@pytest.mark.parametrize("n", [1, 3])
def test_engine_death_without_streaming(n):
    api = Api()
    api.backend.fail_after = (2, EngineDeadError("rank 1 died"))
    assert_error(api.chat(n=n), 503, "engine_unavailable")
    assert api.backend.open == set()


def test_bug_in_a_running_stream_says_no_details(caplog):
    api = Api()
    api.backend.fail_after = (2, KeyError("secret"))
    *_, last = events(api.complete(stream=True))
    assert "secret" not in last["error"]["message"]
    assert "secret" in caplog.text


def test_bug_before_the_answer_is_a_500_envelope():
    async def call(api):
        import httpx

        transport = httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.post("/v1/completions", json={"prompt": "a"})

    api = Api()
    api.backend.fail_before = KeyError("secret")
    error = assert_error(asyncio.run(call(api)), 500, "internal_error")
    assert "secret" not in error["message"]


def test_rank_error_output():
    api = Api()
    api.backend.error_output = "no KV blocks"
    assert assert_error(api.complete(), 503)["message"] == "no KV blocks"


def test_engine_that_ends_without_a_reason():
    api = Api(FakeBackend(lambda _prompt, _params: [[65], [66]]))
    assert_error(api.complete(max_tokens=5), 503)


def test_no_engine_yet():
    def provider():
        raise EngineDeadError("starting: loading weights")

    api = Api()
    from cluster.api.app import create_app
    from tests.unit.api_fakes import tiny_tokenizer

    api.app = create_app(provider, tiny_tokenizer())
    for response in (api.complete(), api.chat(), api.get("/health"), api.get("/v1/models")):
        assert "loading weights" in assert_error(response, 503)["message"]
    assert api.get("/metrics").status_code == 200


def test_good_request_after_bad_ones():
    api = Api()
    for _ in range(3):
        assert api.complete(max_tokens=-1).status_code == 400
        assert api.body(b"{").status_code == 400
        assert api.complete("hi").status_code == 200


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ContextLengthError("too long", param="prompt")))
    assert isinstance(error, ContextLengthError)
    assert isinstance(error, ValueError)
    fields = (error.message, str(error), error.param, error.code, error.status)
    assert fields == ("too long", "too long", "prompt", "context_length_exceeded", 400)
