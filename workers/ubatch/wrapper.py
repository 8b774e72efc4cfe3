"""Runs a forward as ubatches that take turns on one thread, so that one computes while another's all-to-all travels.

Each ubatch's forward runs in a greenlet. Before it waits for an all-to-all (`Pending.wait`) it yields to the next
ubatch, round robin; so ubatch i reaches every layer before ubatch i + 1. Model code knows nothing of it. One rule: no
context manager that changes the thread's inference mode or stream may be open around a wait.

In a CUDA graph each ubatch computes on a stream of its own: its kernels take the SMs that another ubatch's kernels
leave idle at their ends, which takes 3 to 7 % off ubatched prefills and 19 % off ubatched decodes (two H200).
`wait_previous_ubatch` keeps the order between the streams; without it all ubatches compute at once and then all wait:
112 ms instead of 104 (8,192 tokens a rank on four H200; 107 ms on one stream). Eager ubatches share one stream, because
there the GPU waits for the host, and a change of streams costs the host 1 to 2 us.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar

import torch
from greenlet import greenlet

from kernels.attention.base import GraphForm
from kernels.attention.batch import AttentionBatch
from kernels.backends.graph_planner import GraphPlanner
from kernels.backends.select import Backends
from kernels.pending import can_yield_ubatch, set_yield_ubatch
from workers.step.forward_batch import ForwardBatch
from workers.ubatch.batch_cuts import cut, ubatch_rows

T = TypeVar("T")
CPU = torch.device("cpu")


class UbatchModel(Protocol):
    """A model with weights that several sets of backends can use."""

    def with_backends(self, backends: Backends) -> "UbatchModel":
        """Return a view of the same weights that calls these backends."""

    def forward(
        self, batch: ForwardBatch, *, hidden_after: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return hidden_TD of the batch's rows; hidden_after as of DecoderLM.forward."""


