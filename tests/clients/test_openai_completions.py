"""The official Python client: completions."""

import uuid

import httpx
import pytest

TOPIC = "In Python, a generator"
ENDS = {"<|im_end|>": 2, "<|endoftext|>": 0}


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "phalanx")
    assert client.models.retrieve("demo").max_model_len == 2048


def test_greedy_gives_the_same_twice(complete):
    first, second = (complete(TOPIC, max_tokens=12) for _ in range(2))
    assert first.choices[0].text == second.choices[0].text != ""
    assert first.choices[0].finish_reason == "length"
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 12)
    assert first.usage.total_tokens == 17
    assert first.id != second.id and first.model == "demo"


def test_token_ids_are_as_good_as_text(complete, ids):
    assert complete(ids(TOPIC)).choices[0].text == complete(TOPIC).choices[0].text


@pytest.mark.parametrize("as_ids", [False, True])
def test_several_prompts_in_one_request(complete, ids, as_ids):
    texts = [TOPIC, "os.path.join", "A dictionary"]
    together = complete([ids(text) for text in texts] if as_ids else texts, max_tokens=5)
    alone = [complete(text, max_tokens=5) for text in texts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == [a.choices[0].text for a in alone]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert together.usage.completion_tokens == 15


def test_seeds_reproduce_and_choices_differ(complete):
    fields = {"temperature": 1.2, "max_tokens": 10}
    three = complete(TOPIC, n=3, seed=5, **fields)
    assert len({choice.text for choice in three.choices}) == 3
    assert three.usage.completion_tokens == 30 and three.usage.prompt_tokens == 5
    again = complete(TOPIC, n=3, seed=5, **fields)
    assert [c.text for c in again.choices] == [c.text for c in three.choices]
    assert complete(TOPIC, seed=5, **fields).choices[0].text == three.choices[0].text
    assert complete(TOPIC, seed=6, **fields).choices[0].text != three.choices[0].text


def test_without_a_seed_answers_differ(complete):
    texts = {complete(TOPIC, temperature=1.5, max_tokens=12).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_16_tokens_when_no_limit_is_given(client):
    answer = client.completions.create(
        model="demo", prompt=TOPIC, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 16


def test_stop_strings_end_the_text_and_are_not_in_it(complete):
    text = complete(TOPIC, max_tokens=20).choices[0].text
    middle = text[9:14]  # wherever tokens begin and end
    choice = complete(TOPIC, max_tokens=20, stop=["never there", middle]).choices[0]
    assert choice.text == text[: text.index(middle)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", middle)
    shown = complete(
        TOPIC, max_tokens=20, stop=middle, extra_body={"include_stop_str_in_output": True}
    )
    assert shown.choices[0].text == choice.text + middle


def test_a_stream_never_shows_a_part_of_a_stop_string(client):
    request = {"model": "demo", "prompt": TOPIC, "temperature": 0, "max_tokens": 20}
    text = client.completions.create(**request).choices[0].text
    for start in range(4, 12):
        stop = text[start : start + 6]
        stream = client.completions.create(**request, stop=[stop], stream=True)
        choices = [chunk.choices[0] for chunk in stream]
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert choices[-1].stop_reason == stop


def test_stop_token_ids(complete, ids):
    text = complete(TOPIC).choices[0].text
    third = ids(text)[2]
    choice = complete(TOPIC, extra_body={"stop_token_ids": [third]}).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", third)
    assert len(choice.text) < len(text) and text.startswith(choice.text)


def test_logit_bias_forces_and_forbids(complete, ids):
    (token,) = ids(" dict")
    forced = complete(TOPIC, logit_bias={str(token): 100}, max_tokens=4)
    assert forced.choices[0].text == " dict" * 4
    (usual,) = ids(complete(TOPIC, max_tokens=1).choices[0].text)
    other = complete(TOPIC, logit_bias={str(usual): -100}, max_tokens=1).choices[0].text
    assert ids(other) != [usual]


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 2},
        {"presence_penalty": 2, "frequency_penalty": 1},
        {"extra_body": {"repetition_penalty": 2}},
    ],
)
def test_penalties_spread_over_what_the_bias_allows(complete, ids, penalty):
    bias = {str(ids(word)[0]): 100 for word in (" b", " c", " d")}
    plain = complete(TOPIC, logit_bias=bias, max_tokens=24).choices[0].text.split()
    spread = complete(TOPIC, logit_bias=bias, max_tokens=24, **penalty).choices[0].text.split()
    assert set(spread) == {"b", "c", "d"}
    most, most_spread = (max(map(words.count, words)) for words in (plain, spread))
    assert most_spread < most


def test_min_tokens_and_ignore_eos(complete):
    bias = {str(i): 100 for i in ENDS.values()}
    at_once = complete(TOPIC, logit_bias=bias)
    assert (at_once.choices[0].text, at_once.choices[0].finish_reason) == ("", "stop")
    assert at_once.usage.completion_tokens == 1
    later = complete(TOPIC, logit_bias=bias, extra_body={"min_tokens": 5})
    assert (later.usage.completion_tokens, later.choices[0].finish_reason) == (6, "stop")
    assert later.choices[0].text == complete(TOPIC, max_tokens=5).choices[0].text
    never = complete(TOPIC, logit_bias=bias, extra_body={"ignore_eos": True})
    assert (never.usage.completion_tokens, never.choices[0].finish_reason) == (8, "length")
    assert never.choices[0].text == ""
    shown = complete(
        TOPIC,
        logit_bias={"2": 100},
        max_tokens=3,
        extra_body={"ignore_eos": True, "skip_special_tokens": False},
    )
    assert shown.choices[0].text == "<|im_end|>" * 3


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_the_narrowest_sampling_is_greedy(complete, fields):
    sampled = complete(TOPIC, temperature=1.5, seed=3, extra_body=fields)
    assert sampled.choices[0].text == complete(TOPIC).choices[0].text


def test_logprobs(complete):
    choice = complete(TOPIC, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text and len(logprobs.tokens) == 8
    starts = [len("".join(logprobs.tokens[:i])) for i in range(8)]
    assert logprobs.text_offset == starts
    rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    for token, logprob, top in rows:
        assert len(top) == 3 and max(top, key=top.get) == token and top[token] == logprob < 0


def test_sampled_tokens_have_their_own_logprobs(complete):
    logprobs = complete(TOPIC, temperature=2, seed=1, logprobs=1).choices[0].logprobs
    sizes = {len(top) for top in logprobs.top_logprobs}
    assert sizes == {1, 2}  # the best one, and the one that was sampled
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob <= max(top.values()) <= 0


def test_echo_scores_the_prompt(complete, ids):
    answer = complete(TOPIC, echo=True, logprobs=1, max_tokens=2)
    choice = answer.choices[0]
    assert choice.text == TOPIC + complete(TOPIC, max_tokens=2).choices[0].text
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text and len(logprobs.tokens) == 7
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    only = complete(TOPIC, echo=True, logprobs=1, max_tokens=0)
    assert only.choices[0].text == TOPIC and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1:5], abs=1e-4
    )
    prompt = complete(TOPIC, extra_body={"prompt_logprobs": 0}).choices[0].prompt_logprobs
    assert prompt[0] is None
    scores = [item[str(i)]["logprob"] for i, item in zip(ids(TOPIC), prompt, strict=True) if item]
    assert scores == pytest.approx(logprobs.token_logprobs[1:5], abs=1e-4)


