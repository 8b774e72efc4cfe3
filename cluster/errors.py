"""The errors that a request can end in, each with its HTTP status. Knows nothing else of HTTP.

Ray pickles them between processes, so the message is the only positional argument and all other fields are attributes.
"""

SHUTDOWN_REASON = "the server is stopping"


class ServingError(Exception):
    """Base class: an error that the client receives in the error envelope."""

    status = 500
    error_type = "server_error"
    default_code: str | None = "internal_error"
    retry_after_s: int | None = None
    should_retry: bool | None = None
    """Whether clients should send the request again; None = as they decide by the status."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code


class BadRequestError(ServingError, ValueError):
    """The client must change the request. `param` is the field, as a path if it is nested."""

    status = 400
    error_type = "invalid_request_error"
    default_code = "invalid_value"


class UnsupportedParameterError(BadRequestError):
    """A known parameter with a value this server cannot honour."""

    default_code = "unsupported_parameter"


class ContextLengthError(BadRequestError):
    """Prompt, or prompt plus requested output, does not fit. num_tokens: of the prompt; limit: the most that fit."""

    default_code = "context_length_exceeded"
    num_tokens: int | None = None
    limit: int | None = None


class NotFoundError(BadRequestError):
    """No such model or route."""

    status = 404
    default_code = "not_found"


class BodyTooLargeError(BadRequestError):
    """The request's body is over the configured limit."""

    status = 413
    default_code = "body_too_large"


class ContentTypeError(BadRequestError):
    """The body is not declared as JSON."""

    status = 415
    default_code = "unsupported_content_type"


class AuthenticationError(BadRequestError):
    """The request carries no API key, or a wrong one."""

    status = 401
    default_code = "invalid_api_key"


class ForbiddenError(BadRequestError):
    """The client may not use this route."""

    status = 403
    default_code = "forbidden"


class ClientTimeoutError(BadRequestError):
    """The client did not send its request in time."""

    status = 408
    default_code = "request_timeout"


class OverloadedError(ServingError):
    """The queue is full; the request may succeed later."""

    status = 429
    error_type = "overloaded_error"
    default_code = "overloaded"
    retry_after_s = 1


class EngineDeadError(ServingError):
    """No rank can serve: the group is starting, broken or stopping."""

    status = 503
    error_type = "service_unavailable_error"
    default_code = "engine_unavailable"
    retry_after_s = 1


class PoisonRequestError(ServingError):
    """The request ended its rank each time that the rank began it, so that it must not be sent again."""

    default_code = "request_ended_ranks"
    should_retry = False

    def __init__(
        self, message: str = "this request was set aside: it ended each rank that began it"
    ) -> None:
        super().__init__(message)


class RequestTimeoutError(ServingError):
    """The answer took longer than the configured limit."""

    status = 504
    error_type = "timeout_error"
    default_code = "timeout"
