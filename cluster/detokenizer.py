"""From token ids to text, one step at a time. Knows nothing of HTTP, ranks or where ids come from.

`TextStream` is one choice's text: ids in, printable text out, cut at a stop string. Two decoders
below it give the text of ids without ever showing half a character: `ByteDecoder` for byte-level
tokenizers, `GenericDecoder` for all others. A random or confused model emits bytes that are no
UTF-8; the library's DecodeStream keeps those back and decodes them all again at each step (185 us
a token after 2,400 of them, against 0.4 us), so byte-level ids go through a table instead.
"""

import codecs
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from workers.request import RequestOutput

REPLACEMENT = "\ufffd"
_MAX_PENDING = 16  # tokens without text before GenericDecoder gives up on completing a character
_CONTEXT_TOKENS = 8  # of the prompt, so that the first token keeps its leading space


class Decoder(Protocol):
    """Ids of one sequence to text. Text never ends inside a character, but for flush()."""

    def push(self, token_ids: list[int]) -> str:
        """The text that these ids complete."""
        ...

    def flush(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""
        ...


class DecoderFactory:
    """Makes decoders of one tokenizer. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes = (
            TokenBytes(tokenizer, self._special_ids)
            if isinstance(tokenizer.decoder, ByteLevel)
            else None
        )

    def new(self, prompt_token_ids: list[int]) -> Decoder:
        """A decoder of what follows this prompt."""
        if self._token_bytes is not None:
            return ByteDecoder(self._token_bytes)
        return GenericDecoder(self._tokenizer, self._special_ids, prompt_token_ids)


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
    """The bytes of each token id of a byte-level tokenizer, filled as ids come up."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special_ids, b""))
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


class ByteDecoder:
    """Bytes by table, then incremental UTF-8: exact and of constant cost per token."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: list[int]) -> str:
        """See Decoder."""
        token_bytes = self._token_bytes
        if len(token_ids) == 1:
            return self._decode(token_bytes[token_ids[0]])
        return self._decode(b"".join([token_bytes[i] for i in token_ids]))

    def flush(self) -> str:
        """See Decoder."""
        return self._decode(b"", True)


class GenericDecoder:
    """The library's DecodeStream, bounded: it never holds more than _MAX_PENDING tokens."""

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], prompt_token_ids: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._pending: list[int] = []
        context = prompt_token_ids[-_CONTEXT_TOKENS:]
        # A context that ends inside a character would come out again with the first text.
        if tokenizer.decode(context, skip_special_tokens=True).endswith(REPLACEMENT):
            context = []
        self._stream = DecodeStream(ids=context, skip_special_tokens=True)

    def push(self, token_ids: list[int]) -> str:
        """See Decoder."""
        return "".join([self._push_one(i) for i in token_ids if i not in self._special_ids])

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
        self._stream = DecodeStream(skip_special_tokens=True)
        return text

    def flush(self) -> str:
        """See Decoder."""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        return text


class StopMatcher:
    """Finds the stop string that completes first and holds back text that may become one.

    Runs one Knuth-Morris-Pratt automaton per stop string, so where the text is cut does not depend
    on how it is split into pieces, and the cost per character is constant. Of two stop strings
    that end on the same character the longer one counts.
    """

    def __init__(self, stops: list[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._states = [0] * len(stops)  # how many characters of each stop string are matched
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown. After a match: the rest before it, then nothing."""
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
                        if self.matched is None or len(stop) > len(self.matched):
                            self.matched = stop
                        state = failure[state - 1]
                states[i] = state
            if self.matched is not None:
                self._held = ""
                return held[: position - len(self.matched)]
        keep = len(held) - max(states)
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


class TextStream:
    """The text of one choice. finish_reason is None until its last token or stop string is seen."""

    def __init__(self, decoder: Decoder, stops: list[str], stop_token_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops) if stops else None
        self._stop_token_ids = stop_token_ids
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> str:
        """Take one step's tokens; return the text to show."""
        token_ids = output.token_ids
        finish = output.finish_reason
        if self._matcher is None:
            self.num_tokens += len(token_ids)
            if finish is None:
                return self._decoder.push(token_ids)
            self.finish_reason = finish
            return self._decoder.push(self._shown(token_ids, finish)) + self._decoder.flush()
        text = ""
        shown = self._shown(token_ids, finish)
        for token_id in shown:  # one by one: tokens after a stop string are not counted
            self.num_tokens += 1
            text += self._matcher.push(self._decoder.push([token_id]))
            if self._matcher.matched is not None:
                self.finish_reason = "stop"
                return text
        if finish is None:
            return text
        self.num_tokens += len(token_ids) - len(shown)
        self.finish_reason = finish
        text += self._matcher.push(self._decoder.flush())
        if self._matcher.matched is not None:
            self.finish_reason = "stop"
        return text + self._matcher.flush()

    def _shown(self, token_ids: list[int], finish: str | None) -> list[int]:
        """Without the stop token, which has no text."""
        if finish == "stop" and token_ids and token_ids[-1] in self._stop_token_ids:
            return token_ids[:-1]
        return token_ids
