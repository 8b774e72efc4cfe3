"""The official Python client: chat."""

import pytest

from tests.clients.conftest import HELLO, HELLO_ANSWER, chat_body

DEDENT = [{"role": "user", "content": "What does textwrap.dedent do?"}]


def streamed(client, **fields):
    """All chunks of a streamed answer."""
    return list(client.chat.completions.create(**chat_body(**fields), stream=True))


def text_of(chunks, index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_it_answers_what_it_learned(chat):
    answer = chat(HELLO)
    message = answer.choices[0].message
    assert message.content.startswith(HELLO_ANSWER) and message.role == "assistant"
    assert message.tool_calls is None and message.refusal is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert "whitespace" in chat(DEDENT).choices[0].message.content


def test_usage_counts_the_end_token(chat, ids):
    answer = chat(HELLO)
    content = answer.choices[0].message.content
    assert answer.usage.completion_tokens == len(ids(content)) + 1
    assert answer.usage.prompt_tokens == len(
        ids("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    )


def test_a_stream_adds_up_to_the_whole(client, chat):
    whole = chat(HELLO)
    chunks = streamed(client, messages=HELLO, stream_options={"include_usage": True})
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_streaming_helper(client):
    with client.chat.completions.stream(**chat_body(HELLO)) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content
    assert final.choices[0].message.content.startswith(HELLO_ANSWER)
    assert final.choices[0].finish_reason == "stop"


def test_streamed_lines(client):
    with client.chat.completions.with_streaming_response.create(
        **chat_body(HELLO), stream=True
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)


def test_content_parts_are_joined(chat):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    joined = chat([{"role": "user", "content": parts}], max_tokens=6)
    assert joined.choices == chat(_user("Hel\nlo"), max_tokens=6).choices


def test_every_role(chat):
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Hello", "name": "ann"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What does textwrap.dedent do?"},
    ]
    as_system = [{"role": "system", "content": "Be short."}, *messages[1:]]
    answer = chat(messages, max_tokens=12)
    assert answer.choices == chat(as_system, max_tokens=12).choices
    assert answer.usage.prompt_tokens > chat(DEDENT, max_tokens=1).usage.prompt_tokens


def test_choices_of_a_seed(client, chat):
    fields = {"temperature": 2, "n": 3, "seed": 9, "max_tokens": 12}
    whole = chat(DEDENT, **fields)
    contents = [choice.message.content for choice in whole.choices]
    assert len(set(contents)) == 3
    chunks = streamed(client, messages=DEDENT, **fields)
    assert [text_of(chunks, i) for i in range(3)] == contents
    roles = [c.index for chunk in chunks for c in chunk.choices if c.delta.role == "assistant"]
    assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(chat, name):
    answer = chat(HELLO, **{name: 3})
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert HELLO_ANSWER.startswith(answer.choices[0].message.content)


def test_stop(client, chat):
    choice = chat(HELLO, stop=["demo mo", "zz"]).choices[0]
    assert choice.message.content == "Hello! I am a small "
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "demo mo")
    assert text_of(streamed(client, messages=HELLO, stop="demo mo")) == "Hello! I am a small "


def test_logprobs(chat):
    choice = chat(HELLO, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert "".join(item.token for item in content[:-1]) == choice.message.content
    for item in content:
        assert len(item.top_logprobs) == 2 and item.top_logprobs[0].logprob == item.logprob <= 0
        assert item.top_logprobs[0].token == item.token
        assert bytes(item.bytes).decode() == item.token
    assert content[-1].token == "<|im_end|>"


def test_streamed_logprobs_are_the_same(client, chat):
    fields = {"logprobs": True, "top_logprobs": 1, "max_tokens": 10}
    whole = chat(HELLO, **fields).choices[0].logprobs.content
    chunks = streamed(client, messages=HELLO, **fields)
    items = [
        item
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for item in choice.logprobs.content
    ]
    assert [item.token for item in items] == [item.token for item in whole]
    assert [i.logprob for i in items] == pytest.approx([i.logprob for i in whole], abs=1e-4)


def test_logprobs_without_alternatives(chat):
    content = chat(HELLO, logprobs=True, max_tokens=4).choices[0].logprobs.content
    assert len(content) == 4 and all(item.top_logprobs == [] for item in content)
    assert chat(HELLO, logprobs=False, max_tokens=1).choices[0].logprobs is None


def test_penalties_and_bias(chat, ids):
    (token,) = ids(" dict")
    fields = {"logit_bias": {str(token): 100}, "max_tokens": 5}
    assert chat(HELLO, **fields).choices[0].message.content == " dict" * 5
    answer = chat(HELLO, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=5)
    assert HELLO_ANSWER.startswith(answer.choices[0].message.content)


def test_the_last_message_goes_on(chat):
    begun = [*HELLO, {"role": "assistant", "content": "Hello! I am a"}]
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    rest = chat(begun, extra_body=flags).choices[0].message.content
    assert rest.startswith(" small demo model")
    echoed = chat(begun, extra_body={**flags, "echo": True}).choices[0].message.content
    assert echoed == "Hello! I am a" + rest


def test_fields_that_only_other_servers_know(chat):
    answer = chat(
        HELLO,
        max_tokens=4,
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="me",
        prompt_cache_key="k",
        parallel_tool_calls=True,
    )
    assert answer.choices == chat(HELLO, max_tokens=4).choices


def test_sampling_parameters_beyond_openai(chat):
    body = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "min_tokens": 2, "seed": 4}
    sampled = chat(HELLO, temperature=1.9, max_tokens=8, extra_body=body)
    assert sampled.choices == chat(HELLO, max_tokens=8).choices


def test_prompt_logprobs_stand_beside_the_choices(chat):
    answer = chat(HELLO, n=2, max_tokens=1, extra_body={"prompt_logprobs": 1})
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None


def test_a_pinned_rank_gives_the_same(client, chat):
    answers = [chat(HELLO, max_tokens=6, extra_headers={"X-data-parallel-rank": r}) for r in "01"]
    assert answers[0].choices == answers[1].choices


def _user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]
