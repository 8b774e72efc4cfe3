"""How tokens are picked and when they end, as the engine is told and as the answer shows it."""

import pytest

from tests.unit.api_fakes import (
    IM_END,
    Api,
    FakeBackend,
    assert_error,
    events,
    says,
    tiny_tokenizer,
    usage,
)

CALLS = [Api.complete, Api.chat]


def only(backend):
    """(prompt ids, params) of the one engine request."""
    ((ids, params),) = backend.requests.values()
    return ids, params


@pytest.mark.parametrize("call", CALLS)
def test_penalties_bias_and_min_tokens_reach_the_engine(call):
    api = Api()
    response = call(
        api,
        presence_penalty=-1.5,
        frequency_penalty=2,
        repetition_penalty=1.3,
        logit_bias={"5": -100, "007": 2.5, "7": 3},
        min_tokens=4,
        max_tokens=4,
    )
    assert response.status_code == 200
    _, params = only(api.backend)
    assert (params.presence_penalty, params.frequency_penalty) == (-1.5, 2.0)
    assert params.repetition_penalty == 1.3
    assert dict(params.logit_bias) == {5: -100.0, 7: 3.0}
    assert (params.min_tokens, params.max_tokens) == (4, 4)


@pytest.mark.parametrize("call", CALLS)
def test_a_plain_request_asks_the_engine_for_nothing_more(call):
    api = Api()
    call(api)
    _, params = only(api.backend)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.repetition_penalty, params.logit_bias, params.min_tokens) == (1.0, (), 0)
    assert (params.logprobs, params.prompt_logprobs, params.grammar) == (None, None, None)
    assert (params.allowed_token_ids, params.bad_words_ids) == (None, ())
    assert list(api.backend.options.values()) == [{}]


@pytest.mark.parametrize("call", CALLS)
def test_allowed_tokens_and_bad_words_reach_the_engine(call):
    api = Api()
    assert call(api, allowed_token_ids=[9, 5, 9], bad_words=["ab", "c", " ab"]).status_code == 200
    _, params = only(api.backend)
    assert params.allowed_token_ids == (5, 9)
    # A space is a token of its own here, so that no word has two spellings.
    assert params.bad_words_ids == ((97, 98), (99,))
    assert call(api, bad_words=[]).status_code == 200


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("fields", "param", "says_"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids", "token id 300 is not in"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "token id -1 is not in"),
        ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids", "has 3 ids, at most 2"),
        ({"allowed_token_ids": ["1"]}, "allowed_token_ids.0", "valid integer"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids", "leaves no token"),
        ({"allowed_token_ids": [IM_END], "min_tokens": 1}, "allowed_token_ids", "leaves no token"),
        ({"bad_words": "a"}, "bad_words", "valid list"),
        ({"bad_words": [1]}, "bad_words.0", "valid string"),
        ({"bad_words": ["a", " "]}, "bad_words", "empty word"),
        ({"bad_words": ["a", "b", "c"]}, "bad_words", "has 3 words, at most 2"),
        ({"bad_words": ["abcdef"]}, "bad_words", "6 characters, at most 5"),
        ({"bad_words": ["\ud800"]}, "bad_words", "lone surrogate"),
    ],
)
def test_wrong_allowed_tokens_and_bad_words(call, fields, param, says_):
    api = Api(max_allowed_token_ids=2, max_bad_words=2, max_stop_chars=5)
    error = assert_error(call(api, **fields), 400)
    assert error["param"] == param and says_ in error["message"]
    assert not api.backend.requests


@pytest.mark.parametrize(("given", "told"), [(1e-300, 1e-6), (1e300, 1e6), (0.5, 0.5)])
def test_repetition_penalty_stays_in_what_float32_can_do(given, told):
    api = Api()
    api.complete(repetition_penalty=given)
    assert only(api.backend)[1].repetition_penalty == pytest.approx(told)


def test_repetition_penalty_of_the_checkpoint():
    api = Api(default_sampling={"repetition_penalty": 1.05})
    api.complete()
    assert only(api.backend)[1].repetition_penalty == 1.05


