"""The answer to one prompt or conversation, as Python code reads it."""

from dataclasses import dataclass, field
from typing import Any

from cluster.errors import ServingError


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt or conversation.

    body   the object that the HTTP API returns for the request; empty if the request failed
    error  the reason for which the request failed; then each property of an answer raises it
    """

    body: dict[str, Any] = field(default_factory=dict, repr=False)
    error: ServingError | None = None

    @property
    def text(self) -> str:
        """The text of the first choice; "" if the choice has tool calls or reasoning alone."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """The text of each choice, for n > 1."""
        return [
            (choice["message"]["content"] or "") if "message" in choice else choice["text"]
            for choice in self._checked()["choices"]
        ]

    @property
    def finish_reason(self) -> str:
        """The finish reason of the first choice: stop, length or tool_calls."""
        return str(self._checked()["choices"][0]["finish_reason"])

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the first choice of a chat."""
        calls: list[dict[str, Any]] = self._message().get("tool_calls", [])
        return calls

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice of a chat; "" without reasoning."""
        return self._message().get("reasoning") or ""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self._checked()["usage"]["prompt_tokens"])

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return int(self._checked()["usage"]["completion_tokens"])

    @property
    def embedding(self) -> list[float]:
        """The embedding of an input."""
        vector: list[float] = self._checked()["data"][0]["embedding"]
        return vector

    @property
    def probabilities(self) -> list[float]:
        """The probabilities of the classes of an input."""
        values: list[float] = self._checked()["data"][0]["probs"]
        return values

    @property
    def label(self) -> str:
        """The name of the most probable class of an input."""
        return str(self._checked()["data"][0]["label"])

    @property
    def score(self) -> float:
        """The score of a pair."""
        return float(self._checked()["data"][0]["score"])

    def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = self._checked()["choices"][0].get("message", {})
        return message

    def _checked(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return self.body
