"""Random bodies for the POST routes: sensible ones, most of them spoiled somewhere. Seeded, so a number names one.

Own generator instead of hypothesis: thousands go out at once, and nothing is shrunk.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.clients.random_dialects import as_message, as_response

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
PATHS = ("/v1/completions", CHAT, "/tokenize", "/detokenize", RESPONSES, MESSAGES, COUNT_TOKENS)
_WEIGHTS = (10, 12, 2, 2, 8, 8, 1)
# Values of the field for the number of tokens that are refused; messages cuts too large ones.
_REFUSED = {PATHS[0]: (10**9, "3"), CHAT: (10**9, "3"), RESPONSES: (10**9, "3"), MESSAGES: (0, "3")}
_NAMES = (b'"max_tokens"', b'"max_output_tokens"')
_WORDS = (
    "Hello",
    "what is dict",
    "x",
    "",
    " ",
    "\u20ac\U0001f600",
    "e\u0301",
    "<tool_call>",
    "</think>",
    "\n\n\u2028",
    "\0",
)
_NUMBERS = (
    0,
    -1,
    1,
    0.5,
    3,
    1e308,
    -1e308,
    1e-320,
    2**31,
    2**63,
    -(2**64),
    10**30,
    10**400,
    5e-324,
    -0.0,
)
_MAX_TOKENS = 6


@dataclass(frozen=True)
class Body:
    """What is sent where."""

    path: str
    content: bytes


class Generator:
    """Bodies of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self) -> Body:
        """The next one: whole, spoiled in places, or no JSON."""
        rng = self._random
        path = rng.choices(PATHS, _WEIGHTS)[0]
        fields = self.sensible(path)
        fate = rng.random()
        if fate < 0.65:
            for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
                self._spoil(fields)
            name = "max_output_tokens" if path == RESPONSES else "max_tokens"
            if path in _REFUSED and not 0 <= _number(fields.get(name), -1) <= _MAX_TOKENS:
                fields[name] = rng.choice((1, _MAX_TOKENS, *_REFUSED[path]))
        elif fate < 0.72:
            fields = self._json(4)
        content = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        if fate > 0.96:
            content = self._damage(content)
        return Body(path, content)

    def sensible(self, path: str) -> dict[str, Any]:
        """A body that is mostly right: only its values may be refused, or two of them together."""
        rng = self._random
        if path == "/detokenize":
            return {"tokens": [rng.randrange(4096) for _ in range(rng.randrange(9))]}
        if path == RESPONSES:
            return as_response(self.sensible(CHAT), rng)
        if path in (MESSAGES, COUNT_TOKENS):
            return as_message(self.sensible(CHAT), rng)
        body: dict[str, Any] = {} if rng.random() < 0.3 else {"model": "demo"}
        is_chat = path == PATHS[1] or (path == "/tokenize" and rng.random() < 0.5)
        if is_chat:
            body["messages"] = self._messages()
        else:
            body["prompt"] = self._prompt()
        body["max_tokens"] = rng.randint(1, _MAX_TOKENS)
        table = _COMMON | (_CHAT if is_chat else _COMPLETION)
        for name in rng.sample(sorted(table), rng.choice((0, 1, 3, 5, 9))):
            body[name] = table[name](rng)
        if rng.random() < 0.9:  # most bodies are right: fields that need another one have it
            if body.get("stream_options"):
                body["stream"] = True
            if body.get("stream"):
                body.pop("prompt_logprobs", None)
            if "top_logprobs" in body:
                body["logprobs"] = True
            if body["max_tokens"] == 0:
                body["echo"] = True
            body.pop("min_tokens" if "max_completion_tokens" in body else "", None)
        if rng.random() < 0.25:
            name, make = rng.choice(list(_FORMS.items()))
            body[name] = make(rng)
        if is_chat and rng.random() < 0.3:
            body["tools"] = [_tool(rng, i) for i in range(rng.choice((0, 1, 2, 5)))]
            body["tool_choice"] = rng.choice(
                ("auto", "none", "required", {"type": "function", "function": {"name": "tool_0"}})
            )
            body["parallel_tool_calls"] = rng.random() < 0.5
        return body

    def _prompt(self) -> Any:
        rng = self._random
        ids = [rng.randrange(4096) for _ in range(rng.randint(1, 8))]
        return rng.choice((rng.choice(_WORDS), _WORDS[:2], ids, [ids, ids[:1]], "word " * 30))

    def _messages(self) -> list[Any]:
        rng = self._random
        roles = rng.choices(
            ("user", "assistant", "system", "tool", "developer"),
            (9, 3, 2, 1, 1),
            k=rng.randint(1, 4),
        )
        messages = [{"role": role, "content": rng.choice(_WORDS)} for role in roles]
        if rng.random() < 0.2:
            messages[0]["content"] = [
                {"type": "text", "text": rng.choice(_WORDS)} for _ in range(2)
            ]
        if rng.random() < 0.2:
            call = {
                "function": {
                    "name": "f",
                    "arguments": rng.choice(('{"a": 1}', "{", {"a": [1]}, None)),
                }
            }
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        return messages

    # And what becomes of them.

    def _spoil(self, fields: dict[str, Any]) -> None:
        """Change something at any depth: replace, remove, add, or wrap a value."""
        rng = self._random
        place: Any = fields
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                return
            key = rng.choice(keys)
            value = place[key]
            if not isinstance(value, dict | list) or rng.random() < 0.4:
                break
            place = value
        act = rng.random()
        if act < 0.55:
            place[key] = self._json(3)
        elif act < 0.7:
            del place[key]
        elif act < 0.8 and isinstance(place, dict):
            place[rng.choice((*_WORDS, "unknown", "n", "stop", "tools"))] = self._json(2)
        elif act < 0.9:
            place[key] = [value] * rng.choice((1, 3, 40))
        else:
            place[key] = self._deep(rng.choice((5, 70, 600)))

    def _json(self, depth: int) -> Any:
        rng = self._random
        kind = rng.random()
        if depth and kind < 0.15:
            return [self._json(depth - 1) for _ in range(rng.randrange(4))]
        if depth and kind < 0.3:
            return {rng.choice(_WORDS): self._json(depth - 1) for _ in range(rng.randrange(4))}
        number = rng.choice((*_NUMBERS, rng.uniform(-3, 3), rng.randint(-3, 3)))
        if rng.random() < 0.02:
            number = rng.choice((math.nan, math.inf))
        text = rng.choice((*_WORDS, self._text()))
        return rng.choice((None, True, False, number, number, text, text))

    def _text(self) -> str:
        rng = self._random
        ranges = ((0, 0x7F), (0x80, 0x24F), (0x2000, 0x20FF), (0xD800, 0xDFFF), (0x1F600, 0x1F64F))
        return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(rng.randrange(12)))

    def _deep(self, levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value] if self._random.random() < 0.5 else {"a": value}
        return value

    def _damage(self, content: bytes) -> bytes:
        rng = self._random
        start = rng.randrange(len(content) + 1)
        end = min(start + rng.randrange(4), len(content))
        damaged = content[:start] + rng.randbytes(rng.randrange(4)) + content[end:]
        # Without its limit a chat goes on as long as the model's context.
        return damaged if all(name in damaged for name in _NAMES if name in content) else content


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) else default


