"""The bodies of answers with vectors, classes and scores, in the shapes of OpenAI, vLLM, Jina and Cohere.

A shape is the part of a draft that its answer depends on; it travels by pickle. Knows nothing of sockets or engines.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from workers.specs.pooling import Activation

Vectors = Sequence[np.ndarray]


@dataclass(frozen=True)
class Head:
    """What all answers begin with."""

    id: str
    model: str
    created: int
    usage: dict[str, Any]

    def listed(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer with one entry for each vector or score."""
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage,
        }


class AnswerShape(Protocol):
    """Makes the body of an answer. id_prefix: begins its id."""

    id_prefix: ClassVar[str]

    def body(self, head: Head, vectors: Vectors) -> dict[str, Any]:
        """Return the body; `vectors` has the vector of each prompt."""
        ...


def activated(values: np.ndarray, activation: Activation) -> np.ndarray:
    """Return logits as probabilities, float64."""
    found: np.ndarray = values.astype(np.float64)
    if activation == "softmax":
        found = np.exp(found - found.max())
        found /= found.sum()
    elif activation == "sigmoid":
        found = 1 / (1 + np.exp(-found))
    return found


def _written(vector: np.ndarray, as_bytes: bool) -> Any:
    if as_bytes:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()


@dataclass(frozen=True)
class Embeddings:
    """Of /v1/embeddings."""

    id_prefix: ClassVar[str] = "embd-"
    as_bytes: bool

    def body(self, head: Head, vectors: Vectors) -> dict[str, Any]:
        """See AnswerShape."""
        return head.listed(
            [
                {
                    "index": index,
                    "object": "embedding",
                    "embedding": _written(vector, self.as_bytes),
                }
                for index, vector in enumerate(vectors)
            ],
        )


@dataclass(frozen=True)
class Pooled:
    """Of /pooling: an embedding, probabilities of classes, or one score."""

    id_prefix: ClassVar[str] = "pool-"
    activation: Activation
    as_bytes: bool

    def body(self, head: Head, vectors: Vectors) -> dict[str, Any]:
        """See AnswerShape."""
        return head.listed(
            [
                {"index": index, "object": "pooling", "data": self._data(vector)}
                for index, vector in enumerate(vectors)
            ],
        )

    def _data(self, vector: np.ndarray) -> Any:
        if self.activation != "none":
            vector = activated(vector, self.activation)
        return _written(vector, self.as_bytes)


@dataclass(frozen=True)
class Classes:
    """Of /classify."""

    id_prefix: ClassVar[str] = "classify-"
    activation: Activation
    labels: tuple[str, ...]

    def body(self, head: Head, vectors: Vectors) -> dict[str, Any]:
        """See AnswerShape."""
        data = []
        for index, vector in enumerate(vectors):
            values = activated(vector, self.activation)
            label = self.labels[int(values.argmax())]
            found = {"index": index, "label": label, "probs": values.tolist()}
            data.append(found | {"num_classes": len(values)})
        return head.listed(data)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Of /score.

    num_queries   the first prompts, which are embedded beside the second texts; 0: each prompt is a pair
    """

    id_prefix: ClassVar[str] = "score-"
    activation: Activation
    num_queries: int

    def scores(self, vectors: Vectors) -> list[float]:
        """Return the score of each pair."""
        if not self.num_queries:
            return [float(activated(vector, self.activation)[0]) for vector in vectors]
        firsts, seconds = vectors[: self.num_queries], vectors[self.num_queries :]
        if len(firsts) == 1:
            firsts = [firsts[0]] * len(seconds)
        return [_cosine(*pair) for pair in zip(firsts, seconds, strict=True)]

    def body(self, head: Head, vectors: Vectors) -> dict[str, Any]:
        """See AnswerShape."""
        return head.listed(
            [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(self.scores(vectors))
            ],
        )


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return float(first @ second / lengths) if lengths else 0.0


@dataclass(frozen=True, kw_only=True)
class Reranked(Scores):
    """Of /rerank: documents, the best first. documents: None = their texts are left out."""

    id_prefix: ClassVar[str] = "rerank-"
    documents: list[str] | None
    top_n: int

    def body(self, head: Head, vectors: Vectors) -> dict[str, Any]:
        """See AnswerShape."""
        scores = self.scores(vectors)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])  # equal ones in order
        results: list[dict[str, Any]] = []
        for index in order[: self.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self.documents is not None:
                result["document"] = {"text": self.documents[index]}
            results.append(result)
        return {
            "id": head.id,
            "model": head.model,
            "usage": head.usage,
            "meta": {"tokens": {"input_tokens": head.usage["prompt_tokens"], "output_tokens": 0}},
            "results": results,
        }
