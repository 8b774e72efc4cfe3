"""Open requests of a rank and their load by ingress. Knows nothing of scheduling.

Load is counted as the router counts it: tokens of prompt and expected output, until a request has ended.
"""

from workers.wire.request import EngineRequest, expected_output


class OpenRequests:
    """Requests that a rank has accepted and not yet answered completely."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[EngineRequest, int]] = {}  # with their load
        self._loads: dict[str, int] = {}  # by ingress, of every ingress that ever sent a request
        self._total = 0
        self._reported: dict[str, int] = {}  # by ingress, the load of other ingresses sent last

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_open(self, request: EngineRequest) -> bool:
        """Return whether this very request is open, not another request with its id."""
        found = self._requests.get(request.request_id)
        return found is not None and found[0] is request

    def add(self, request: EngineRequest) -> None:
        """Add a request; its id must not be open."""
        assert request.request_id not in self._requests, f"{request.request_id} is in use"
        load = len(request.prompt_token_ids) + expected_output(request.params)
        self._requests[request.request_id] = (request, load)
        self._add_load(request.ingress_id, load)

    def request(self, request_id: str) -> EngineRequest:
        """Return an open request."""
        return self._requests[request_id][0]

    def ingress_of(self, request_id: str) -> str:
        """Return the id of the ingress that receives the tokens of an open request."""
        return self._requests[request_id][0].ingress_id

    def remove(self, request_id: str) -> str:
        """Remove an open request; return the id of its ingress."""
        request, load = self._requests.pop(request_id)
        self._add_load(request.ingress_id, -load)
        return request.ingress_id

    def ids_of_ingress(self, ingress_id: str) -> list[str]:
        """Return the ids of one ingress's open requests."""
        return [
            name
            for name, (request, _) in self._requests.items()
            if request.ingress_id == ingress_id
        ]

    def remove_ingress(self, ingress_id: str) -> None:
        """Report no more loads to an ingress. Its requests must have been removed."""
        self._loads.pop(ingress_id, None)
        self._reported.pop(ingress_id, None)

    def report_load(self, ingress_id: str) -> int:
        """Return the load of all other ingresses, for a message that is sent to `ingress_id` now."""
        self._reported[ingress_id] = others = self._total - self._loads.get(ingress_id, 0)
        return others

    def stale_ingresses(self) -> list[str]:
        """Return the ingresses with a last reported load that is out of date."""
        return [
            ingress_id
            for ingress_id, own in self._loads.items()
            if self._reported.get(ingress_id, 0) != self._total - own
        ]

    def _add_load(self, ingress_id: str, load: int) -> None:
        self._loads[ingress_id] = self._loads.get(ingress_id, 0) + load
        self._total += load
