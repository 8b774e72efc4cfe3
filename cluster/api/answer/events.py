"""Builds the JSON bytes of completions and chat completions: whole answers, stream items, errors.

Knows nothing of sockets or engines.

A stream item is built for every token of every stream, so the constant parts are encoded once for each choice, and
only the text goes through the JSON encoder. Output is ASCII, because some clients split lines at every Unicode line end
(U+2028, U+0085) and would cut an item in two.
"""

import json
from json.encoder import encode_basestring_ascii as json_string  # json.dumps of a str, 6x faster
from typing import Any

from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.message_parser import MessageParser
from cluster.errors import ServingError

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Encode as compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def error_body(error: ServingError) -> bytes:
    """Return the error envelope."""
    return to_json(
        {
            "error": {
                "message": error.message,
                "type": error.error_type,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def usage_of(generation: Generation) -> dict[str, Any]:
    """Return the token counts so far."""
    return usage(
        generation.num_prompt_tokens,
        generation.num_completion_tokens,
        generation.num_cached_tokens,
        generation.num_reasoning_tokens,
        generation.drafts,
        generation.num_image_tokens,
        generation.num_video_tokens,
    )


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int,
    drafts: dict[str, int],
    image_tokens: int = 0,
    video_tokens: int = 0,
) -> dict[str, Any]:
    """Return token counts in the shape of the API; `drafts` as of `draft_fields`."""
    of_prompt = {"cached_tokens": cached_tokens} | image_details(image_tokens, video_tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": of_prompt,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens, **drafts},
    }


def image_details(image_tokens: int, video_tokens: int = 0) -> dict[str, int]:
    """Return the fields of the tokens of images and videos among those of a prompt; none without any."""
    found = {"image_tokens": image_tokens, "video_tokens": video_tokens}
    return {name: count for name, count in found.items() if count}


def full_body(generation: Generation, texts: list[str]) -> bytes:
    """Return the answer of a request that does not stream; `texts` has one text for each choice."""
    body = head_of(generation, "chat.completion" if generation.is_chat else "text_completion") | {
        "choices": [
            _full_choice(generation, choice, text)
            for choice, text in zip(generation.choices, texts, strict=True)
        ],
        "usage": usage_of(generation),
    }
    if generation.is_chat and generation.choices[0].report is not None:
        body |= generation.choices[
            0
        ].report.prompt()  # one prompt: its fields stand beside the choices
    return to_json(body)


def _full_choice(generation: Generation, choice: Choice, text: str) -> dict[str, Any]:
    content: dict[str, Any] = {"text": text}
    if generation.is_chat:
        message = {"role": "assistant", "content": text, "refusal": None}
        if choice.parser is not None:
            choice.parser.push(text, last=True)
            message |= _message_fields(choice.parser)
        content = {"message": message}
    details: dict[str, Any] = {"logprobs": None}
    if choice.report is not None:
        details = choice.report.take()
        if not generation.is_chat:
            details |= choice.report.prompt()
    return {
        "index": choice.index,
        **content,
        **details,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.text.stop_reason,
    }


def _message_fields(parser: MessageParser) -> dict[str, Any]:
    """Return the fields of a parsed message. Content is null beside reasoning or calls alone."""
    reasoning = parser.reasoning or None
    message: dict[str, Any] = {"content": parser.content}
    if parser.thinks:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if parser.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parser.calls
        ]
    if not parser.content and (parser.calls or reasoning):
        message["content"] = None
    return message


def head_of(generation: Generation, kind: str) -> dict[str, Any]:
    """Return the first fields of an answer, which each of its stream items has too."""
    return {
        "id": generation.response_id,
        "object": kind,
        "created": generation.created,
        "model": generation.model,
        "system_fingerprint": generation.system_fingerprint,
    }


class EventWriter:
    """The `AnswerWriter` of (chat) completions with text alone in their stream items."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._kind = "chat.completion.chunk" if generation.is_chat else "text_completion"
        head = to_json(head_of(generation, self._kind)).decode("ascii")
        opening = f'data: {head[:-1]},"choices":[{{"index":'
        tail = '"usage":null}' if generation.include_usage else ""
        closing = f"}}],{tail}\n\n" if tail else "}]}\n\n"
        before_text = '"delta":{"content":' if generation.is_chat else '"text":'
        after_text = '},"logprobs":null,' if generation.is_chat else ',"logprobs":null,'
        self._prefixes = [f"{opening}{i},{before_text}" for i in range(len(generation.choices))]
        self._suffix = f'{after_text}"finish_reason":null{closing}'
        self._last_parts = (f'{after_text}"finish_reason":', closing)
        self._role_parts = (
            opening,
            ',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            + closing,
        )

    def begin(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: the role of a chat choice, and the first text."""
        body = self.text(choice, text)
        if not self._generation.is_chat:
            return body
        opening, rest = self._role_parts
        return f"{opening}{choice.index}{rest}".encode("ascii") + body

    def text(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: the item of one step's text, which may be empty."""
        prefix = self._prefixes[choice.index]
        finish = choice.text.finish_reason
        if finish is None:
            return f"{prefix}{json_string(text)}{self._suffix}".encode("ascii")
        before, after = self._last_parts
        ending = f'{json_string(finish)},"stop_reason":{json.dumps(choice.text.stop_reason)}'
        return f"{prefix}{json_string(text)}{before}{ending}{after}".encode("ascii")

    def end(self) -> bytes:
        """See AnswerWriter: the usage item, if any, and [DONE]."""
        if not self._generation.include_usage:
            return DONE
        content = head_of(self._generation, self._kind) | {
            "choices": [],
            "usage": usage_of(self._generation),
        }
        return b"data: " + to_json(content) + b"\n\n" + DONE

    def error(self, error: ServingError) -> bytes:
        """See AnswerWriter: the error envelope as an item, and [DONE]."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def body(self, texts: list[str]) -> bytes:
        """See AnswerWriter."""
        return full_body(self._generation, texts)
