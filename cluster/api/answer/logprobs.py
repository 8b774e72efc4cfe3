"""Formats logprobs and token ids in the shapes of the API. Knows nothing of open requests.

A token that is not whole UTF-8, such as a part of a character, is written as escaped bytes, so that two different
tokens never have one name.
"""

from dataclasses import dataclass
from typing import Any

from cluster.api.answer.detokenizer import Decoder, DecoderFactory
from workers.wire.request import RequestOutput, TokenLogprobs

_FLOOR = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The token fields of an answer.

    logprobs, prompt_logprobs   alternatives for each output or prompt token; None = no logprobs
    token_ids         whether prompt and output are shown as ids too
    tokens_as_ids     whether tokens of logprobs are written as token_id:N
    """

    is_chat: bool
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    tokens_as_ids: bool

    @property
    def anything(self) -> bool:
        """Whether the answer has token fields."""
        return self.token_ids or self.logprobs is not None or self.prompt_logprobs is not None


class TokenReport:
    """The tokens of one choice: `add` takes outputs of the engine, `take` returns the fields of an item.

    echo: the prompt begins the text, so its tokens come first.
    """

    def __init__(
        self, shown: Shown, decoders: DecoderFactory, prompt_token_ids: list[int], echo: str
    ) -> None:
        self._shown = shown
        self._token_bytes = decoders.token_bytes
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._offsets: _Offsets | None = None
        self._echo_offsets: list[int] = []
        self._echoes = bool(echo) and not shown.is_chat
        self._at_start = True
        if shown.logprobs is not None and not shown.is_chat:
            self._offsets = _Offsets(decoders.new(prompt_token_ids), len(echo))
            if self._echoes:
                self._echo_offsets = _echo_offsets(decoders, prompt_token_ids, echo)

    def add(self, output: RequestOutput, num_kept: int) -> None:
        """Take the tokens of one step; only the first `num_kept`, because tokens after a stop string are dropped."""
        self._token_ids += output.token_ids[:num_kept]
        if self._shown.logprobs is not None:
            self._logprobs += (output.logprobs or [])[:num_kept]
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs

    def take(self) -> dict[str, Any]:
        """Return the fields for the tokens since the last `take`."""
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, []
        fields: dict[str, Any] = {"logprobs": self._format(token_ids, logprobs)}
        if self._shown.token_ids:
            fields["token_ids"] = token_ids
        self._at_start = False
        return fields

    def prompt(self) -> dict[str, Any]:
        """Return the fields of the prompt."""
        fields: dict[str, Any] = {}
        if self._shown.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._format_prompt(self._shown.prompt_logprobs)
        if self._shown.token_ids:
            fields["prompt_token_ids"] = self._prompt_token_ids
        return fields

    def _format(
        self, token_ids: list[int], logprobs: list[TokenLogprobs | None]
    ) -> dict[str, Any] | None:
        number = self._shown.logprobs
        if number is None:
            return None
        pairs = list(zip(token_ids, logprobs, strict=True))
        if self._offsets is None:
            return {"content": [self._chat_item(i, item, number) for i, item in pairs if item]}
        offsets = self._offsets.of(token_ids)
        if self._at_start and self._echoes:
            prompt_logprobs = self._prompt_logprobs or [None] * len(self._prompt_token_ids)
            pairs = [*zip(self._prompt_token_ids, prompt_logprobs, strict=True), *pairs]
            offsets = self._echo_offsets + offsets
        return {
            "tokens": [self._name(i) for i, _ in pairs],
            "token_logprobs": [item and finite(item.logprob) for _, item in pairs],
            "top_logprobs": [item and self._top(i, item, number) for i, item in pairs],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, item: TokenLogprobs, number: int) -> dict[str, float]:
        """Return the most probable tokens in falling order, and the drawn token."""
        alternatives = dict(zip(item.top_ids[:number], item.top_logprobs, strict=False))
        alternatives.setdefault(token_id, item.logprob)
        return {self._name(i): finite(logprob) for i, logprob in alternatives.items()}

    def _name(self, token_id: int) -> str:
        """Return the name of a token in a completion."""
        if self._shown.tokens_as_ids:
            return f"token_id:{token_id}"
        value = self._token_bytes[token_id]
        try:
            return value.decode()
        except UnicodeDecodeError:
            return f"bytes:{escaped(value)}"

    def _chat_item(self, token_id: int, item: TokenLogprobs, number: int) -> dict[str, Any]:
        top = zip(item.top_ids[:number], item.top_logprobs, strict=False)
        return {
            **self._chat_token(token_id, item.logprob),
            "top_logprobs": [self._chat_token(i, logprob) for i, logprob in top],
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        value = self._token_bytes[token_id]
        if self._shown.tokens_as_ids:
            name = f"token_id:{token_id}"
        else:
            try:
                name = value.decode()
            except UnicodeDecodeError:
                name = escaped(value)
        return {"token": name, "logprob": finite(logprob), "bytes": list(value)}

    def _format_prompt(self, number: int) -> list[dict[str, Any] | None]:
        """Return the logprobs of each prompt token and of its alternatives."""
        items = self._prompt_logprobs or []
        return [
            item and self._prompt_item(token_id, item, number)
            for token_id, item in zip(self._prompt_token_ids, items, strict=True)
        ]

    def _prompt_item(self, token_id: int, item: TokenLogprobs, number: int) -> dict[str, Any]:
        best = enumerate(zip(item.top_ids[:number], item.top_logprobs, strict=False), start=1)
        ranked = {token_id: (item.logprob, item.rank)}
        ranked |= {i: (logprob, rank) for rank, (i, logprob) in best if i != token_id}
        return {
            str(i): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self._token_bytes[i].decode(errors="replace"),
            }
            for i, (logprob, rank) in ranked.items()
        }


class _Offsets:
    """Computes the offset of each token in the text; a token inside a character has the offset of the character."""

    def __init__(self, decoder: Decoder, start: int) -> None:
        self._decoder = decoder
        self._position = start

    def of(self, token_ids: list[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            self._position += len(self._decoder.push([token_id]))
        return offsets


def _echo_offsets(decoders: DecoderFactory, prompt_token_ids: list[int], echo: str) -> list[int]:
    """Return the offsets of the prompt's tokens in its text.

    The text has the special tokens that the client wrote, but no special token that the tokenizer added.
    """
    for skip in (False, True):
        offsets = _Offsets(decoders.new([], skip_special_tokens=skip), 0).of(prompt_token_ids)
        if offsets[-1] <= len(echo):
            return offsets
    return [min(offset, len(echo)) for offset in offsets]


def finite(logprob: float) -> float:
    """Replace -inf and NaN, which JSON cannot hold, by the floor."""
    return logprob if logprob > _FLOOR else _FLOOR


def escaped(value: bytes) -> str:
    r"""Escape all bytes as \xe2\x82, letters too."""
    return "".join(f"\\x{byte:02x}" for byte in value)
