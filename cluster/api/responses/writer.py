"""The bytes of a response: the whole object, or a stream of events. Knows nothing of sockets or of the store.

As in chat completions, the constant parts of an item's deltas are encoded once, and only the text goes through the JSON
encoder for each token.
"""

from collections.abc import Callable
from json.encoder import encode_basestring_ascii as json_string
from typing import Any

from cluster.api.answer.events import to_json
from cluster.api.answer.generation import Choice, Generation
from cluster.api.responses.output import CallItem, Change, MessageItem, Output, OutputItem
from cluster.api.responses.output import ReasoningItem as Thought
from cluster.api.responses.response_object import ended_state, failed_state, running_state
from cluster.errors import ServingError

_DELTAS: dict[type[OutputItem], str] = {
    MessageItem: "response.output_text.delta",
    Thought: "response.reasoning_text.delta",
    CallItem: "response.function_call_arguments.delta",
}


class ResponseWriter:
    """The `AnswerWriter` of one response.

    fields   the fields of the response object that never change
    on_state receives the response object at its end, before its bytes leave; in the background, at each change
    """

    def __init__(
        self,
        generation: Generation,
        fields: dict[str, Any],
        on_state: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._generation = generation
        self._fields = fields
        self._on_state = on_state
        self._has_ended = False
        self._output = Output()
        self._num_events = 0
        # Text without log-probabilities and parser needs no Change objects.
        choice = generation.choices[0]
        self._is_plain = choice.parser is None and choice.report is None
        self._item: OutputItem | None = None  # the item of the three constant parts below
        self._opening = self._middle = self._closing = ""
        self._repeated = ""  # the JSON of `fields`, for the events of a stream

    def begin(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: the beginning of the response, and the first text."""
        state = running_state("in_progress")
        created = self._response_event("response.created", state)
        return (
            created + self._response_event("response.in_progress", state) + self.text(choice, text)
        )

    def queued(self) -> bytes:
        """Return the first events of a response in the background."""
        state = running_state("queued")
        self._keep(state)
        created = self._response_event("response.created", state)
        return created + self._response_event("response.queued", state)

    def progressed(self) -> bytes:
        """Return the event of a response that was queued and now has its first token."""
        state = running_state("in_progress")
        self._keep(state)
        return self._response_event("response.in_progress", state)

    def text(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter: the events of one step's text; b"" while a parser holds the text back."""
        item = self._item
        if item is None or not self._is_plain:
            return b"".join(map(self._changed, self._output.push(choice, text)))
        if not text:
            return b""
        item.texts.append(text)
        number = self._num_events
        self._num_events = number + 1
        return f"{self._opening}{number}{self._middle}{json_string(text)}{self._closing}".encode(
            "ascii"
        )

    def end(self) -> bytes:
        """See AnswerWriter: the ends of the last item and of the response."""
        changes = self._output.finish(complete=self._is_complete)
        state = ended_state(self._generation, self._output.to_json())
        events = [self._changed(change) for change in changes]
        events.append(self._response_event(f"response.{state['status']}", state))
        self._end(state)
        return b"".join(events)

    def error(self, error: ServingError) -> bytes:
        """See AnswerWriter: the error, and the failed response with its output so far."""
        self._output.finish(complete=False)
        state = failed_state(error, self._output.to_json())
        self._end(state)
        described = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", described) + self._response_event("response.failed", state)

    def cancel(self) -> None:
        """End the response with its output so far; there is no event of it."""
        self._output.finish(complete=False)
        self._end(running_state("cancelled") | {"output": self._output.to_json()})

    def body(self, texts: list[str]) -> bytes:
        """See AnswerWriter."""
        self._output.push(self._generation.choices[0], texts[0])
        self._output.finish(complete=self._is_complete)
        state = ended_state(self._generation, self._output.to_json())
        self._end(state)
        return to_json(self._fields | state)

    @property
    def _is_complete(self) -> bool:
        return self._generation.choices[0].finish_reason != "length"

    def _end(self, state: dict[str, Any]) -> None:
        """Keep the last state. A time limit may report an error after the end, which changes nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._keep(state)

    def _keep(self, state: dict[str, Any]) -> None:
        if self._on_state is not None:
            self._on_state(self._fields | state)

    def _changed(self, change: Change) -> bytes:
        """Return the events of one change."""
        item = change.item
        if change.opened:
            self._set_item(item)
            return b"".join(self._event(kind, fields) for kind, fields in _opened(item))
        if change.closed:
            return b"".join(self._event(kind, fields) for kind, fields in _closed(item))
        if change.logprobs:
            fields = {"content_index": 0, "delta": change.text}
            logprobs = [_without_bytes(token) for token in change.logprobs]
            return self._event(_DELTAS[MessageItem], _place(item) | fields | {"logprobs": logprobs})
        number = self._num_events
        self._num_events = number + 1
        text = json_string(change.text)
        return f"{self._opening}{number}{self._middle}{text}{self._closing}".encode("ascii")

    def _set_item(self, item: OutputItem) -> None:
        """Encode the constant parts of an item's deltas."""
        kind = _DELTAS[type(item)]
        fields = _place(item)
        if not isinstance(item, CallItem):
            fields |= {"content_index": 0}
        self._item = item
        self._opening = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":'
        self._middle = f',{to_json(fields).decode("ascii")[1:-1]},"delta":'
        self._closing = (',"logprobs":[]' if isinstance(item, MessageItem) else "") + "}\n\n"

    def _response_event(self, kind: str, state: dict[str, Any]) -> bytes:
        if not self._repeated:
            self._repeated = to_json(self._fields).decode("ascii")[1:]
        response = f"{to_json(state).decode('ascii')[:-1]},{self._repeated}"
        return self._event(kind, {}, f',"response":{response}')

    def _event(self, kind: str, fields: dict[str, Any], more: str = "") -> bytes:
        number = self._num_events
        self._num_events = number + 1
        head = to_json({"type": kind, "sequence_number": number} | fields).decode("ascii")
        return f"event: {kind}\ndata: {head[:-1]}{more}}}\n\n".encode("ascii")


def _place(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.item_id, "output_index": item.index}


def _opened(item: OutputItem) -> list[tuple[str, dict[str, Any]]]:
    """Return the events that open an item."""
    added = {"output_index": item.index, "item": item.to_json(opening=True)}
    events: list[tuple[str, dict[str, Any]]] = [("response.output_item.added", added)]
    if isinstance(item, MessageItem | Thought):
        fields = {"content_index": 0, "part": item.part(opening=True)}
        events.append(("response.content_part.added", _place(item) | fields))
    return events


def _closed(item: OutputItem) -> list[tuple[str, dict[str, Any]]]:
    """Return the events that close an item."""
    done = ("response.output_item.done", {"output_index": item.index, "item": item.to_json()})
    if isinstance(item, MessageItem | Thought):
        place = _place(item) | {"content_index": 0}
        fields: dict[str, Any] = {"text": item.text}
        kind = "response.reasoning_text.done"
        if isinstance(item, MessageItem):
            kind = "response.output_text.done"
            fields["logprobs"] = [_without_bytes(token) for token in item.logprobs]
        part = ("response.content_part.done", place | {"part": item.part()})
        return [(kind, place | fields), part, done]
    arguments = {"arguments": item.text}
    return [("response.function_call_arguments.done", _place(item) | arguments), done]


def _without_bytes(token: dict[str, Any]) -> dict[str, Any]:
    """Return a token's log-probabilities as events have them."""
    top = [{"token": t["token"], "logprob": t["logprob"]} for t in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}
