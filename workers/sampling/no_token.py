"""Causes for a row without a token: their numbers in place of a token id, and their errors. Knows no tensors."""

from workers.wire.request import SamplingParams

INVALID_LOGITS = -1  # a logit is NaN or infinite
ALL_FORBIDDEN = -2  # the logits of all tokens are -inf

# First words of the error of a request that ends without a token, by the side at fault: the server or the request.
LOGITS_FAILED = "the logits are invalid"
NO_TOKEN_ALLOWED = "no token is allowed"


def cause_of(number: int, params: SamplingParams) -> int:
    """Return the cause of a row that got `number` in place of a token.

    Without a rule that forbids tokens, logits that are all -inf came from the model.
    """
    has_rule = (
        params.grammar is not None
        or params.allowed_token_ids is not None
        or bool(params.bad_words_ids)
    )
    return ALL_FORBIDDEN if number == ALL_FORBIDDEN and has_rule else INVALID_LOGITS


def error_of(cause: int, num_output_tokens: int) -> str:
    """Return the error of a request that ends with `cause` after some output tokens."""
    position = f"output token {num_output_tokens + 1}"
    if cause == ALL_FORBIDDEN:
        return f"{NO_TOKEN_ALLOWED} as {position}"
    return f"{LOGITS_FAILED} at {position}: a logit is NaN or infinite"
