"""Whose the requests of a rank are, and how much work each ingress has there. Knows nothing of scheduling.

The unit of work is the router's: tokens of prompt and expected output, until a request has ended.
"""

from workers.wire.request import EngineRequest, expected_output


class OpenRequests:
    """The requests a rank has taken in and not answered to the end."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[str, int]] = {}
        self._tokens: dict[str, int] = {}  # of every ingress that ever sent a request
        self._total = 0
        self._told: dict[str, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: EngineRequest) -> None:
        """A request came."""
        assert request.request_id not in self._requests, f"{request.request_id} is in use"
        num_tokens = len(request.prompt_token_ids) + expected_output(request.params)
        self._requests[request.request_id] = (request.ingress_id, num_tokens)
        self._count(request.ingress_id, num_tokens)

    def ingress_of(self, request_id: str) -> str:
        """Where its tokens go."""
        return self._requests[request_id][0]

    def remove(self, request_id: str) -> str:
        """It has ended; where its last tokens go."""
        ingress_id, num_tokens = self._requests.pop(request_id)
        self._count(ingress_id, -num_tokens)
        return ingress_id

    def of_ingress(self, ingress_id: str) -> list[str]:
        """The requests of one ingress."""
        return [name for name, (owner, _) in self._requests.items() if owner == ingress_id]

    def forget_ingress(self, ingress_id: str) -> None:
        """An ingress is gone, and its requests are removed."""
        self._tokens.pop(ingress_id, None)
        self._told.pop(ingress_id, None)

    def tell(self, ingress_id: str) -> int:
        """How much work the other ingresses have here, for a message that goes to this one now."""
        self._told[ingress_id] = others = self._total - self._tokens.get(ingress_id, 0)
        return others

    def stale_ingresses(self) -> list[str]:
        """The ingresses that were told something else the last time."""
        return [
            ingress_id
            for ingress_id, own in self._tokens.items()
            if self._told.get(ingress_id, 0) != self._total - own
        ]

    def _count(self, ingress_id: str, num_tokens: int) -> None:
        self._tokens[ingress_id] = self._tokens.get(ingress_id, 0) + num_tokens
        self._total += num_tokens
