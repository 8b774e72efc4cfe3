"""The official Python client: its exceptions, with the field that is wrong, and timeouts."""

import httpx
import openai
import pytest

from tests.clients.conftest import HELLO, completion_body
from tests.serve.server import free_port

BOTH = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 5000}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"9999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "7"}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"extra_body": {"top_k": -2}}, "top_k"),
    ({"extra_body": {"min_p": 2}}, "min_p"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
    ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
    ({"extra_body": {"cache_salt": ""}}, "cache_salt"),
    ({"extra_body": {"request_id": "a b"}}, "request_id"),
    ({"extra_body": {"priority": "high"}}, "priority"),
    ({"extra_body": {"best_of": 3}}, "best_of"),
    ({"extra_body": {"bad_words": [""]}}, "bad_words"),
    ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
    ({"extra_headers": {"X-data-parallel-rank": "2"}}, "x-data-parallel-rank"),
    ({"extra_headers": {"X-data-parallel-rank": "-1"}}, "x-data-parallel-rank"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH)
def test_wrong_fields_are_named(chat, complete, fields, param):
    for call in (lambda: complete("x", **fields), lambda: chat(HELLO, **fields)):
        with pytest.raises(openai.BadRequestError) as info:
            call()
        error = info.value
        assert error.param == param and error.status_code == 400
        assert error.type == "invalid_request_error" and error.code and error.body["message"]


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([5, "a"], {}, "prompt"),
        ([9999], {}, "prompt"),
        ({"a": 1}, {}, "prompt"),
        ("x", {"logprobs": 21}, "logprobs"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"suffix": "end"}, "suffix"),
    ],
)
def test_wrong_completions_are_named(complete, prompt, fields, param):
    with pytest.raises(openai.BadRequestError) as info:
        complete(prompt, **fields)
    assert info.value.param == param


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([], {}, "messages"),
        ("Hello", {}, "messages"),
        ([{"role": "user"}], {}, "messages.0.content"),
        ([{"role": "robot", "content": "x"}], {}, "messages.0.role"),
        ([*HELLO, {"role": "user", "content": 3}], {}, "messages.1.content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            {},
            "messages",
        ),
        (HELLO, {"top_logprobs": 2}, "top_logprobs"),
        (HELLO, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (HELLO, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (HELLO, {"functions": [{"name": "f"}]}, "functions"),
        (HELLO, {"extra_body": {"chat_template": "x"}}, "chat_template"),
    ],
)
def test_wrong_chats_are_named(chat, messages, fields, param):
    with pytest.raises(openai.BadRequestError) as info:
        chat(messages, **fields)
    assert info.value.param == param


def test_too_long_a_prompt(complete, chat):
    for call, param in (
        (lambda: complete("x " * 3000), "prompt"),
        (lambda: complete("x", max_tokens=2048), "max_tokens"),
        (lambda: chat(HELLO, max_tokens=2048), "max_tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as info:
            call()
        assert info.value.code == "context_length_exceeded" and info.value.param == param
        assert "2048" in info.value.body["message"]


def test_no_such_model(client):
    for call in (
        lambda: client.completions.create(model="gpt-9", prompt="x"),
        lambda: client.chat.completions.create(model="gpt-9", messages=HELLO),
        lambda: client.models.retrieve("gpt-9"),
    ):
        with pytest.raises(openai.NotFoundError) as info:
            call()
        assert (info.value.code, info.value.param) == ("model_not_found", "model")
        assert "gpt-9" in info.value.body["message"]


def test_apis_of_other_models(client):
    for call in (
        lambda: client.embeddings.create(model="demo", input="x"),
        lambda: client.images.generate(prompt="x"),
        lambda: client.moderations.create(input="x"),
    ):
        with pytest.raises(openai.BadRequestError) as info:
            call()
        assert info.value.code == "unsupported_route"
        assert "/v1/chat/completions" in info.value.body["message"]


def test_a_method_that_is_not_there(client):
    with pytest.raises(openai.APIStatusError) as info:
        client.models.delete("demo")
    assert info.value.status_code == 405 and info.value.body["message"]


def test_too_large_a_body(client):
    with pytest.raises(openai.APIStatusError) as info:
        client.completions.create(model="demo", prompt="x" * 5_000_000)
    assert info.value.status_code == 413 and info.value.code == "body_too_large"


def test_streams_are_refused_before_they_begin(client):
    with pytest.raises(openai.BadRequestError) as info:
        client.completions.create(**completion_body("x", stream=True, top_p=3))
    assert info.value.param == "top_p"


def test_bad_requests_are_not_tried_again(server):
    tries = []
    http = httpx.Client(event_hooks={"request": [tries.append]})
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=http) as patient,
        pytest.raises(openai.BadRequestError),
    ):
        patient.completions.create(model="demo", prompt=[])
    assert len(tries) == 1


def test_a_client_that_times_out_frees_its_request(client, server):
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            **completion_body("x", max_tokens=2000, n=4, extra_body={"ignore_eos": True})
        )
    server.wait_free()


def test_nobody_there():
    with (
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{free_port()}/v1", api_key="x", max_retries=0
        ) as lost,
        pytest.raises(openai.APIConnectionError),
    ):
        lost.models.list()