def test_limits_of_the_settings():
    api = Api(max_logit_bias=1, max_logprobs=2, max_prompt_tokens=5)
    assert api.complete("hello", logit_bias={"1": 1}, logprobs=2).status_code == 200
    for fields, param in (
        ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"prompt_logprobs": 3}, "prompt_logprobs"),
        ({"prompt": "hello!"}, "prompt"),
    ):
        assert assert_error(api.complete(**{"prompt": "hi"} | fields), 400)["param"] == param
    error = assert_error(api.chat(logprobs=True, top_logprobs=3), 400)
    assert error["param"] == "top_logprobs"
    error = assert_error(api.chat("x" * 50), 400, "context_length_exceeded")
    assert error["param"] == "messages" and "at most 5" in error["message"]


def test_min_tokens_counts_against_the_room_that_is_left():
    api = Api(FakeBackend(max_model_len=30))
    assert api.chat("hi", min_tokens=9).status_code == 200
    assert assert_error(api.chat("hi", min_tokens=10), 400)["param"] == "min_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, "one"), (5, "one"), (6, "one, two"), (10, "one, two"), (11, "one, two, three,")],
)
def test_stop_string_waits_for_min_tokens(min_tokens, text, stream):
    api = Api(FakeBackend(says("one, two, three,", size=3)))
    response = api.complete(stop=", t", min_tokens=min_tokens, max_tokens=16, stream=stream)
    # ", t" ends with token 6 and again with token 11.
    choices = (
        [item["choices"][0] for item in events(response)] if stream else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == text


def test_stop_reason_is_the_stop_string():
    for stream in (False, True):
        api = Api(FakeBackend(says("hello world")))
        response = api.chat(stop=["xx", "o w"], stream=stream)
        last = events(response)[-1] if stream else response.json()
        choice = last["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "o w")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"stop_token_ids": [66]}, 66),
        ({"stop_token_ids": [IM_END]}, None),  # the end token all the same
        ({}, None),
        ({"stop_token_ids": [IM_END], "ignore_eos": True}, IM_END),
    ],
)
def test_stop_reason_is_a_token_that_the_client_named(fields, reason):
    end = 66 if reason == 66 else IM_END
    for stream in (False, True):
        api = Api(FakeBackend(says("hey", end=[end])))
        response = api.complete(max_tokens=9, stream=stream, **fields)
        choice = (events(response)[-1] if stream else response.json())["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_in_the_output(size, stream):
    api = Api(FakeBackend(says("one two three four", size=size)))
    response = api.complete(
        stop=" three", include_stop_str_in_output=True, max_tokens=100, stream=stream
    )
    choices = (
        [item["choices"][0] for item in events(response)] if stream else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "one two three"
    assert choices[-1]["stop_reason"] == " three"


def test_special_tokens_in_the_text():
    script = says(b"a", end=[257, 98, IM_END])
    assert Api(FakeBackend(script)).complete().json()["choices"][0]["text"] == "ab"
    api = Api(FakeBackend(script))
    fields = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    text = api.complete(**fields).json()["choices"][0]["text"]
    assert text == "a<|im_start|>b<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_new_tokens(stream):
    api = Api(FakeBackend("world"))
    response = api.complete("hello", echo=True, max_tokens=0, stream=stream)
    if stream:
        (item,) = events(response)
        choice = item["choices"][0]
    else:
        choice = response.json()["choices"][0]
        assert response.json()["usage"] == usage(5, 0)
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert only(api.backend)[1].max_tokens == 1  # a rank cannot but generate
    assert assert_error(Api().complete(max_tokens=0), 400)["param"] == "max_tokens"
    assert assert_error(Api().chat(max_tokens=0), 400)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("keep", "prompt"), [(4, b"llo "), (6, b"hello "), (100, b"hello "), (-1, b"o ")]
)
def test_truncated_prompt_keeps_its_end(keep, prompt):
    api = Api(FakeBackend("x", max_model_len=12))
    body = api.complete("hello ", truncate_prompt_tokens=keep, max_tokens=10 if keep < 0 else 2)
    assert only(api.backend)[0] == list(prompt)
    assert body.json()["usage"]["prompt_tokens"] == len(prompt)
    api = Api(FakeBackend("x", max_model_len=20))
    body = api.complete("hello ", truncate_prompt_tokens=keep, max_tokens=2, echo=True).json()
    shown = b"hello " if keep == -1 else prompt
    assert body["choices"][0]["text"] == shown.decode() + "xx"


def test_truncated_chat_prompt():
    api = Api(FakeBackend(max_model_len=50))
    assert api.chat("x" * 100, truncate_prompt_tokens=-1, max_tokens=20).status_code == 200
    ids, _ = only(api.backend)
    assert len(ids) == 30
    assert tiny_tokenizer().decode(ids).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("call", CALLS)
def test_priority_salt_and_rank_reach_the_backend(call):
    api = Api(FakeBackend(num_ranks=4))
    path = "/v1/completions" if call is Api.complete else "/v1/chat/completions"
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}], "n": 2}
    body |= {"priority": -5, "cache_salt": "tenant"}
    response = api.request("POST", path, json=body, headers={"X-data-parallel-rank": "3"})
    assert response.status_code == 200
    expected = {"priority": -5, "cache_salt": "tenant", "rank": 3}
    assert list(api.backend.options.values()) == [expected] * 2


