"""Decodes token ids to text, one step at a time. Knows nothing of HTTP or ranks.

`TextStream` is the text of one choice: it takes ids and returns printable text, cut at a stop string. Two decoders
return text that never ends inside a character: `ByteDecoder` for byte-level tokenizers, `GenericDecoder` for all other
tokenizers. Byte-level ids go through a table, because the library's DecodeStream holds invalid UTF-8 back and decodes
all of it again at each step: 185 us a token after 2,400 invalid bytes, against 0.4 us.
"""

import codecs
import re
from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from cluster.api.tools.base import possible_start
from workers.wire.request import RequestOutput

REPLACEMENT = "\ufffd"
_MAX_PENDING = 16  # tokens without text before GenericDecoder gives up on completing a character
_CONTEXT_TOKENS = 8  # of the prompt, so that the first token keeps its leading space
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Decoder(Protocol):
    """Decodes the ids of one sequence. Text never ends inside a character, except at flush()."""

    def push(self, token_ids: list[int]) -> str:
        """Return the text that `token_ids` complete."""
        ...

    def flush(self) -> str:
        """Return the text that was held back, with incomplete characters as U+FFFD."""
        ...


class DecoderFactory:
    """Makes decoders of one tokenizer, and owns the tables of its tokens' bytes and texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = isinstance(tokenizer.decoder, ByteLevel)
        table = TokenBytes if self._byte_level else PieceBytes
        self.token_bytes: dict[int, bytes] = table(tokenizer)
        """The bytes of each token by itself, special tokens included; often a part of a character."""
        plain_bytes = TokenBytes(tokenizer, hidden=self._special_ids)
        self._all_texts, self._plain_texts = TokenTexts(self.token_bytes), TokenTexts(plain_bytes)

    def new(self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True) -> Decoder:
        """Return a decoder for the output that follows this prompt."""
        if self._byte_level:
            return ByteDecoder(self._plain_texts if skip_special_tokens else self._all_texts)
        hidden = self._special_ids if skip_special_tokens else frozenset()
        return GenericDecoder(self._tokenizer, hidden, prompt_token_ids)


def byte_alphabet() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies.

    A printable byte is its own character; all other bytes are U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id of a byte-level tokenizer, filled on first use. Hidden ids have no bytes."""

    def __init__(self, tokenizer: Tokenizer, *, hidden: frozenset[int] = frozenset()) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # an embedding row beyond the tokenizer
            value = b""
        else:
            try:
                value = bytes([self._alphabet[char] for char in token])
            except KeyError:  # an added token, written as plain text
                value = token.encode()
        self[token_id] = value
        return value


