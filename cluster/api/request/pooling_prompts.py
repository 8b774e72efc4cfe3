"""Prompts of texts, and of a query and a document, by the tokenizer or by a template, and the tokens of scores."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from cluster.api.tokenizer import ServingTokenizer
from cluster.errors import BadRequestError
from workers.specs.pooling import PoolingSpec, ScoreTemplate

_ROLES = re.compile(
    r"""['"]query['"].*['"]document['"]|['"]document['"].*['"]query['"]""", re.DOTALL
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_RERANKER_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANKER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


_OPENS_ANSWER = {"add_generation_prompt": True}  # without a file of keywords

Messages = list[dict[str, Any]]


class PoolingPrompts:
    """Token ids of texts and of pairs, as the model of `spec` reads them."""

    def __init__(self, tokenizer: ServingTokenizer, spec: PoolingSpec) -> None:
        self._tokenizer, self._spec = tokenizer, spec
        self.score_token_ids = tuple(
            _token_id(tokenizer, token) for token in spec.score_tokens or ()
        )

    def encode(self, text: str, *, special: bool, keep: int | None) -> list[int]:
        """Return the token ids of a text; the end of a longer one than `keep` is cut, if keep is set.

        special   the tokenizer adds its special tokens; a chat template writes its own
        """
        options = self._spec.chat_options
        if options is not None:

            def rendered(part: str) -> list[int]:
                messages = [{"role": "user", "content": part}]
                return self._ids(_rendered(self._tokenizer, messages, options))

            return self._cut_to_fit(rendered, text, keep, "text")
        if keep is None:
            return self._tokenizer.encode(text, add_special_tokens=special)
        return self._tokenizer.encode_pair(text, None, add_special_tokens=special, keep=keep)

    def encode_pair(
        self, query: str, document: str, *, instruction: str | None, keep: int | None
    ) -> list[int]:
        """Return the token ids of a pair; of a longer one than `keep` the end of the document is cut, if keep is set.

        Raises BadRequestError if more than the document would have to be cut.
        """
        if self._template == "pair":
            if instruction is not None:
                raise BadRequestError(
                    "instruction: the prompts of this model have none", param="instruction"
                )
            return self._tokenizer.encode_pair(query, document, keep=keep)

        def templated(part: str) -> list[int]:
            if self._template == "chat":
                messages = _messages(query, part, instruction)
                options = self._spec.chat_options
                given = _OPENS_ANSWER if options is None else options
                return self._ids(_rendered(self._tokenizer, messages, given))
            return self._ids(
                f"{_RERANKER_START}<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n"
                f"<Document>: {part}{_RERANKER_END}"
            )

        return self._cut_to_fit(templated, document, keep, "document")

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the first tokens of a text."""
        token_ids = self._ids(text)
        if len(token_ids) <= num_tokens:
            return text
        return self._tokenizer.decode(token_ids[:num_tokens])

    @cached_property
    def _template(self) -> ScoreTemplate:
        """The prompt of a query and a document."""
        spec = self._spec
        if spec.score_template != "auto":
            return spec.score_template
        if spec.chat_options is None:
            by_roles = bool(_ROLES.search(self._tokenizer.chat_template))
        else:
            by_roles = _writes_pairs(self._tokenizer, spec.chat_options)
        return "chat" if by_roles else "pair" if spec.labels else "qwen3_reranker"

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _cut_to_fit(
        self, templated: Callable[[str], list[int]], text: str, keep: int | None, what: str
    ) -> list[int]:
        token_ids = templated(text)
        kept = sys.maxsize
        while keep is not None and (excess := len(token_ids) - keep) > 0:
            # A text that ends within a character may have more tokens than were kept of it.
            kept = min(len(self._ids(text)) - excess, kept - 1)
            if kept < 0:
                raise BadRequestError(
                    f"truncate_prompt_tokens = {keep} cuts more than the {what}",
                    param="truncate_prompt_tokens",
                )
            text = self.cut(text, kept)
            token_ids = templated(text)
        return token_ids


def _writes_pairs(tokenizer: ServingTokenizer, options: Mapping[str, Any]) -> bool:
    """Whether a prompt by the chat template changes with the query and with the document."""
    pairs = ("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot")
    try:
        base, *varied = (_rendered(tokenizer, _messages(*pair, None), options) for pair in pairs)
    except BadRequestError:  # it has no such roles
        return False
    return base not in varied


def _messages(query: str, document: str, instruction: str | None) -> Messages:
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    return [
        *system,
        {"role": "query", "content": query},
        {"role": "document", "content": document},
    ]


def _rendered(tokenizer: ServingTokenizer, messages: Messages, options: Mapping[str, Any]) -> str:
    opens, keywords = opening(options)
    return tokenizer.render_chat(messages, keywords, add_generation_prompt=opens)


def opening(options: Mapping[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return whether a template with these keywords opens an answer, and its own keywords."""
    keywords = {**options}
    return bool(keywords.pop("add_generation_prompt", False)), keywords


def _token_id(tokenizer: ServingTokenizer, token: str | int) -> int:
    """Return the id of a token of `PoolingSpec.score_tokens`. Raises ValueError if the text is several tokens."""
    if isinstance(token, int):
        return token
    token_ids = tokenizer.encode(token, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ValueError(
            f"model.pooling.score_tokens: {token!r} is {len(token_ids)} tokens; expected texts of one token"
        )
    return token_ids[0]
