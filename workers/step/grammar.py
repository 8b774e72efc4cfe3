"""The state of a request's output in its grammar. Knows nothing of tokenizers or of the compiler of grammars.

A matcher that fails allows only the end tokens and returns its error at the next `advance`, so a failure ends its own
request only.
"""

from collections.abc import Iterable

from llguidance import LLMatcher

# First words of the error of a request that ends because of its grammar.
GRAMMAR_FAILED = "the grammar"


class Grammar:
    """State of one request's output in its grammar. Preemptions keep it, because only output advances it.

    complete   the output may end here and nothing can follow
    """

    def __init__(self, matcher: LLMatcher):
        self.matcher = matcher
        self.complete = False

    def num_allowed(self, token_ids: Iterable[int]) -> int:
        """Return how many of these tokens the output may go on with; the state does not change."""
        return self.matcher.validate_tokens(list(token_ids))

    def advance(self, token_id: int) -> str | None:
        """Advance by an output token; return the reason why the grammar cannot go on, or None."""
        if self.matcher.consume_token(token_id):
            self.complete = self.matcher.is_stopped()
            if not (self.complete and self.matcher.is_error()):
                return None
        return f"{GRAMMAR_FAILED} cannot go on: {plain(self.matcher.get_error())}"


def plain(error: str) -> str:
    """Return an error of llguidance in plain words, without the place holder for text that `limits` leaves out."""
    text = error.replace("<non-verbose/>", "").strip()
    return text.replace("NoExtensionBias", "no text matches it from here on")


def advance_all(grammar: Grammar | None, token_ids: list[int]) -> str | None:
    """Advance `grammar` by `token_ids`; return its error, or None."""
    if grammar is None:
        return None
    return next(filter(None, map(grammar.advance, token_ids)), None)
