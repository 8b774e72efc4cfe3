"""The demo checkpoint: its prompts are those of its training, and the files are those that its maker writes."""

import json

import pytest
from tokenizers import Tokenizer

from cluster.api.tokenizer import ServingTokenizer, load_tokenizer
from scripts.byte_tokenizer import save_tokenizer
from tests.serve.server import ROOT

DEMO = ROOT / "configs" / "models" / "demo"
TOOL = {"type": "function", "function": {"name": "f", "description": "caf\u00e9 <&"}}
TOOLS_TEXT = (
    "# Tools\n\nOne function a line, as JSON:\n<tools>\n"
    '{"type": "function", "function": {"name": "f", "description": "caf\u00e9 <&"}}\n</tools>\n\n'
    'To call a function, write:\n<tool_call>\n{"name": "its name", "arguments": {its arguments}}\n'
    "</tool_call><|im_end|>\n"
)
USER = {"role": "user", "content": "Hi "}


@pytest.fixture(scope="module")
def demo() -> ServingTokenizer:
    return load_tokenizer(DEMO)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def call(name: str, arguments: object) -> dict:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_maker_writes_the_same_tokenizer(tmp_path):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    config = json.loads((DEMO / "config.json").read_text())
    save_tokenizer(tmp_path, tokenizer, config["max_position_embeddings"])
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (DEMO / file.name).read_bytes(), file.name


@pytest.mark.parametrize("content", ["Hi ", "", "\n {% raw %}{{ x }}\n", " two\n\nlines \n"])
def test_a_prompt_without_tools_is_that_of_the_training(demo, content):
    """Character by character, since other prompts get other answers."""
    messages = [{"role": role, "content": content} for role in ("system", "user", "assistant")]
    expected = "".join(turn(message["role"], content) for message in messages)
    for tools in (None, []):
        assert demo.render_chat(messages, {}, tools=tools, add_generation_prompt=False) == expected
        rendered = demo.render_chat(messages, {}, tools=tools)
        assert rendered == expected + "<|im_start|>assistant\n"


def test_tools_share_the_turn_of_the_first_system_message(demo):
    rendered = demo.render_chat([USER], {}, tools=[TOOL], add_generation_prompt=False)
    assert rendered == "<|im_start|>system\n" + TOOLS_TEXT + turn("user", "Hi ")
    system = {"role": "system", "content": "Be brief."}
    rendered = demo.render_chat(
        [system, USER, system], {}, tools=[TOOL], add_generation_prompt=False
    )
    first = "<|im_start|>system\nBe brief.\n\n" + TOOLS_TEXT
    assert rendered == first + turn("user", "Hi ") + turn("system", "Be brief.")


def test_calls_and_results_are_turns(demo):
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("f", {"a": "\u00e9"})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        {"role": "assistant", "content": "So", "tool_calls": [call("f", {}), call("g", "{a")]},
    ]
    rendered = demo.render_chat(messages, {}, add_generation_prompt=False)
    assert rendered == (
        turn("user", "Hi ")
        + turn(
            "assistant",
            '<tool_call>\n{"name": "f", "arguments": {"a": "\u00e9"}}\n</tool_call>',
        )
        + turn("tool", "<tool_response>\n4\n</tool_response>")
        + turn(
            "assistant",
            'So\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {a}\n</tool_call>',
        )
    )
