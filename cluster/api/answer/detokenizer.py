"""From token ids to text, one step at a time. Knows nothing of HTTP, ranks or where ids come from.

`TextStream` is one choice's text: ids in, printable text out, cut at a stop string. Two decoders
below it give the text of ids without ever showing half a character: `ByteDecoder` for byte-level
tokenizers, `GenericDecoder` for all others. A random or confused model emits bytes that are no
UTF-8; the library's DecodeStream keeps those back and decodes them all again at each step (185 us
a token after 2,400 of them, against 0.4 us), so byte-level ids go through a table instead.
"""

import codecs
import re
from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from workers.wire.request import RequestOutput

REPLACEMENT = "\ufffd"
_MAX_PENDING = 16  # tokens without text before GenericDecoder gives up on completing a character
_CONTEXT_TOKENS = 8  # of the prompt, so that the first token keeps its leading space
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Decoder(Protocol):
    """Ids of one sequence to text. Text never ends inside a character, but for flush()."""

    def push(self, token_ids: list[int]) -> str:
        """The text that these ids complete."""
        ...

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""
        ...


class DecoderFactory:
    """Makes decoders of one tokenizer, and knows what each token looks like on its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = isinstance(tokenizer.decoder, ByteLevel)
        table = TokenBytes if self._byte_level else PieceBytes
        self.token_bytes: dict[int, bytes] = table(tokenizer)
        """The bytes of each token by itself, special tokens included; half a character is no rarity."""
        plain_bytes = TokenBytes(tokenizer, hidden=self._special_ids)
        self._all_texts, self._plain_texts = TokenTexts(self.token_bytes), TokenTexts(plain_bytes)

    def new(self, prompt_token_ids: list[int], *, skip_special_tokens: bool = True) -> Decoder:
        """A decoder of what follows this prompt."""
        if self._byte_level:
            return ByteDecoder(self._plain_texts if skip_special_tokens else self._all_texts)
        hidden = self._special_ids if skip_special_tokens else frozenset()
        return GenericDecoder(self._tokenizer, hidden, prompt_token_ids)


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies.

    Printable ones stand for themselves, the others are U+0100 upwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id of a byte-level tokenizer, filled as ids come up. Hidden ones have none."""

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
    """The text of each token id whose bytes are whole characters, filled as ids come up; None for other ids."""

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
    """The same for all other tokenizers, whose decoders look at a token's neighbours.

    A token is decoded behind an anchor, a common one, so that it keeps its leading space.
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
    """Bytes by table, then incremental UTF-8: exact and of constant cost per token."""

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
    """The library's DecodeStream, bounded: it never holds more than _MAX_PENDING tokens."""

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
    """Finds the stop string that completes first and holds back text that may become one.

    Runs one Knuth-Morris-Pratt automaton per stop string, so where the text is cut does not depend
    on how it is split into pieces, and the cost per character is constant. Of two stop strings
    that end on the same character the longer one counts.

    include: the stop string itself is shown, so nothing is held back.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(stops)  # how many characters of each stop string are matched
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown. After a match: the rest before it, then nothing.

        armed: whether a stop string that completes here counts; its beginning may be older.
        """
        if self.matched is not None:
            return ""
        states, stops = self._states, self._stops
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            for i, (stop, failure) in enumerate(stops):
                state = states[i]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                    if state == len(stop):
                        if armed and (self.matched is None or len(stop) > len(self.matched)):
                            self.matched = stop
                        state = failure[state - 1]
                states[i] = state
            if self.matched is not None:
                self._held = ""
                return held[: position if self._include else position - len(self.matched)]
        keep = len(held) - (0 if self._include else max(states))
        self._held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _failure_table(stop: str) -> list[int]:
    """[i]: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table


@dataclass(frozen=True, kw_only=True)
class StopRules:
    """What ends a text, one for all choices of a request.

    token_ids   the rank ends the request with one of these
    end_ids     those of them that are the model's own end, no stop the client asked for
    include     whether a stop string, and the text of a stop token, is shown
    min_tokens  a stop string that completes within so many tokens does not count
    """

    strings: list[str] = field(default_factory=list)
    token_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    include: bool = False
    min_tokens: int = 0


class TextStream:
    """The text of one choice. finish_reason is None until its last token or stop string is seen.

    stop_reason is then the stop string, or the token that the client named, that ended it.
    """

    def __init__(self, decoder: Decoder, stop: StopRules) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stop.strings, include=stop.include) if stop.strings else None
        self._stop = stop
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

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
        for token_id in shown:  # one by one: tokens after a stop string are not counted
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
        """Note how it ended; the last tokens without the stop token, which has no text."""
        self.finish_reason = finish
        if finish != "stop" or not token_ids or token_ids[-1] not in self._stop.token_ids:
            return token_ids
        if token_ids[-1] not in self._stop.end_ids:
            self.stop_reason = token_ids[-1]
        return token_ids if self._stop.include else token_ids[:-1]


class NoText:
    """In a TextStream's place for a client that wants nothing but its prompt back."""

    num_tokens = 0
    stop_reason: str | int | None = None

    def __init__(self) -> None:
        self.finish_reason: str | None = None

    def push(self, _output: RequestOutput) -> str:
        """Drops the token that a request cannot but generate."""
        self.finish_reason = "length"
        return ""