_Make = Callable[[random.Random], Any]


def _flag(rng: random.Random) -> bool:
    return rng.random() < 0.5


_COMMON: dict[str, _Make] = {
    "n": lambda rng: rng.randint(1, 3),
    "temperature": lambda rng: rng.choice((0, 0.5, 1, 2, rng.uniform(0, 2))),
    "top_p": lambda rng: rng.uniform(0.05, 1),
    "top_k": lambda rng: rng.choice((-1, 0, 1, 50, 5000)),
    "min_p": lambda rng: rng.random(),
    "seed": lambda rng: rng.randint(-(2**63), 2**63 - 1),
    "presence_penalty": lambda rng: rng.uniform(-2, 2),
    "frequency_penalty": lambda rng: rng.uniform(-2, 2),
    "repetition_penalty": lambda rng: rng.choice((1e-9, 0.5, 1.2, 1e9)),
    "logit_bias": lambda rng: {str(rng.randrange(4096)): rng.uniform(-100, 100) for _ in range(3)},
    "stop": lambda rng: rng.choice(("e", ["the", "\u20ac"], [], ["a" * 1024])),
    "stop_token_ids": lambda rng: [rng.randrange(4096) for _ in range(rng.randrange(3))],
    "min_tokens": lambda rng: rng.randint(0, 2),
    "ignore_eos": _flag,
    "include_stop_str_in_output": _flag,
    "skip_special_tokens": _flag,
    "add_special_tokens": _flag,
    "truncate_prompt_tokens": lambda rng: rng.choice((-1, 1, 5)),
    "prompt_logprobs": lambda rng: rng.choice((0, 1, 20, False)),
    "return_token_ids": _flag,
    "return_tokens_as_token_ids": _flag,
    "stream": _flag,
    "stream_options": lambda rng: {
        "include_usage": _flag(rng),
        "continuous_usage_stats": _flag(rng),
    },
    "priority": lambda rng: rng.randint(-5, 5),
    "cache_salt": lambda rng: rng.choice("ab"),
    "request_id": lambda rng: rng.choice(("same", "other")),
    "user": lambda rng: rng.choice(_WORDS),
    "echo": _flag,
}
_COMPLETION: dict[str, _Make] = {
    "logprobs": lambda rng: rng.randint(0, 20),
    "max_tokens": lambda rng: rng.choice((0, 1, 3)),
    "return_token_strs": _flag,
}
_CHAT: dict[str, _Make] = {
    "logprobs": _flag,
    "top_logprobs": lambda rng: rng.randint(0, 20),
    "max_completion_tokens": lambda rng: rng.randint(1, _MAX_TOKENS),
    "documents": lambda rng: [{"title": "t", "text": rng.choice(_WORDS)}],
    "chat_template_kwargs": lambda rng: {"enable_thinking": _flag(rng)},
    "add_generation_prompt": _flag,
    "continue_final_message": _flag,
    "include_reasoning": _flag,
}


