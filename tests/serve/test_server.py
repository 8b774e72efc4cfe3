"""The whole way over a real server of two ranks: official client, nonsense, idling."""

import asyncio
import time

import httpx
import openai
import pytest
import torch


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def reference(checkpoint):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return (
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(checkpoint),
    )


def greedy(reference, prompt: list[int], count: int) -> str:
    model, tokenizer = reference
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tokenizer.decode(found[0, len(prompt) :], skip_special_tokens=True)


def test_models_and_health(client, server):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert server.get("/health").status_code == 200


def test_greedy_completion_equals_transformers(client, reference):
    prompt = list(range(40, 80))
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=16, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == greedy(reference, prompt, 16)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (40, 16)


def test_chat_streams_what_it_answers_whole(client):
    request = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 20,
        "seed": 7,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 20


def test_sampled_answers_do_not_depend_on_the_rank_or_the_company(client, server):
    """The same seed alone, and 24 times at once over both ranks."""
    request = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "seed": 11, "temperature": 0.8}
    alone = client.completions.create(**request).choices[0].text

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as many:
            answers = await asyncio.gather(*(many.completions.create(**request) for _ in range(24)))
        return [answer.choices[0].text for answer in answers]

    assert set(asyncio.run(together())) == {alone}


def test_both_ranks_work_and_metrics_tell(client, server):
    for _ in range(4):
        client.completions.create(model="tiny", prompt="spread", max_tokens=2)
    text = server.get("/metrics").text
    for rank in (0, 1):
        line = next(
            line
            for line in text.splitlines()
            if line.startswith("phalanx:generation_tokens_total{") and f'rank="{rank}"' in line
        )
        assert float(line.split()[-1]) > 0, line


BAD = [
    ({"prompt": "x" * 3000}, 400),
    ({"prompt": []}, 400),
    ({"prompt": [10**9]}, 400),
    ({"prompt": "x", "max_tokens": 0}, 400),
    ({"prompt": "x", "max_tokens": 10**12}, 400),
    ({"prompt": "x", "temperature": -1}, 400),
    ({"prompt": "x", "top_p": 0}, 400),
    ({"prompt": "x", "stop": [1, {}]}, 400),
    ({"prompt": {"a": 1}}, 400),
    ({}, 400),
    ({"prompt": "x", "model": "other"}, 404),
]


@pytest.mark.parametrize(("body", "status"), BAD)
def test_nonsense_gets_its_4xx_and_the_next_its_answer(server, body, status):
    path = "/v1/completions"
    answer = server.post(path, json={"model": "tiny", **body})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    good = server.post(path, json={"model": "tiny", "prompt": "x", "max_tokens": 1})
    assert good.status_code == 200


def test_broken_bytes_get_a_4xx(server):
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"\xff\xfe", b"[1,2]", b'{"prompt": NaN}', b"[" * 100_000):
        answer = server.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code == 400, (content[:10], answer.text)


def test_a_client_that_leaves_frees_its_request(server):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    server.wait_free()
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        chunks = answer.iter_bytes()
        next(chunks)
        assert sum(server.figures("num_requests_running")) == 1
    server.wait_free()


def test_an_idle_group_sleeps(server):
    """Ranks that wait actively do so in every second; after a request they do other work for a moment."""
    ranks = server.ranks()
    assert len(ranks) == 2

    def used_s() -> float:
        return sum(sum(rank.cpu_times()[:2]) for rank in ranks)

    shares = [1.0]
    while shares[-1] >= 0.03 and len(shares) <= 20:
        before, started = used_s(), time.monotonic()
        time.sleep(1)
        shares.append((used_s() - before) / (time.monotonic() - started))
    assert shares[-1] < 0.03, f"shares of a core while idle: {shares[1:]}"
