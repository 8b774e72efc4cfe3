"""Sampling parameters and stop rules of a checked request. Knows nothing of prompts or answers."""

from typing import Any

from cluster.api.answer.detokenizer import StopRules
from cluster.api.request.protocol import ChatRequest, CompletionRequest, check_text
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.errors import BadRequestError
from workers.wire.request import SamplingParams

_GREEDY_BELOW = 1e-5  # dividing float32 logits by less overflows; the limit is greedy anyway
_MAX_REPETITION_PENALTY = 1e6  # beyond, and below its inverse, float32 logits overflow


class SamplingBuilder:
    """Builds sampling parameters for one tokenizer, within the limits of one ingress."""

    def __init__(self, tokenizer: ServingTokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def params(
        self, request: CompletionRequest | ChatRequest, grammar: str | None = None
    ) -> SamplingParams:
        """Return the parameters of all choices, without max_tokens (here 1) and the seed."""
        bad_words_ids = self._bad_words_ids(request.bad_words)
        stop_ids = frozenset(request.stop_token_ids or ())
        self._tokenizer.check_token_ids(stop_ids, "stop_token_ids")
        if not request.ignore_eos:
            stop_ids |= self._tokenizer.eos_token_ids
        defaults = self._settings.default_sampling

        def value(name: str, neutral: float) -> float:
            given = getattr(request, name)
            return float(given if given is not None else defaults.get(name, neutral))

        temperature = value("temperature", 1.0)
        repetition = value("repetition_penalty", 1.0)
        logprobs = self._count(request.num_logprobs, _logprobs_param(request))
        min_tokens = request.min_tokens or 0
        allowed = self._allowed_token_ids(request.allowed_token_ids)
        if allowed is not None:
            _check_some_token_is_left(allowed, bad_words_ids, stop_ids if min_tokens else None)
        return SamplingParams(
            max_tokens=1,
            min_tokens=min_tokens,
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_p=value("top_p", 1.0),
            top_k=max(int(value("top_k", 0)), 0),
            min_p=value("min_p", 0.0),
            stop_token_ids=stop_ids,
            presence_penalty=value("presence_penalty", 0.0),
            frequency_penalty=value("frequency_penalty", 0.0),
            repetition_penalty=min(
                max(repetition, 1 / _MAX_REPETITION_PENALTY), _MAX_REPETITION_PENALTY
            ),
            logit_bias=self._logit_bias(request.logit_bias),
            allowed_token_ids=allowed,
            bad_words_ids=bad_words_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(request, logprobs),
            grammar=grammar,
        )

    def stop_rules(
        self, request: CompletionRequest | ChatRequest, params: SamplingParams
    ) -> StopRules:
        """Return the conditions that end the text of each choice."""
        return StopRules(
            strings=self._stop_strings(request.stop),
            token_ids=params.stop_token_ids,
            end_ids=frozenset() if request.ignore_eos else self._tokenizer.eos_token_ids,
            include=bool(request.include_stop_str_in_output),
            min_tokens=params.min_tokens,
        )

    def _prompt_logprobs(
        self, request: CompletionRequest | ChatRequest, logprobs: int | None
    ) -> int | None:
        """Return the number of prompt logprobs for the client, and for the logprobs of an echo."""
        asked = self._count(request.prompt_logprobs, "prompt_logprobs")
        if isinstance(request, CompletionRequest) and request.echo and logprobs is not None:
            return max(asked or 0, logprobs)
        return asked

    def _count(self, number: int | None, param: str) -> int | None:
        limit = self._settings.max_logprobs
        if number is not None and number > limit:
            raise BadRequestError(f"{param} = {number} is more than {limit}", param=param)
        return number

    def _logit_bias(self, bias: dict[str, Any] | None) -> tuple[tuple[int, float], ...]:
        if not bias:
            return ()
        limit = self._settings.max_logit_bias
        if len(bias) > limit:
            raise BadRequestError(
                f"logit_bias has {len(bias)} entries, at most {limit} are allowed",
                param="logit_bias",
            )
        by_id: dict[int, float] = {}
        for key, value in bias.items():
            # int() takes more than that: signs, spaces, underscores, other digits.
            if not (key.isascii() and key.isdecimal() and len(key) < 20):
                raise BadRequestError(
                    f"logit_bias: the key {key[:40]!r} is no token id", param="logit_bias"
                )
            if type(value) not in (int, float) or not -100 <= value <= 100:
                raise BadRequestError(
                    f"logit_bias.{key} must be a number from -100 to 100", param=f"logit_bias.{key}"
                )
            by_id[int(key)] = float(value)
        self._tokenizer.check_token_ids(by_id.keys(), "logit_bias")
        return tuple(by_id.items())

    def _allowed_token_ids(self, token_ids: list[int] | None) -> tuple[int, ...] | None:
        if token_ids is None:
            return None
        if not token_ids:
            raise BadRequestError(
                "allowed_token_ids must not be empty; leave it out to allow all tokens",
                param="allowed_token_ids",
            )
        unique = sorted(set(token_ids))
        limit = self._settings.max_allowed_token_ids
        if len(unique) > limit:
            raise BadRequestError(
                f"allowed_token_ids has {len(unique)} ids, at most {limit} are allowed",
                param="allowed_token_ids",
            )
        self._tokenizer.check_token_ids(unique, "allowed_token_ids")
        return tuple(unique)

    def _bad_words_ids(self, words: list[str] | None) -> tuple[tuple[int, ...], ...]:
        """Tokenise each word as it stands at the beginning of a text, and after a space."""
        if not words:
            return ()
        max_number, max_chars = self._settings.max_bad_words, self._settings.max_stop_chars
        if len(words) > max_number:
            raise BadRequestError(
                f"bad_words has {len(words)} words, at most {max_number} are allowed",
                param="bad_words",
            )
        for word in words:
            if not word.strip():
                raise BadRequestError("bad_words must not hold an empty word", param="bad_words")
            if len(word) > max_chars:
                raise BadRequestError(
                    f"bad_words has a word of {len(word)} characters, at most {max_chars} are allowed",
                    param="bad_words",
                )
            check_text(word, "bad_words")
        found = self._tokenise_words(words)
        for token_ids in found:
            self._tokenizer.check_token_ids(token_ids, "bad_words")
        return found

    def _tokenise_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = self._tokenizer.encode(word.lstrip(), add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
            found[tuple(bare)] = None
            if spaced[1:] != bare:  # else the space is a token of its own, and `bare` covers both
                found[tuple(spaced)] = None
        found.pop((), None)  # a word that the tokenizer normalises to nothing
        return tuple(found)

    def _stop_strings(self, stop: Any) -> list[str]:
        stops = [stop] if isinstance(stop, str) else stop
        if stops is None:
            return []
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise BadRequestError("stop must be a string or a list of strings", param="stop")
        max_number, max_chars = self._settings.max_stop_strings, self._settings.max_stop_chars
        if len(stops) > max_number:
            raise BadRequestError(
                f"stop has {len(stops)} strings, at most {max_number} are allowed", param="stop"
            )
        for stop in stops:
            if not stop:
                raise BadRequestError("stop must not hold an empty string", param="stop")
            if len(stop) > max_chars:
                raise BadRequestError(
                    f"stop has a string of {len(stop)} characters, at most {max_chars} are allowed",
                    param="stop",
                )
            check_text(stop, "stop")
        return list(dict.fromkeys(stops))


def _check_some_token_is_left(
    allowed: tuple[int, ...],
    bad_words_ids: tuple[tuple[int, ...], ...],
    barred_ids: frozenset[int] | None,
) -> None:
    """Refuse allowed tokens that are all forbidden: as bad words of one token, or as stop tokens before min_tokens."""
    barred = {word[0] for word in bad_words_ids if len(word) == 1} | (barred_ids or set())
    if barred.issuperset(allowed):
        raise BadRequestError(
            "allowed_token_ids leaves no token: bad_words and min_tokens forbid all of them",
            param="allowed_token_ids",
        )


def _logprobs_param(request: CompletionRequest | ChatRequest) -> str:
    return "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
