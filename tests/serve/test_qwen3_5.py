"""A server of a tiny Qwen3.5 with the published vocabulary and its head: thoughts, calls, kept states, drafts.

The template is a short one with the tags of the published template: the prompt opens the thought, and calls have a tag
for each parameter. PHALANX_TEST_TEMPLATE names another template, as the published one.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench import qwen_tokenizer
from tests.checkpoints.writer import make_checkpoint
from tests.serve.open_streams import Stream, check_death_ends
from tests.serve.server import Server, running

TEMPLATE = r"""
{%- if tools -%}
  {{- '<|im_start|>system\nCall functions as <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n' -}}
  {{- '</function>\n</tool_call>.\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
    {%- for key, value in call.function.arguments | items -%}
      {{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' -}}
    {%- endfor -%}
    {{- '</function>\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n<think>\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
""".strip()
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 3]}},
            "required": ["city", "days"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is the weather like in Rome? " * 12}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def qwen(
    tmp_path_factory: pytest.TempPathFactory, server: Server, ray_address: str
) -> Iterator[Server]:
    """In the Ray of the shared server. The death of a rank ends it."""
    vocabulary = qwen_tokenizer.find_vocabulary()
    if vocabulary is None:
        pytest.skip("qwen.tiktoken is not here: pip install dashscope==1.14.1")
    folder = tmp_path_factory.mktemp("qwen3_5")
    sizes = {"num_layers": 3, "hidden_size": 32, "num_experts": 6, "vocab_size": 151_936}
    checkpoint = make_checkpoint(folder / "model", family="qwen3_5_moe", mtp=True, **sizes)
    qwen_tokenizer.save(qwen_tokenizer.build(vocabulary), checkpoint)
    template = Path(os.environ.get("PHALANX_TEST_TEMPLATE", folder / "template.jinja"))
    if not template.exists():
        template.write_text(TEMPLATE)
    with running(
        folder,
        checkpoint,
        joins=server,
        cluster={"rebuild_attempts": 0},
        serve={"chat_template": str(template)},
        speculation={"method": "auto", "num_draft_tokens": 2, "adaptive": False},
    ) as joined:
        yield joined
        check_death_ends(joined, Stream(joined, 400))


def chat(server: Server, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The body of an answer of 24 tokens at most; greedy."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_thought_is_open_where_thinking_is_on(qwen: Server) -> None:
    on, off = (
        chat(qwen, [QUESTION], ignore_eos=True, **fields)["choices"][0]["message"]
        for fields in ({}, OFF)
    )
    assert on["reasoning_content"] and not on["content"]
    assert off["content"] and not off.get("reasoning_content")


def test_a_prompt_that_comes_again_goes_on_from_a_kept_state(qwen: Server) -> None:
    asked = [{"role": "user", "content": "Tell me of the river Tiber. " * 12}]
    first, *others = (chat(qwen, asked, **OFF) for _ in range(4))
    texts = {body["choices"][0]["message"]["content"] for body in (first, *others)}
    assert len(texts) == 1
    found = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in others]
    assert max(found) >= 64, "two ranks have seen the prompt by then"
    for body in (first, *others):
        details = body["usage"]["completion_tokens_details"]
        assert details["rejected_prediction_tokens"] > 0, "the head of a random model drafts"


# A random model ends its thought by no chance; calls follow the thought.
ENDS_THOUGHT = {"logit_bias": {"151668": 100}}


@pytest.mark.parametrize("thinking", [OFF, ENDS_THOUGHT])
def test_a_call_and_the_turn_behind_it(qwen: Server, thinking: dict[str, Any]) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = chat(qwen, [QUESTION], max_tokens=120, **asked, **thinking)["choices"]
    (call,), message = choice["message"]["tool_calls"], choice["message"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 3)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    turn = {"role": "assistant", "content": message["content"] or "", "tool_calls": [call]}
    body = chat(qwen, [QUESTION, turn, result], tools=[WEATHER], ignore_eos=True, **thinking)
    assert body["usage"]["completion_tokens"] == 24
