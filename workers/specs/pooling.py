"""How a model answers prompts with vectors or scores, as plain data. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workers.wire.request import PoolingOutput, PoolingParams, PoolingRows

PoolingTask = Literal["embed", "classify", "score"]
Activation = Literal["none", "sigmoid", "softmax"]
ScoreTemplate = Literal["auto", "pair", "chat", "qwen3_reranker"]


@dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """The head of a model that draws no tokens.

    task            an embedding, the classes of a classification head, or one score
    size            values of an embedding, before a cut
    rows            tokens of the prompt that count
    normalize       embeddings are divided by their length
    dimensions      lengths that an embedding may be cut to, None = every length
    labels          names of the classes of the classification head; () = the model has none
    activation      makes probabilities of the logits of classes, or of the difference of those of `score_tokens`
    score_tokens    tokens or their ids for no and yes, or for yes alone, with the logits that make the score; None: the
                    vocabulary has no logits
    score_template  the prompt of a query and a document
    chat_options    texts are messages of the user, and pairs those of a query and a document, by the chat template
                    with these keywords; None: texts are prompts
    """

    task: PoolingTask
    size: int
    rows: PoolingRows = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] | None = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "none"
    score_tokens: tuple[str | int, ...] | None = None
    score_template: ScoreTemplate = "auto"
    chat_options: Mapping[str, Any] | None = field(default=None, hash=False)

    def params(
        self,
        *,
        token_ids: tuple[int, ...] = (),
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> PoolingParams:
        """Return the parameters of a request; token_ids: of `score_tokens`."""
        if self.task != "embed":
            output: PoolingOutput = "classes" if self.score_tokens is None else "tokens"
            return PoolingParams(rows=self.rows, output=output, token_ids=token_ids)
        normalize = self.normalize if normalize is None else normalize
        return PoolingParams(rows=self.rows, dimensions=dimensions, normalize=normalize)

    def warm_up_params(self) -> PoolingParams:
        """Return the parameters of a request that comes before requests of clients; no token is looked up."""
        return self.params(token_ids=(0,) * len(self.score_tokens or ()))

    def __str__(self) -> str:
        """Words for the report of `phalanx check`."""
        rows = {"last": "last token", "mean": "mean of all tokens", "cls": "first token"}[self.rows]
        if self.task == "embed":
            chat = "" if self.chat_options is None else ", texts by the chat template"
            return f"embed: {rows}, {'normalised' if self.normalize else 'not normalised'}{chat}"
        if self.score_tokens is not None:
            *no, yes = self.score_tokens
            against = f" against {no[0]!r}" if no else ""
            return f"score: {rows}, {yes!r}{against}, {self.activation}"
        classes = f"{len(self.labels)} class{'es' * (len(self.labels) != 1)}"
        return f"{self.task}: {rows}, {classes}, {self.activation}"
