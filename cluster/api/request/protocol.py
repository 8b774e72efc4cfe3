"""The fields of completion and chat requests: types, bounds, defaults. Knows nothing of tokenizers or engines.

Values are plain JSON from `json_body`. Unknown fields are ignored, as in other servers; `unsupported` refuses known
fields that would change the output.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cluster.api.request.field_schemas import MESSAGES, PROMPT, STOP, TOOL_CHOICE, TOOLS
from cluster.api.request.messages import parse_messages
from cluster.api.request.unsupported import CHAT, COMPLETION, refuse_unsupported
from cluster.errors import BadRequestError, UnsupportedParameterError

INT32_MAX = 2**31 - 1
_Number = Annotated[float, Field(allow_inf_nan=False)]
# Some clients send false for none.
_Count = Annotated[
    Annotated[int, Field(ge=0)] | None,
    BeforeValidator(lambda value: None if value is False else value),
]
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Fields of requests of every kind.
Priority = Annotated[
    int | None, Field(ge=-INT32_MAX, le=INT32_MAX, description="Smaller ones run first.")
]
CacheSalt = Annotated[
    str | None, Field(min_length=1, description="Prefixes are shared among equal ones only.")
]
RequestId = Annotated[
    str | None,
    Field(pattern=r"^[\x21-\x7e]{1,200}$", description="Becomes part of the answer's id."),
]
User = Annotated[Any, Field(description="Accepted and ignored.")]
Session = Annotated[
    Any,
    Field(description="A string names the session; prompt_cache_key counts before user."),
]
_Request = TypeVar("_Request", bound="GenerationRequest")


def needs(name: str) -> Callable[[dict[str, Any]], None]:
    """Mark a field as required in the OpenAPI document."""

    def change(schema: dict[str, Any]) -> None:
        schema["required"] = [name]
        del schema["properties"][name]["default"]

    return change


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(None, description="End with a usage item.")
    continuous_usage_stats: bool | None = Field(None, description="Usage in every item.")


class GenerationRequest(BaseModel):
    """The fields of both kinds of request. None means the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="The served model; may be left out.")
    n: int | None = Field(None, ge=1, le=INT32_MAX, description="Choices for each prompt.")
    best_of: int | None = Field(None, description="Accepted when it equals n.")
    min_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="The output does not end before; <= max_tokens."
    )
    temperature: _Number | None = Field(None, ge=0, le=2, description="0 = greedy.")
    top_p: _Number | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX, description="0 or -1 = off.")
    min_p: _Number | None = Field(None, ge=0, le=1)
    presence_penalty: _Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: _Number | None = Field(None, ge=-2, le=2)
    repetition_penalty: _Number | None = Field(None, gt=0, description="1 = off.")
    logit_bias: dict[str, Any] | None = Field(None, description="Token id -> -100 to 100.")
    allowed_token_ids: list[int] | None = Field(
        None, fail_fast=True, description="The only tokens that may be drawn; not empty."
    )
    bad_words: list[str] | None = Field(
        None, fail_fast=True, description="Words that the output does not contain."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Any = Field(
        None, description="One stop string or a list of them.", json_schema_extra=STOP
    )
    stop_token_ids: list[int] | None = Field(None, fail_fast=True)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="false = show them in the text.")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Number of tokens to keep, from the end; -1 = all that fit.",
    )
    prompt_logprobs: _Count = Field(None, description="Alternatives; not with stream.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens of logprobs as token_id:N."
    )
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    prompt_cache_key: Session = None
    user: Session = None
    response_format: dict[str, Any] | None = Field(
        None, description="{type: text | json_object | json_schema, json_schema: {schema}}"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar, json_object; whitespace_pattern."
    )
    guided_json: Any = Field(None, description="A JSON schema that the output matches.")
    guided_regex: Any = Field(None, description="A pattern that the whole output matches.")
    guided_choice: Any = Field(None, description="[string]: the output is one of them.")
    guided_grammar: Any = Field(None, description="A grammar in Lark or GBNF.")
    guided_whitespace_pattern: Any = Field(None, description="White space between JSON's parts.")

    @property
    def session(self) -> str:
        """The name of the session in the body; "" without one."""
        named = (self.prompt_cache_key, self.user)
        return next((name for name in named if isinstance(name, str) and name), "")

    @property
    def asks_for_structure(self) -> bool:
        """Whether a field above may constrain the output."""
        return not (
            self.response_format is None
            and self.structured_outputs is None
            and self.guided_json is None
            and self.guided_regex is None
            and self.guided_choice is None
            and self.guided_grammar is None
        )

    @property
    def num_choices(self) -> int:
        """The number of sequences to generate. Errors of the prompt are found later."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage item."""
        options = self.stream_options
        if options is None:
            return False
        if options.include_usage is None:
            return bool(options.continuous_usage_stats)
        return options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every item of a stream has the token counts so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra=needs("prompt"))

    prompt: Any = Field(
        None,
        description="string | [string] | [token id] | [[token id]]",
        json_schema_extra=PROMPT,
    )
    max_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="0 only with echo: nothing but the prompt."
    )
    echo: bool | None = Field(None, description="Begin with the prompt.")
    logprobs: _Count = Field(None, description="Alternatives for each token.")

    @property
    def output_limit(self) -> int | None:
        """max_tokens; None if it is not given, or 0."""
        return self.max_tokens or None

    @property
    def only_echo(self) -> bool:
        """Whether the answer is the echo alone, without a new token."""
        return self.max_tokens == 0

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each output token; None = no logprobs."""
        return self.logprobs

    @property
    def num_choices(self) -> int:
        """See GenerationRequest: n choices for each prompt."""
        prompt = self.prompt
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        return (len(prompt) if several else 1) * (self.n or 1)

    def prompts(self) -> list[str | list[int]]:
        """Return `prompt` as a list of texts or of lists of token ids."""
        return parse_prompts(self.prompt, "prompt")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra=needs("messages"))

    messages: Any = Field(None, description="[{role, content}]", json_schema_extra=MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, description="Alternatives; needs logprobs.")
    echo: bool | None = Field(None, description="Begin with the last message if the assistant's.")
    documents: list[dict[str, Any]] | None = Field(
        None, fail_fast=True, description="For the chat template: [{title, text}]"
    )
    tools: Any = Field(
        None,
        description="[{type: function, function: {name, parameters}}]",
        json_schema_extra=TOOLS,
    )
    tool_choice: Any = Field(
        None,
        description="none | auto | required | {type: function, function: {name}}",
        json_schema_extra=TOOL_CHOICE,
    )
    parallel_tool_calls: bool | None = Field(None, description="false = at most one call.")
    include_reasoning: bool | None = Field(None, description="false = thoughts are left out.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template; they win over reasoning_effort."
    )
    enable_thinking: bool | None = Field(None, description="false = no thought before the answer.")
    reasoning_effort: _Effort | None = Field(
        None, description="For the chat template; none = enable_thinking false, all others = true."
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None,
        description="Limits of images in pixels, {min_pixels, max_pixels}; of videos: {fps} or {num_frames}.",
    )
    prediction: Any = Field(
        None, description="Text that the answer may repeat: {type: content, content}."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn; by default unless the final one goes on."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message instead of answering it."
    )

    only_echo: ClassVar[bool] = False

    @property
    def output_limit(self) -> int | None:
        """max_completion_tokens, or its older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives for each output token; None = no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables for the chat template; those in `chat_template_kwargs` win."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            variables["enable_thinking"] = self.reasoning_effort != "none"
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        return variables | (self.chat_template_kwargs or {})

    def parsed_messages(self) -> list[dict[str, Any]]:
        """Return the checked `messages`, see `parse_messages`."""
        return parse_messages(self.messages)


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check types and bounds of a completion request."""
    refuse_unsupported(body, COMPLETION)
    return _parse(CompletionRequest, body)


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check types and bounds of a chat request."""
    refuse_unsupported(body, CHAT)
    return _parse(ChatRequest, body)


