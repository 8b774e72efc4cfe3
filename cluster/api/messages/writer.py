"""The bytes of a message: the whole answer, or its stream of content blocks. Knows nothing of sockets or engines.

The constant parts of a text delta are encoded once, because one is built for every token of every stream.
"""

import json
from json.encoder import encode_basestring_ascii as json_string
from typing import Any

from cluster.api.answer.events import to_json
from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.message_parser import CallPart, MessagePart, Reasoning, ToolCall
from cluster.api.messages.envelope import error_object
from cluster.errors import ServingError

_PING = 'event: ping\ndata: {"type":"ping"}\n\n'
_DELTA = 'event: content_block_delta\ndata: {"type":"content_block_delta","index":'
_END = "}}\n\n"
_SIGNATURE = '"signature_delta","signature":""'


class MessageWriter:
    """The `AnswerWriter` of one message.

    max_tokens: the limit of the client; the limit of the choice is lower if the context ends before.
    """

    def __init__(self, generation: Generation, *, max_tokens: int, request_id: str) -> None:
        self._generation = generation
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._num_blocks = 0
        self._open: type[Any] | ToolCall | None = None  # str, Reasoning or the call of the block
        self._before = ""  # a delta of the open block, up to its text

    def begin(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: message_start, a ping, and the first text."""
        message = self._message([], None, None) | {"usage": self._usage() | {"output_tokens": 0}}
        start = _event("message_start", {"message": message}) + _PING
        if choice.parser is None:
            start += self._start(str, {"type": "text", "text": ""}, '"text_delta","text":')
        return start.encode("ascii") + self.text(choice, text)

    def text(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: deltas, and the borders of content blocks."""
        last = choice.text.finish_reason is not None
        parser = choice.parser
        if parser is None:
            delta = f"{self._before}{json_string(text)}{_END}" if text else ""
            return (delta + self._stop() if last else delta).encode("ascii")
        items = [self._part(part) for part in parser.push(text, last=last)]
        if last:
            if not self._num_blocks:
                items.append(self._part(""))
            items.append(self._stop())
        return "".join(items).encode("ascii")

    def end(self) -> bytes:
        """See AnswerWriter: the stop reason and the usage, and message_stop."""
        reason, sequence = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage()
        last = _event("message_delta", {"delta": delta, "usage": usage})
        return (last + _event("message_stop", {})).encode("ascii")

    def error(self, error: ServingError) -> bytes:
        """See AnswerWriter: an error event, the last one of the stream."""
        return b"event: error\ndata: " + to_json(error_object(error, self._request_id)) + b"\n\n"

    def body(self, texts: list[str]) -> bytes:
        """See AnswerWriter."""
        parser = self._generation.choices[0].parser
        parts: list[MessagePart] = (
            [texts[0]] if parser is None else parser.push(texts[0], last=True)
        )
        reason, sequence = self._stop_reason()
        return to_json(self._message(_content(parts), reason, sequence))

    def _message(
        self, content: list[Any], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._generation.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._generation.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Return the token counts so far. Input tokens that were found in the cache are counted apart."""
        generation = self._generation
        cached = generation.num_cached_tokens
        return {
            "input_tokens": generation.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generation.num_completion_tokens,
            "output_tokens_details": {"thinking_tokens": generation.num_reasoning_tokens},
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        """Return stop_reason and stop_sequence of the complete choice."""
        choice = self._generation.choices[0]
        if choice.text.finish_reason == "length":
            cut = choice.params.max_tokens < self._max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens", None
        if isinstance(choice.text.stop_reason, str):
            return "stop_sequence", choice.text.stop_reason
        if choice.parser is not None and choice.parser.calls:
            return "tool_use", None
        return "end_turn", None

    def _part(self, part: MessagePart) -> str:
        """Return the delta of a part, with the end and the start of blocks before it."""
        start = ""
        if isinstance(part, CallPart):
            if self._open is not part.call:
                start = self._stop() + self._start(
                    part.call, _tool_use(part.call, {}), '"input_json_delta","partial_json":'
                )
            text = part.arguments
        elif isinstance(part, Reasoning):
            if self._open is not Reasoning:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                start = self._stop() + self._start(Reasoning, block, '"thinking_delta","thinking":')
            text = part.text
        else:
            if self._open is not str:
                block = {"type": "text", "text": ""}
                start = self._stop() + self._start(str, block, '"text_delta","text":')
            text = part
        return f"{start}{self._before}{json_string(text)}{_END}" if text else start

    def _start(self, opened: type[Any] | ToolCall, block: dict[str, Any], delta: str) -> str:
        index = self._num_blocks
        self._num_blocks += 1
        self._open = opened
        self._before = f'{_DELTA}{index},"delta":{{"type":{delta}'
        return _event("content_block_start", {"index": index, "content_block": block})

    def _stop(self) -> str:
        """Return the end of the open block, if any."""
        if self._open is None:
            return ""
        index = self._num_blocks - 1
        stop = _event("content_block_stop", {"index": index})
        if self._open is Reasoning:
            stop = f'{_DELTA}{index},"delta":{{"type":{_SIGNATURE}{_END}{stop}'
        self._open = None
        return stop


def _event(kind: str, fields: dict[str, Any]) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields}).decode('ascii')}\n\n"


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    unique = call.call_id.removeprefix("call_")
    return {"type": "tool_use", "id": f"toolu_{unique}", "name": call.name, "input": arguments}


def _content(parts: list[MessagePart]) -> list[dict[str, Any]]:
    """Return the content blocks of a whole answer; an answer without any has one empty block of text."""
    blocks: list[dict[str, Any]] = []
    opened: type[Any] | ToolCall | None = None
    for part in parts:
        if isinstance(part, CallPart):
            if opened is not part.call:
                blocks.append(_tool_use(part.call, _input(part.call)))
            opened = part.call
        elif isinstance(part, Reasoning):
            if opened is not Reasoning:
                blocks.append({"type": "thinking", "thinking": "", "signature": ""})
            blocks[-1]["thinking"] += part.text
            opened = Reasoning
        else:
            if opened is not str:
                blocks.append({"type": "text", "text": ""})
            blocks[-1]["text"] += part
            opened = str
    return blocks or [{"type": "text", "text": ""}]


def _input(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call; {} if they are no JSON object, as when max_tokens cut them."""
    try:
        value = json.loads(call.arguments)
        # Python reads NaN, and numbers beyond a float, which JSON cannot have.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
