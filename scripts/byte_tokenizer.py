"""A byte-level tokenizer with a ChatML template, for random checkpoints. Knows nothing of models."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.weights.initial_weights import NUM_BYTES

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

# ChatML with calls in the Hermes form. The tools and the client's system message share one turn.
CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content -%}
    {%- for part in content if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0]['role'] == 'system' -%}
    {{- text(messages[0]['content']) + '\n\n' -}}
    {%- set messages = messages[1:] -%}
  {%- endif -%}
  {{- '# Tools\n\nOne function a line, as JSON:\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
  {{- '\n</tools>\n\nTo call a function, write:\n<tool_call>\n' -}}
  {{- '{"name": "its name", "arguments": {its arguments}}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + '\n' -}}
  {%- if message['role'] == 'tool' -%}
    {{- '<tool_response>\n' + text(message['content']) + '\n</tool_response>' -}}
  {%- else -%}
    {{- text(message['content']) -}}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n' if message['content'] or not loop.first -}}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {%- if call.function.arguments is string -%}
      {{- call.function.arguments -}}
    {%- else -%}
      {{- call.function.arguments | tojson -}}
    {%- endif -%}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".strip()


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer: id b < 256 is byte b, followed by the special tokens. Round trips are exact."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {byte: chr(byte) for byte in printable}
    for byte in range(NUM_BYTES):  # the byte-level alphabet: unprintable bytes move past 255
        stand_in.setdefault(byte, chr(NUM_BYTES + len(stand_in) - len(printable)))
    vocab = {stand_in[byte]: byte for byte in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, the ChatML template inside the latter."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")


def generation_config(special_ids: list[int]) -> dict[str, Any]:
    """Return generation_config.json for the ids of SPECIAL_TOKENS: either end token stops a generation."""
    end_of_text, _, im_end = special_ids
    return {"eos_token_id": [im_end, end_of_text], "pad_token_id": end_of_text}