def parse_prompts(value: Any, param: str) -> list[str | list[int]]:
    """Return the value of the field `param` as a list of texts or of lists of token ids."""
    if value is None:
        raise BadRequestError(f"{param} is missing", param=param, code="missing_required_parameter")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _are_token_ids(value):
            return [value]
        if all(isinstance(item, list) and _are_token_ids(item) for item in value):
            return value
    raise BadRequestError(
        f"{param} must be a string, a list of strings, a list of token ids, or a list of lists "
        "of token ids, and not an empty list",
        param=param,
    )


def check_text(text: str, param: str) -> None:
    """Refuse lone surrogates, which JSON can write, but UTF-8 and tokenizers cannot."""
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
        raise as_bad_request(error) from None
    for problem in _conflicts(request):
        raise problem
    return request


def _conflicts(request: GenerationRequest) -> Iterator[BadRequestError]:
    """Yield errors of fields that conflict with other fields, under the field to change."""
    if request.stream_options is not None and not request.stream:
        yield _bad("stream_options", "stream_options is only allowed with stream = true")
    if request.prompt_logprobs is not None and request.stream:
        yield _bad("prompt_logprobs", "prompt_logprobs is not available with stream = true")
    if request.best_of is not None and request.best_of != (request.n or 1):
        yield UnsupportedParameterError(
            f"best_of = {request.best_of} is not supported; only best_of = n is", param="best_of"
        )
    if request.truncate_prompt_tokens == 0:
        yield _bad("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1")
    if isinstance(request, CompletionRequest) and request.only_echo and not request.echo:
        yield _bad("max_tokens", "max_tokens must be at least 1; 0 is only allowed with echo")
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            yield _bad("top_logprobs", "top_logprobs needs logprobs = true")
        thinking = (request.chat_template_kwargs or {}).get("enable_thinking")
        if None not in (thinking, request.enable_thinking) and thinking != request.enable_thinking:
            yield _bad("enable_thinking", "enable_thinking and chat_template_kwargs disagree")
        if request.continue_final_message and request.add_generation_prompt:
            yield _bad(
                "continue_final_message",
                "continue_final_message and add_generation_prompt cannot both be true",
            )


def _bad(param: str, message: str) -> BadRequestError:
    return BadRequestError(message, param=param)


def as_bad_request(error: ValidationError) -> BadRequestError:
    """Join up to four findings in one message; `param` is the first field."""
    findings = error.errors(include_url=False, include_context=False)
    paths = [".".join(str(part) for part in item["loc"]) for item in findings]
    texts = [
        f"{path}: {item['msg']}"
        # the input of a missing field is the object around it
        + ("" if item["type"] == "missing" else f", got {_describe(item['input'])}")
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