def _schema(rng: random.Random, depth: int = 2) -> Any:
    """A JSON schema, sensible or not."""
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        return {
            "type": rng.choice(
                ("string", "integer", "number", "boolean", "null", "strin", ["string", "null"])
            )
        }
    if kind == 1:
        return {"type": "integer", "minimum": rng.randint(-9, 9), "maximum": rng.randint(-9, 9)}
    if kind == 2:
        return {
            "type": "string",
            "pattern": rng.choice(("^a+$", "[", "(?=x)y", "\\d{2,1}", "a{1,999999}")),
        }
    if kind == 3:
        return {"enum": rng.choice(([1, "a", None], [], [{"a": [1]}], ["\u20ac"]))}
    if kind == 4:
        return {
            "type": "string",
            "format": rng.choice(("date", "email", "uuid", "nonsense")),
            "maxLength": rng.choice((0, 3, -1)),
        }
    if kind == 5:
        return rng.choice(
            (
                {},
                True,
                False,
                {"$ref": "#"},
                {"$ref": "#/$defs/x"},
                {"$ref": "http://x.example/y"},
                {"not": {}},
            )
        )
    inner = _schema(rng, depth - 1)
    if kind == 6:
        return {
            "type": "array",
            "items": inner,
            "minItems": rng.choice((0, 2, 10**6)),
            "uniqueItems": _flag(rng),
        }
    if kind == 7:
        return {rng.choice(("anyOf", "oneOf", "allOf")): [inner, _schema(rng, depth - 1)]}
    return {
        "type": "object",
        "properties": {"a": inner, "\u20ac": _schema(rng, depth - 1)},
        "required": rng.choice(([], ["a"], ["b"])),
        "additionalProperties": rng.choice((False, True, inner)),
        "$defs": {"x": inner},
    }


def _regex(rng: random.Random) -> str:
    return rng.choice(
        (
            "[a-z]+",
            "(",
            "a{3}",
            "(a|b)*c",
            "\\p{L}{2}",
            "(?i)x",
            "(?=a)b",
            "a{1,100000}",
            "[^\\n]{1,9}",
            "\\1",
        )
    )


def _grammar(rng: random.Random) -> str:
    return rng.choice(
        (
            'start: "a" | "b" start',
            'root ::= "yes" | "no"',
            "start: start",
            "start: x",
            "start: /[0-9]+/",
            "no grammar",
            'start: "a"~1..1000000',
            "%import common.NUMBER\nstart: NUMBER",
            'root ::= [a-z]+ root | ""',
            "start: %json {}",
        )
    )


_FORMS: dict[str, _Make] = {
    "response_format": lambda rng: rng.choice(
        (
            {"type": "text"},
            {"type": "json_object"},
            {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _schema(rng), "strict": True},
            },
            {"type": "structural_tag", "format": {}},
        )
    ),
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": lambda rng: rng.choice((["a", "b"], ["\u20ac"], [""], [], ["x" * 500])),
    "guided_grammar": _grammar,
    "structured_outputs": lambda rng: {
        rng.choice(
            ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        ): rng.choice((_schema(rng), _regex(rng), ["a"], _grammar(rng), True))
    },
}


def _tool(rng: random.Random, i: int) -> dict[str, Any]:
    function: dict[str, Any] = {"name": f"tool_{i}"}
    if _flag(rng):
        function["parameters"] = _schema(rng)
    if _flag(rng):
        function["description"] = rng.choice(_WORDS)
    return {"type": "function", "function": function}
