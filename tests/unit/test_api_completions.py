"""POST /v1/completions: prompts, choices, sampling parameters, stop strings, usage, streams."""

import pytest

from cluster.api.request.generation_factory import choice_seed
from tests.unit.api_fakes import IM_END, MODEL, Api, FakeBackend, assert_error, events, says, usage


def sent(backend):
    """(prompt ids, params) of each engine request, in order."""
    return list(backend.requests.values())


def test_answer_has_the_documented_shape():
    api = Api(FakeBackend(says("hello world", size=3)))
    response = api.complete("hi", model=MODEL, max_tokens=5)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body.pop("system_fingerprint").startswith("phalanx")
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "hello",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": usage(2, 5),
    }
    assert api.backend.aborted == []


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [list(b"hi")]),
        (["hi", "you"], [list(b"hi"), list(b"you")]),
        ([104, 105], [[104, 105]]),
        ([[104, 105], [299]], [[104, 105], [299]]),
        (["hi <|im_end|>"], [[*b"hi ", IM_END]]),
        ("\u20ac", [list("\u20ac".encode())]),
    ],
)
def test_prompt_forms(prompt, expected):
    api = Api()
    body = api.complete(prompt).json()
    assert [ids for ids, _ in sent(api.backend)] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_default_is_16_tokens_or_what_is_left():
    api = Api(FakeBackend(max_model_len=20))
    api.complete("x" * 4)
    api.complete("x" * 15)
    assert [params.max_tokens for _, params in sent(api.backend)] == [16, 5]


