"""Messages in the inbox of an engine, beside requests."""

from dataclasses import dataclass

from workers.sampling.grammar_compiler import Compiled
from workers.wire.request import EngineRequest


@dataclass(frozen=True)
class CompiledRequest:
    """A request and its compiled grammar, or the reason why the grammar was not compiled."""

    request: EngineRequest
    grammar: Compiled


@dataclass(frozen=True)
class ImagesReady:
    """The embeddings of a request's images are there, or never will be."""

    request_id: str


@dataclass(frozen=True)
class Refusal:
    """A request that is answered with an error."""

    request_id: str
    ingress_id: str
    error: str


@dataclass(frozen=True)
class Abort:
    """The end of a request without an answer."""

    request_id: str


@dataclass(frozen=True)
class AbortIngress:
    """The end of all requests of an ingress."""

    ingress_id: str


Message = EngineRequest | CompiledRequest | ImagesReady | Refusal | Abort | AbortIngress