def session_of(api: Api) -> str | None:
    (options,) = api.backend.options.values()
    return options.get("session")


@pytest.mark.parametrize(
    ("fields", "session"),
    [
        ({}, None),
        ({"user": "u"}, "u"),
        ({"prompt_cache_key": "k", "user": "u"}, "k"),
        ({"prompt_cache_key": "", "user": {"not": "a name"}}, None),
        ({"user": 7}, None),
    ],
)
def test_the_session_of_a_request_reaches_the_backend(fields, session):
    api = Api()
    assert api.complete(**fields).status_code == 200
    assert session_of(api) == session


def test_the_header_names_the_session_before_the_body():
    api = Api()
    body = {"prompt": "hi", "prompt_cache_key": "k"}
    headers = {"X-Session-Id": "h"}
    assert api.request("POST", "/v1/completions", json=body, headers=headers).status_code == 200
    assert session_of(api) == "h"


@pytest.mark.parametrize("rank", ["4", "-1", "one", "", "1.0", "0x1", "0000000001", " ", "9" * 400])
def test_ranks_that_are_not_there(rank):
    api = Api(FakeBackend(num_ranks=4))
    headers = {"X-data-parallel-rank": rank}
    response = api.request("POST", "/v1/completions", json={"prompt": "hi"}, headers=headers)
    error = assert_error(response, 400)
    assert error["param"] == "x-data-parallel-rank" and "0 to 3" in error["message"]


def test_request_id_of_the_body():
    api = Api()
    first, second = (api.complete(request_id="mine", n=2).json() for _ in range(2))
    assert first["id"] == second["id"] == "cmpl-mine"
    assert api.chat(request_id="mine").json()["id"] == "chatcmpl-mine"
    assert len(api.backend.requests) == 5  # the engine's ids differ
    assert all("-mine-" in request_id for request_id in api.backend.requests)


@pytest.mark.parametrize("fields", [{"best_of": 3, "n": 3}, {"best_of": 1}])
def test_best_of_as_many_as_n(fields):
    assert Api().complete(**fields).status_code == 200


@pytest.mark.parametrize("cached", [0, 3])
def test_cached_tokens_of_each_prompt_count_once(cached):
    api = Api(FakeBackend(num_cached_tokens=cached))
    body = api.complete(["hello", "world"], n=3, max_tokens=2).json()
    assert body["usage"] == usage(10, 12, 2 * cached)
    options = {"include_usage": True}
    last = events(api.chat("hi", n=2, max_tokens=2, stream=True, stream_options=options))[-1]
    assert last["usage"] == usage(21, 4, cached)


@pytest.mark.parametrize("include", [None, True])
@pytest.mark.parametrize("call", CALLS)
def test_continuous_usage(call, include):
    api = Api(FakeBackend(says("abcdef", size=2), num_cached_tokens=1))
    options = {"include_usage": include, "continuous_usage_stats": True}
    response = call(api, "hi", n=2, max_tokens=6, stream=True, stream_options=options)
    num_prompt = len(next(iter(api.backend.requests.values()))[0])
    *items, last = events(response)
    for index in range(2):
        mine = [item for item in items if item["choices"][0]["index"] == index]
        counts = [item["usage"]["completion_tokens"] for item in mine]
        assert counts == ([2, 2, 4, 6] if call is Api.chat else [2, 4, 6])
        assert mine[-1]["usage"] == usage(num_prompt, 6, 1)  # of this choice alone
    assert last["choices"] == []
    assert last["usage"] == usage(num_prompt, 12, 1)


def test_continuous_usage_can_be_switched_off_by_include_usage():
    options = {"include_usage": False, "continuous_usage_stats": True}
    items = events(Api().complete(stream=True, stream_options=options))
    assert all("usage" not in item for item in items)
