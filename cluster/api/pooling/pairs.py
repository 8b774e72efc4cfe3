"""Prompts of a query and a document, by the tokenizer or by a template, and the tokens that a score is made of."""

import re
import sys

from cluster.api.tokenizer import ServingTokenizer
from cluster.errors import BadRequestError
from workers.specs.pooling import PoolingSpec

_ROLES = re.compile(
    r"""['"]query['"].*['"]document['"]|['"]document['"].*['"]query['"]""", re.DOTALL
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_RERANKER_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANKER_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairEncoder:
    """Token ids of pairs, as the model of `spec` reads them."""

    def __init__(self, tokenizer: ServingTokenizer, spec: PoolingSpec) -> None:
        self._tokenizer = tokenizer
        self._template = spec.score_template
        if spec.score_template == "auto":
            by_roles = bool(_ROLES.search(tokenizer.chat_template))
            self._template = "chat" if by_roles else "pair" if spec.labels else "qwen3_reranker"
        self.score_token_ids = tuple(
            _token_id(tokenizer, token) for token in spec.score_tokens or ()
        )

    def encode(
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
        token_ids = self._templated(query, document, instruction)
        kept = sys.maxsize
        while keep is not None and (excess := len(token_ids) - keep) > 0:
            length = len(self._tokenizer.encode(document, add_special_tokens=False))
            # A text that ends within a character may have more tokens than were kept of it.
            kept = min(length - excess, kept - 1)
            if kept < 0:
                raise BadRequestError(
                    f"truncate_prompt_tokens = {keep} cuts more than the document",
                    param="truncate_prompt_tokens",
                )
            document = self.cut(document, kept)
            token_ids = self._templated(query, document, instruction)
        return token_ids

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the first tokens of a text."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if len(token_ids) <= num_tokens:
            return text
        return self._tokenizer.decode(token_ids[:num_tokens])

    def _templated(self, query: str, document: str, instruction: str | None) -> list[int]:
        if self._template == "chat":
            messages = [
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ]
            if instruction is not None:
                messages.insert(0, {"role": "system", "content": instruction})
            text = self._tokenizer.render_chat(messages, {})
        else:
            text = (
                f"{_RERANKER_START}<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n"
                f"<Document>: {document}{_RERANKER_END}"
            )
        return self._tokenizer.encode(text, add_special_tokens=False)


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