class UBatchWrapper:
    """A model's `forward` and its attention's `plan`, in one ubatch for each of `backends`.

    Each ubatch has its own all-to-all and attention, because the ubatches are in flight together. All attentions must
    be bound to the same KV caches. Make the wrapper when the weights are loaded.

    comm_sms    SMs of the all-to-alls while ubatches take turns; the grouped GEMM has the rest. None: no limit
    total_sms   SMs of the device, 0 without one
    """

    def __init__(
        self,
        model: UbatchModel,
        backends: Sequence[Backends],
        *,
        comm_sms: int | None = None,
        total_sms: int = 0,
    ):
        self.comm_sms = comm_sms
        self.backends = backends
        self._total_sms = total_sms
        self._models = [model.with_backends(own) for own in backends]
        self._planned: AttentionBatch | None = None
        self._planned_rows = 0
        self._parts: list[ForwardBatch] = []

    @property
    def num_ubatches(self) -> int:
        """Ubatches of a step."""
        return len(self.backends)

    def plan(self, batch: ForwardBatch) -> None:
        """Plan attention for each ubatch of `batch`."""
        self._planned, self._planned_rows = batch, batch.num_rows
        self._parts = cut(batch, batch.num_rows, self.num_ubatches)
        for own, part in zip(self.backends, self._parts, strict=True):
            own.attention.plan(part)
            if own.linear_attention is not None:
                own.linear_attention.plan(part)

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        """As GraphAttention.reserve_graphs, for ubatches of graphs of up to `max_rows` rows."""
        for planner in self._graph_planners():
            planner.reserve_graphs(-(-max_rows // self.num_ubatches), max_seqs, max_blocks)

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        """As GraphAttention.forms, but without one for even decodes, because cutting them rarely pays."""
        first = self._graph_planners()[0]
        forms = first.forms(num_rows // self.num_ubatches, prompts=prompts)
        return tuple(form for form in forms if form != GraphForm.EVEN_DECODES)

    def drafts_form(self, num_rows: int) -> GraphForm:
        """See GraphAttention."""
        return self._graph_planners()[0].drafts_form(num_rows)

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        """Return the form that serves all ubatches of the batch; shared blocks of one ubatch are enough for that."""
        *special, general = self.forms(num_rows, prompts=prompts)
        if not special:
            return general
        found = {
            planner.form(batch.ubatch(start, end), end - start, prompts=prompts)
            for planner, (start, end) in self._with_rows(num_rows)
        }
        sharing = [form for form in special if form.shares and form in found]
        if sharing:
            return sharing[0]
        return found.pop() if len(found) == 1 and found.issubset(special) else general

    def plan_graph(
        self, batch: AttentionBatch, num_rows: int, form: GraphForm, *, prompts: bool
    ) -> None:
        """As GraphPlanner.plan_graph, for each ubatch."""
        self._planned, self._planned_rows = None, num_rows
        for planner, (start, end) in self._with_rows(num_rows):
            planner.plan_graph(batch.ubatch(start, end), end - start, form, prompts=prompts)

    def _graph_planners(self) -> list[GraphPlanner]:
        return [GraphPlanner.of(own) for own in self.backends]

    def _with_rows(self, num_rows: int) -> Iterator[tuple[GraphPlanner, tuple[int, int]]]:
        """Yield planner and rows of each ubatch."""
        rows = ubatch_rows(num_rows, self.num_ubatches)
        return zip(self._graph_planners(), rows, strict=True)

    def forward(
        self, batch: ForwardBatch, hidden_after: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return the model's hidden states, [T, D]. Attention must have been planned for as many rows.

        hidden_after   as of DecoderLM.forward

        An error of a ubatch is raised here at once; the forwards of the other ubatches are unwound.
        """
        assert self._planned_rows == batch.num_rows, (self._planned_rows, batch.num_rows)
        parts = self._parts
        if batch is not self._planned:  # attention was planned with another batch, for a graph
            parts = cut(batch, batch.num_rows, self.num_ubatches)
        after = [dict(hidden_after or {}) for _ in parts]
        forwards = [
            partial(model.forward, part, hidden_after=own) if own else partial(model.forward, part)
            for model, part, own in zip(self._models, parts, after, strict=True)
        ]
        device = batch.input_ids.device
        streams = self._streams(device)
        side_streams = [*streams[1:], *(own.all2all.stream for own in self.backends)]
        try:
            with sm_split(self.backends, self.comm_sms, self._total_sms), forked(side_streams):
                hidden = alternate(forwards, device, streams)
        except BaseException:
            for own in self.backends:
                own.all2all.reset()
            raise
        if hidden_after:
            hidden_after |= {
                layer: torch.cat([own[layer] for own in after]) for layer in hidden_after
            }
        return torch.cat(hidden)

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """The compute stream of each ubatch in a graph, the first being the caller's; none for eager forwards."""
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return []
        return [own.stream or torch.cuda.current_stream(device) for own in self.backends]


def alternate(
    tasks: Sequence[Callable[[], T]],
    device: torch.device = CPU,
    streams: Sequence[torch.cuda.Stream] = (),
) -> list[T]:
    """Run the tasks in turns on this thread and return their results in order.

    A turn ends at a `Pending.wait`. Each task runs on its stream of `device`; without `streams` all run on the
    caller's. The first error is raised at once, and tasks that have begun are unwound by GreenletExit. A task must
    yield in the caller's inference mode, because the other tasks would inherit another one, and on its own stream.
    """
    assert not can_yield_ubatch(), "ubatches cannot be cut again"
    modes, caller = _modes(device), torch.cuda.current_stream() if streams else None
    ubatches = [_Ubatch(task, stream, modes()) for task, stream in zip_longest(tasks, streams)]
    turns = deque(ubatches)  # the first one runs
    left: torch.cuda.Event | None = None  # on the stream of the last turn, behind its work

    def leave() -> None:
        nonlocal left
        assert modes() == turns[0].modes, "a ubatch left a context manager open"
        if streams:
            left = torch.cuda.current_stream().record_event()

    def yield_ubatch() -> None:
        leave()
        turns.rotate(-1)
        turns[0].resume()

    def wait_previous_ubatch() -> None:
        if left is not None:
            torch.cuda.current_stream().wait_event(left)

    set_yield_ubatch(yield_ubatch, wait_previous_ubatch)
    try:
        while turns:
            result = turns[0].resume()  # returns when the task that runs has ended
            leave()
            turns.popleft().results.append(result)
    except BaseException as error:
        set_yield_ubatch(None)  # tasks that unwind must not yield to this loop
        for other in turns:
            other.unwind(error)
        raise
    finally:
        set_yield_ubatch(None)
        if caller is not None:
            torch.cuda.set_stream(caller)
    return [ubatch.results[0] for ubatch in ubatches]


def _modes(device: torch.device) -> Callable[[], tuple[bool, int]]:
    """Return a function that reads the thread's inference mode and current stream at each turn.

    It calls torch's private function, because the public one costs a microsecond.
    """
    inference_mode = torch.is_inference_mode_enabled
    if device.type != "cuda":
        return lambda: (inference_mode(), 0)
    index, current_stream = device.index, torch._C._cuda_getCurrentRawStream
    return lambda: (inference_mode(), current_stream(index))


class _Ubatch(Generic[T]):
    """One task, and the stream and modes that it runs in. `results` has its result once it has ended."""

    def __init__(
        self,
        task: Callable[[], T],
        stream: torch.cuda.Stream | None,
        modes: tuple[bool, int],
    ):
        self.results: list[T] = []
        self._greenlet = greenlet(task)
        self._switch: Callable[[], T] = self._greenlet.switch
        self._stream = stream
        self.modes = modes if stream is None else (modes[0], stream.cuda_stream)

    def resume(self) -> T:
        """Run it on its stream until it, or a task that it yields to, ends; return the result of that task."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        return self._switch()

    def unwind(self, error: BaseException) -> None:
        """Run its `finally` blocks if it has begun; note what they raise on `error`."""
        if self._greenlet.dead:
            return
        try:
            self._greenlet.throw()
        except BaseException as another:
            error.add_note(f"unwinding another ubatch raised {another!r}")


@contextmanager
def forked(streams: Iterable[torch.cuda.Stream | None]) -> Iterator[None]:
    """Make `streams` wait for the current stream at the begin, and the current stream for them at the end.

    It does so after an error too. So the memory of unwound ubatches may be freed, and a CUDA graph can hold all work.
    """
    forks = list(filter(None, streams))
    if not forks:
        yield
        return
    current = torch.cuda.current_stream()
    for stream in forks:
        stream.wait_stream(current)
    try:
        yield
    finally:
        for stream in forks:
            current.wait_stream(stream)


@contextmanager
def sm_split(backends: Sequence[Backends], comm_sms: int | None, total_sms: int) -> Iterator[None]:
    """Limit the all-to-alls to `comm_sms` of the device's SMs and the grouped GEMMs to the rest, until the end."""
    if comm_sms is None:
        yield
        return
    assert 0 < comm_sms < total_sms, f"{comm_sms} of {total_sms} SMs for the all-to-all"
    try:
        for own in backends:
            own.all2all.set_num_sms(comm_sms)
            own.grouped_gemm.set_num_sms(total_sms - comm_sms)
        yield
    finally:
        for own in backends:
            own.all2all.set_num_sms(None)
            own.grouped_gemm.set_num_sms(None)