def test_sampling_parameters_reach_the_engine():
    api = Api()
    api.complete(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=5, stop_token_ids=[1, 2])
    _, params = sent(api.backend)[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert params.seed == 5
    assert params.stop_token_ids == {1, 2, 256, 258}  # with the checkpoint's two end tokens


def test_defaults_and_neutral_spellings():
    api = Api()
    api.complete()
    api.complete(top_k=-1, temperature=None, top_p=1, n=None, max_tokens=None, stop=None)
    for _, params in sent(api.backend):
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
        assert params.max_tokens == 16


def test_checkpoint_defaults_apply_where_the_request_says_nothing():
    api = Api(default_sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    api.complete(top_k=0)
    _, params = sent(api.backend)[0]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.95, 0, 0.0)


def test_tiny_temperature_is_greedy():
    api = Api()
    api.complete(temperature=1e-300)
    assert sent(api.backend)[0][1].temperature == 0.0


def test_seeds():
    api = Api()
    api.complete(["a", "b"], n=3, seed=11)
    api.complete("c", n=3, seed=11)
    seeds = [params.seed for _, params in sent(api.backend)]
    assert seeds[:3] == seeds[3:6] == seeds[6:]  # a prompt's choices do not depend on the others
    assert seeds[0] == 11 and len(set(seeds)) == 3
    api.complete("d")
    api.complete("d")
    drawn = [params.seed for _, params in sent(api.backend)[-2:]]
    assert drawn[0] != drawn[1]
    assert all(0 <= seed < 2**63 for seed in seeds + drawn)
    assert all(0 <= choice_seed(-(2**63), i) < 2**63 for i in range(100))
    assert len({choice_seed(s, i) for s in range(100) for i in range(100)}) == 10_000


def test_several_prompts_times_n():
    def script(prompt, params):
        return [[*prompt, params.seed % 97]]

    api = Api(FakeBackend(script))
    body = api.complete(["ab", "cde"], n=2, seed=7, ignore_eos=True, max_tokens=3).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert texts[0] == "ab\x07" and texts[1][:2] == "ab" and texts[1] != "ab\x07"
    assert texts[2:] == ["cde", "cde"]
    assert body["usage"] == usage(5, 12)


def test_echo():
    api = Api(FakeBackend("world"))
    assert api.complete("hello ", echo=True, max_tokens=5).json()["choices"][0]["text"] == (
        "hello world"
    )
    body = api.complete([104, 105, IM_END], echo=True, max_tokens=1).json()
    assert body["choices"][0]["text"] == "hi<|im_end|>w"
    items = events(api.complete("hello ", echo=True, max_tokens=5, stream=True))
    assert [item["choices"][0]["text"] for item in items] == ["hello w", "o", "r", "l", "d"]


def test_stop_string_does_not_apply_to_the_echo():
    api = Api(FakeBackend("world"))
    response = api.complete("stop", echo=True, max_tokens=5, stop="stop")
    assert response.json()["choices"][0]["text"] == "stopworld"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(size, stream):
    api = Api(FakeBackend(says("one two three four", size=size)))
    response = api.complete(stop=["zzz", " three"], max_tokens=100, stream=stream)
    choices = (
        [item["choices"][0] for item in events(response)] if stream else response.json()["choices"]
    )
    assert "".join(choice["text"] for choice in choices) == "one two"
    assert choices[-1]["finish_reason"] == "stop"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert len(api.backend.aborted) == 1  # the rank did not know
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == len("one two three")


def test_end_token_ends_and_is_not_shown():
    api = Api(FakeBackend(says("bye", end=[IM_END, 65])))
    body = api.complete(max_tokens=50).json()
    assert body["choices"][0]["text"] == "bye"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 4
    assert api.backend.aborted == []


def test_ignore_eos_goes_on_but_for_ids_the_client_names():
    api = Api(FakeBackend(says("bye", end=[IM_END, 65, 66, 67])))
    body = api.complete(max_tokens=50, ignore_eos=True, stop_token_ids=[66]).json()
    assert body["choices"][0]["text"] == "byeA"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 6


def test_stream_has_one_item_per_step_even_without_text():
    api = Api(FakeBackend(says("a\u20acb")))
    items = events(api.complete(max_tokens=5, stream=True))
    assert [item["choices"][0]["text"] for item in items] == ["a", "", "", "\u20ac", "b"]
    assert {item["object"] for item in items} == {"text_completion"}
    assert len({(item["id"], item["created"], item["model"]) for item in items}) == 1
    assert [item["choices"][0]["finish_reason"] for item in items] == [None] * 4 + ["length"]
    assert all("usage" not in item for item in items)


def test_stream_usage():
    api = Api(FakeBackend("abc"))
    response = api.complete("hi", max_tokens=3, stream=True, stream_options={"include_usage": True})
    *items, last = events(response)
    assert [item["usage"] for item in items] == [None] * 3
    assert last["choices"] == []
    assert last["usage"] == usage(2, 3)
    assert last["id"] == items[0]["id"]


def test_stream_of_several_choices_keeps_indexes():
    api = Api(FakeBackend(lambda prompt, _params: [[token] for token in prompt * 3]))
    items = events(api.complete(["ab", "cde"], n=2, max_tokens=6, stream=True))
    texts, finished = [""] * 4, [0] * 4
    for item in items:
        (choice,) = item["choices"]
        assert not finished[choice["index"]]
        texts[choice["index"]] += choice["text"]
        finished[choice["index"]] += choice["finish_reason"] is not None
    assert texts == ["ababab", "ababab", "cdecde", "cdecde"]
    assert finished == [1] * 4
    order = [item["choices"][0]["index"] for item in items]
    assert order != sorted(order)  # they ran side by side


def test_text_that_needs_escaping_survives_streaming():
    text = 'quote " backslash \\ newline \n tab \t nul \x00 sep \u2028 nel \x85 \U0001f600 data: [DONE]\n\n'
    api = Api(FakeBackend(says(text, size=4)))
    response = api.complete(max_tokens=200, stream=True, stop="never")
    assert response.content.isascii()
    shown = "".join(item["choices"][0]["text"] for item in events(response)[:-1])
    assert text.startswith(shown) and len(shown) >= len(text) - 4


def test_model_is_optional_and_unknown_fields_are_ignored():
    assert Api().complete(user="me", some_new_field={"a": [1]}, metadata={}).status_code == 200


@pytest.mark.parametrize(
    "neutral",
    [
        {"logprobs": None, "best_of": 1, "suffix": "", "logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"response_format": {"type": "text"}, "min_tokens": 0, "bad_words": []},
        {"logprobs": False, "guided_json": None, "skip_special_tokens": True},
    ],
)
def test_parameters_that_are_switched_off_are_accepted(neutral):
    assert Api().complete(**neutral).status_code == 200


@pytest.mark.parametrize("place", ["thread", "process"])
def test_a_large_body_is_prepared_elsewhere_with_the_same_result(place):
    limits = {"inline_body_bytes": 9} | ({"thread_body_bytes": 9} if place == "process" else {})
    api = Api(FakeBackend(max_model_len=10_000, max_request_tokens=10_000), **limits)
    fields = {"n": 2, "seed": 1, "stop": ["z"], "logprobs": 1, "echo": True, "user": "me"}
    whole = api.complete("x" * 5000, **fields).json()
    inline = Api(FakeBackend(max_model_len=10_000, max_request_tokens=10_000))
    assert whole["choices"] == inline.complete("x" * 5000, **fields).json()["choices"]
    assert sent(api.backend) == sent(inline.backend)
    assert assert_error(api.complete("x", stop=[""]), 400)["param"] == "stop"
    error = assert_error(api.complete("x" * 20_000), 400, "context_length_exceeded")
    assert "20000 tokens" in error["message"]