def test_a_sampled_text_is_scored_as_it_was_sampled(complete):
    """Logprobs while generating, and of the same text as a prompt afterwards."""
    first = complete(TOPIC, max_tokens=10, logprobs=0, extra_body={"return_token_ids": True})
    choice = first.choices[0]
    whole = [*choice.prompt_token_ids, *choice.token_ids]
    again = complete(whole, echo=True, max_tokens=0, logprobs=0).choices[0]
    assert again.text == TOPIC + choice.text
    assert again.logprobs.token_logprobs[5:] == pytest.approx(
        choice.logprobs.token_logprobs, abs=1e-3
    )


def test_tokens_as_ids(complete, ids):
    choice = complete(TOPIC, logprobs=0, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in ids(choice.text)]


@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 1, "temperature": 1}, {"logprobs": 1}])
def test_a_stream_adds_up_to_the_whole(client, fields):
    request = {"model": "demo", "prompt": [TOPIC, "x"], "temperature": 0, "max_tokens": 9, **fields}
    whole = client.completions.create(**request)
    texts = [""] * len(whole.choices)
    usage = None
    with client.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens == 9 * len(texts)
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_usage_with_every_item(client):
    stream = client.completions.create(
        model="demo",
        prompt=TOPIC,
        temperature=0,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[-1] == 6 and counts[0] < 6


def test_no_usage_unless_asked_for(client):
    stream = client.completions.create(model="demo", prompt="x", max_tokens=3, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_characters_are_never_cut(client, ids):
    """Three euro signs and an emoji, whose bytes are tokens of their own."""
    text = "\u20ac\u20ac \U0001f600 \u20ac"
    assert len(ids(text)) > len(text)
    stream = client.completions.create(
        model="demo",
        prompt="x",
        max_tokens=40,
        stream=True,
        extra_body={"structured_outputs": {"choice": [text]}},
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == text
    assert "" in pieces  # a token that completes no character


def test_half_a_character_at_the_end_is_marked(complete):
    choice = complete("x", max_tokens=1, extra_body={"guided_choice": ["\U0001f600"]}).choices[0]
    assert (choice.text, choice.finish_reason) == ("\ufffd", "length")


def test_raw_responses_and_headers(client):
    raw = client.completions.with_raw_response.create(
        model="demo", prompt="x", max_tokens=1, extra_headers={"x-request-id": "my-request-1"}
    )
    assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
    assert raw.headers["x-request-id"] == "my-request-1"
    assert raw.parse().choices[0].finish_reason == "length"
    other = client.completions.with_raw_response.create(model="demo", prompt="x", max_tokens=1)
    assert other.headers["x-request-id"] not in ("", "my-request-1")


def test_request_id_priority_and_user(complete):
    answer = complete("x", user="somebody", extra_body={"request_id": "abc", "priority": -3})
    assert answer.id == "cmpl-abc"


def test_cached_tokens_by_salt(client):
    def cached(salt: str) -> int:
        answer = client.completions.create(
            model="demo",
            prompt="The same words again and again. " * 12,
            max_tokens=1,
            extra_body={"cache_salt": salt},
            extra_headers={"X-data-parallel-rank": "1"},
        )
        assert answer.usage.prompt_tokens > 64
        return answer.usage.prompt_tokens_details.cached_tokens

    salt = uuid.uuid4().hex
    assert cached(salt) == 0
    assert cached(salt) >= 64
    assert cached(salt + "other") == 0


def test_truncated_prompts(complete, ids):
    cut = complete(TOPIC, echo=True, extra_body={"truncate_prompt_tokens": 2})
    assert cut.usage.prompt_tokens == 2 and cut.choices[0].text.startswith(" a generator")
    assert cut.choices[0].text == " a generator" + complete(ids(TOPIC)[-2:]).choices[0].text


def test_unknown_and_null_fields_change_nothing(complete):
    body = {"surely_unknown": {"a": [1]}, "top_k": None, "min_p": None, "guided_json": None}
    assert complete(TOPIC, stop=None, extra_body=body).choices == complete(TOPIC).choices


def test_tokenize_and_back(server, ids):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        text = "Words, \u20ac and \U0001f600"
        there = http.post("/tokenize", json={"model": "demo", "prompt": text}).json()
        assert there["tokens"] == ids(text) and there["count"] == len(ids(text))
        back = http.post("/detokenize", json={"tokens": there["tokens"]}).json()
        assert back == {"prompt": text}
