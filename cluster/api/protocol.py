"""The fields of a completion and of a chat request: types, bounds, defaults.

Knows nothing of tokenizers or engines. Values arrive from `json_body`, so they are plain JSON.
Unknown fields are ignored, as other servers do; `unsupported` refuses known ones with an effect.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.api.messages import parse_messages
from cluster.api.unsupported import CHAT, COMPLETION, STREAM_OPTIONS, refuse_unsupported
from cluster.errors import BadRequestError

_INT32_MAX = 2**31 - 1
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Request = TypeVar("_Request", bound="GenerationRequest")


class GenerationRequest(BaseModel):
    """What both kinds of request share. None means the default everywhere."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="The served model; null = the one there is.")
    n: int | None = Field(None, ge=1, le=_INT32_MAX, description="Choices for each prompt.")
    max_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    temperature: _Number | None = Field(None, ge=0, le=2, description="0 = greedy.")
    top_p: _Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_INT32_MAX, description="0 or -1 = off.")
    min_p: _Number | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Any = Field(None, description="One stop string or a list of them.")
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage item."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    def stop_strings(self, max_number: int, max_chars: int) -> list[str]:
        """`stop` as a list."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if stops is None:
            return []
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise BadRequestError("stop must be a string or a list of strings", param="stop")
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


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Any = Field(None, description="string | [string] | [token id] | [[token id]]")
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """`prompt` as a list of texts and lists of token ids."""
        prompt = self.prompt
        if prompt is None:
            raise BadRequestError(
                "prompt is missing", param="prompt", code="missing_required_parameter"
            )
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(item, str) for item in prompt):
                return prompt
            if _are_token_ids(prompt):
                return [prompt]
            if all(isinstance(item, list) and _are_token_ids(item) for item in prompt):
                return prompt
        raise BadRequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of lists "
            "of token ids, and not an empty list",
            param="prompt",
        )


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Any = Field(None, description="[{role, content}]")
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32_MAX)
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, e.g. enable_thinking."
    )

    @property
    def output_limit(self) -> int | None:
        """max_completion_tokens, or its older name."""
        return self.max_completion_tokens or self.max_tokens

    def parsed_messages(self) -> list[dict[str, Any]]:
        """`messages`, checked, each content one string."""
        return parse_messages(self.messages)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check types and bounds of a completion request."""
    refuse_unsupported(body, COMPLETION)
    return _parse(CompletionRequest, body)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check types and bounds of a chat request."""
    refuse_unsupported(body, CHAT)
    return _parse(ChatRequest, body)


def check_text(text: str, param: str) -> None:
    """Refuse lone surrogates: JSON can write them, UTF-8 and tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"{param} holds a lone surrogate (half a character) at position {error.start}",
            param=param,
        ) from None


def _parse(model: type[_Request], body: dict[str, Any]) -> _Request:
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise _as_bad_request(error) from None
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise BadRequestError(
                "stream_options is only allowed with stream = true", param="stream_options"
            )
        if not isinstance(options.get("include_usage"), bool | None):
            raise BadRequestError(
                "stream_options.include_usage must be true or false",
                param="stream_options.include_usage",
            )
        refuse_unsupported(options, STREAM_OPTIONS, "stream_options.")
    return request


def _as_bad_request(error: ValidationError) -> BadRequestError:
    """All findings in one message, the first one as param."""
    findings = error.errors(include_url=False, include_context=False)
    paths = [".".join(str(part) for part in item["loc"]) for item in findings]
    texts = [
        f"{path}: {item['msg']}, got {_describe(item['input'])}"
        for path, item in zip(paths, findings, strict=True)
    ]
    return BadRequestError("; ".join(texts[:4]), param=paths[0])


def _describe(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float):
        return (
            str(value)[:40]
            if not isinstance(value, int) or abs(value) < 10**40
            else "a huge number"
        )
    return {"str": "a string", "list": "a list", "dict": "an object"}[type(value).__name__]


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)  # bool is an int to isinstance