class TokenTexts(dict[int, str | None]):
    """The text of each token id with whole characters, filled on first use; None for all other ids."""

    def __init__(self, token_bytes: dict[int, bytes]) -> None:
        super().__init__()
        self.token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self.token_bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class PieceBytes(dict[int, bytes]):
    """The bytes of each token id of all other tokenizers; their decoders read the neighbours of a token.

    A token is decoded behind a common token, the anchor, so that it keeps its leading space.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        for char in "ae.":
            ids = tokenizer.encode(char, add_special_tokens=False).ids
            if tokenizer.decode(ids).endswith(char):
                self._anchor = ids
                break
        self._anchor_text = tokenizer.decode(self._anchor)

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        byte = _BYTE_PIECE.fullmatch(token or "")
        if token is None:
            value = b""
        elif byte:
            value = bytes([int(byte[1], 16)])
        else:
            both = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
            value = both.removeprefix(self._anchor_text).encode()
        self[token_id] = value
        return value


class ByteDecoder:
    """Decodes by table, and incrementally inside a character: exact and of constant cost per token."""

    def __init__(self, token_texts: TokenTexts) -> None:
        self._token_texts = token_texts
        self._token_bytes = token_texts.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside_character = False

    def push(self, token_ids: list[int]) -> str:
        """See Decoder."""
        if len(token_ids) == 1 and not self._inside_character:
            text = self._token_texts[token_ids[0]]
            if text is not None:
                return text
        token_bytes = self._token_bytes
        text = self._decoder.decode(b"".join([token_bytes[i] for i in token_ids]))
        self._inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """See Decoder."""
        self._inside_character = False
        return self._decoder.decode(b"", True)


class GenericDecoder:
    """Decodes with the library's DecodeStream, which is restarted when it holds _MAX_PENDING tokens back."""

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int], prompt_token_ids: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._skip_special = bool(hidden)
        self._pending: list[int] = []
        context = prompt_token_ids[-_CONTEXT_TOKENS:]
        # A context that ends inside a character would come out again with the first text.
        if tokenizer.decode(context, skip_special_tokens=True).endswith(REPLACEMENT):
            context = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=self._skip_special)

    def push(self, token_ids: list[int]) -> str:
        """See Decoder."""
        return "".join([self._push_one(i) for i in token_ids if i not in self._hidden])

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library's own bare Exception: later ids changed earlier text
            return self._restart()
        if text is not None:
            self._pending.clear()
            return text
        return self._restart() if len(self._pending) >= _MAX_PENDING else ""

    def _restart(self) -> str:
        text = self.flush()
        self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        return text

    def flush(self) -> str:
        """See Decoder."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special)
        self._pending.clear()
        return text


class StopMatcher:
    """Finds the stop string that completes first, and holds back text that may be the beginning of one.

    Where the text is cut does not depend on how it is split into pieces. Of two stop strings that end on the same
    character the longer one counts.

    include: the text includes the stop string, so no text is held back.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops, self._firsts = stops, {stop[0] for stop in stops}
        self._include = include
        self._tail = ""  # may be the beginning of a stop string
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Return the text that can be shown: at a match the text before it, after a match nothing.

        armed: whether a stop string that completes in `text` counts; its beginning may be in earlier text.
        """
        if self.matched is not None:
            return ""
        if not self._tail and self._firsts.isdisjoint(text):
            return text
        old, text = len(self._tail), self._tail + text
        shown = old if self._include else 0
        if armed:
            found = ((text.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stops)
            ends = [(at + len(stop), -len(stop), stop) for at, stop in found if at >= 0]
            if ends:
                end, _, self.matched = min(ends)
                self._tail = ""
                return text[shown : end if self._include else end - len(self.matched)]
        end = len(text) - max(possible_start(text, stop) for stop in self._stops)
        self._tail = text[end:]
        return text[shown : None if self._include else end]

    def flush(self) -> str:
        """Return the text that was held back. Called after the last `push`."""
        held, self._tail = self._tail, ""
        return "" if self._include else held


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """The conditions that end the text of each choice of a request.

    token_ids   tokens at which the rank ends the request
    end_ids     the end tokens of the model among `token_ids`; the client did not name them
    include     whether the text includes the stop string, or the text of the stop token
    min_tokens  a stop string that completes within the first min_tokens tokens does not count
    """

    strings: list[str] = field(default_factory=list)
    token_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    include: bool = False
    min_tokens: int = 0


class TextStream:
    """The text of one choice. finish_reason is None until the last token or a stop string has come.

    stop_reason is then the stop string that ended the text, or the stop token of the client.
    """

    def __init__(self, decoder: Decoder, stop: StopRules) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop.strings, include=stop.include) if stop.strings else None
        self._stop = stop
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def may_end_early(self) -> bool:
        """Whether a stop string may end the text before its rank ends the request."""
        return self._matcher is not None

    def push(self, output: RequestOutput) -> str:
        """Take one step's tokens; return the text to show."""
        token_ids = output.token_ids
        finish = output.finish_reason
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            if finish is None:
                return self._decoder.push(token_ids)
            shown = self._end(token_ids, finish)
            return self._decoder.push(shown) + self._decoder.flush()
        return self._push_matching(self._matcher, token_ids, finish)

    def _push_matching(self, matcher: StopMatcher, token_ids: list[int], finish: str | None) -> str:
        text = ""
        shown = token_ids if finish is None else self._end(token_ids, finish)
        for token_id in shown:  # one by one, because tokens after a stop string are not counted
            self.num_tokens += 1
            armed = self.num_tokens > self._stop.min_tokens
            text += matcher.push(self._decoder.push([token_id]), armed=armed)
            if matcher.matched is not None:
                self._matched(matcher.matched)
                return text
        if finish is None:
            return text
        self.num_tokens += len(token_ids) - len(shown)
        armed = self.num_tokens > self._stop.min_tokens
        text += matcher.push(self._decoder.flush(), armed=armed)
        if matcher.matched is not None:
            self._matched(matcher.matched)
        return text + matcher.flush()

    def _matched(self, stop: str) -> None:
        self.finish_reason = "stop"
        self.stop_reason = stop

    def _end(self, token_ids: list[int], finish: str) -> list[int]:
        """Record the finish reason; return the last tokens without the stop token, which has no text."""
        self.finish_reason = finish
        if finish != "stop" or not token_ids or token_ids[-1] not in self._stop.token_ids:
            return token_ids
        if token_ids[-1] not in self._stop.end_ids:
            self.stop_reason = token_ids[-1]
        return token_ids if self._stop.include else token_ids[:-1]


class NoText:
    """Replaces TextStream for a request of its echo alone."""

    num_tokens = 0
    stop_reason: str | int | None = None
    may_end_early = False

    def __init__(self) -> None:
        self.finish_reason: str | None = None

    def push(self, _output: RequestOutput) -> str:
        """Drop the one token that every request generates."""
        self.finish_reason = "length"
        return ""
