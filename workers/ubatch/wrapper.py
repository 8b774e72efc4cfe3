"""Runs a forward as slices that alternate on one thread, so that one's exchange travels while another one computes.

Each slice's forward runs in a greenlet: wherever it is about to wait for an exchange (`Pending.wait`) it hands over to
the next slice, round robin, so slice i reaches every layer before slice i + 1 does. Model code knows nothing of it. The
one rule: no context manager that changes the thread (inference mode, stream) may be open around a wait.

In a CUDA graph each slice computes on a stream of its own: its kernels take the SMs that another slice's leave idle at
their ends, which takes 3 to 7 % off prefills in slices and 19 % off decodes (two H200). `wait_previous_ubatch` keeps
them in turn where it matters, or all would compute at once and then all wait: 112 ms instead of 104 (8,192 tokens a
rank on four H200; 107 on one stream). Eagerly all share one: there the GPU waits for the host, and a change of streams
costs 1 to 2 us.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch
from greenlet import greenlet

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.backends.select import Backends
from kernels.pending import can_yield_ubatch, set_yield_ubatch
from workers.runner.forward_batch import ForwardBatch
from workers.trace.recorder import SpanRecorder
from workers.ubatch.batch_cuts import cut, ubatch_rows

T = TypeVar("T")
CPU = torch.device("cpu")


class UbatchModel(Protocol):
    """A model whose weights can be used with several sets of kernels."""

    def with_kernels(self, kernels: Backends) -> "UbatchModel":
        """The same weights, other kernels."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """hidden_TD of the batch's rows."""


class UBatchWrapper:
    """A model's `forward`, and its attention's `plan`, cut into as many slices as there are `kernels`.

    Each slice has its own exchange and attention, because several are under way at once; the attentions must be
    bound to the same KV caches. Make it when the weights are loaded.

    comm_sms    SMs of the exchange while slices alternate, the rest being the expert product's; None: no limit
    total_sms   SMs of the device, 0 without one
    """

    def __init__(
        self,
        model: UbatchModel,
        kernels: Sequence[Backends],
        *,
        comm_sms: int | None = None,
        total_sms: int = 0,
    ):
        self.comm_sms = comm_sms
        self._model = model
        self._total_sms = total_sms
        self._kernels = kernels
        self._models = [model.with_kernels(own) for own in kernels]
        self._planned: AttentionBatch | None = None
        self._parts: list[ForwardBatch] = []

    @property
    def num_ubatches(self) -> int:
        """How many slices a step is cut into."""
        return len(self._kernels)

    def recorded(self, recorder: SpanRecorder) -> "UBatchWrapper":
        """Return the same wrapper with all-to-alls that `recorder` follows."""
        kernels = [recorder.record(own, ubatch) for ubatch, own in enumerate(self._kernels)]
        return UBatchWrapper(
            self._model, kernels, comm_sms=self.comm_sms, total_sms=self._total_sms
        )

    def plan(self, batch: ForwardBatch) -> None:
        """Plan attention for each ubatch of `batch`."""
        self._planned, self._parts = batch, cut(batch, batch.num_rows, self.num_ubatches)
        for own, part in zip(self._kernels, self._parts, strict=True):
            own.attention.plan(part)

    def reserve_graphs(self, max_rows: int, max_seqs: int, max_blocks: int) -> None:
        """As the attention's, for each slice of graphs of up to `max_rows` rows."""
        for own in self._kernels:
            attention: Any = own.attention
            attention.reserve_graphs(-(-max_rows // self.num_ubatches), max_seqs, max_blocks)

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        """As the attention's, but decodes have one form alone: they are rarely worth cutting."""
        attention: Any = self._kernels[0].attention
        forms: tuple[GraphForm, ...] = attention.forms(
            num_rows // self.num_ubatches, prompts=prompts
        )
        return forms if prompts else forms[-1:]

    def form(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> GraphForm:
        """As the attention's: the one that serves all slices."""
        general = self.forms(num_rows, prompts=prompts)[-1]
        if not prompts:
            return general
        attentions: list[Any] = [own.attention for own in self._kernels]
        found = {
            attention.form(batch.ubatch(start, end), end - start, prompts=True)
            for attention, (start, end) in zip(
                attentions, ubatch_rows(num_rows, self.num_ubatches), strict=True
            )
        }
        return found.pop() if len(found) == 1 else general

    def plan_graph(self, batch: AttentionBatch, num_rows: int, form: GraphForm) -> None:
        """As the attention's, for each slice."""
        self._planned = None
        rows = ubatch_rows(num_rows, self.num_ubatches)
        for own, (start, end) in zip(self._kernels, rows, strict=True):
            attention: Any = own.attention
            attention.plan_graph(batch.ubatch(start, end), end - start, form)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the model's hidden states, [T, D]. Attention must have been planned for the rows of `batch`.

        An error of a ubatch is raised here at once; the forwards of the other ubatches are unwound.
        """
        parts = self._parts
        if batch is not self._planned:  # attention was planned with another batch, for a graph
            parts = cut(batch, batch.num_rows, self.num_ubatches)
        forwards = [
            partial(model.forward, part) for model, part in zip(self._models, parts, strict=True)
        ]
        device = batch.input_ids.device
        streams = self._streams(device)
        beside = [*streams[1:], *(own.all2all.stream for own in self._kernels)]
        with sm_split(self._kernels, self.comm_sms, self._total_sms), forked(beside):
            hidden = alternate(forwards, device, streams)
        return torch.cat(hidden)

    def _streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """What each slice computes on in a graph, the first on the caller's; none where all share that."""
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return []
        return [own.stream or torch.cuda.current_stream(device) for own in self._kernels]


def alternate(
    tasks: Sequence[Callable[[], T]],
    device: torch.device = CPU,
    streams: Sequence[torch.cuda.Stream] = (),
) -> list[T]:
    """Run the tasks by turns on this thread, changing at each `Pending.wait`; their results in order.

    Each task runs on its stream of `device`, without `streams` on the caller's. The first error is raised at once;
    tasks that have begun are unwound by GreenletExit. No task may hand over in another inference mode than the
    caller's, which the others would inherit, or on another stream than its own.
    """
    assert not can_yield_ubatch(), "slices cannot be cut again"
    modes, caller = _modes(device), torch.cuda.current_stream() if streams else None
    slices = [_Slice(task, stream, modes()) for task, stream in zip_longest(tasks, streams)]
    turns = deque(slices)  # the first one runs
    left: torch.cuda.Event | None = None  # what the last turn that is over gave its stream

    def leave() -> None:
        nonlocal left
        assert modes() == turns[0].modes, "a slice left a context manager open"
        if streams:
            left = torch.cuda.current_stream().record_event()

    def yield_ubatch() -> None:
        leave()
        turns.rotate(-1)
        turns[0].go_on()

    def wait_previous_ubatch() -> None:
        if left is not None:
            torch.cuda.current_stream().wait_event(left)

    set_yield_ubatch(yield_ubatch, wait_previous_ubatch)
    try:
        while turns:
            result = turns[0].go_on()  # back when the one that runs has ended
            leave()
            turns.popleft().result = result
    except BaseException as error:
        set_yield_ubatch(None)  # what unwinds must not come back here
        for other in turns:
            if not other.dead:
                other.unwind(error)
        raise
    finally:
        set_yield_ubatch(None)
        if caller is not None:
            torch.cuda.set_stream(caller)
    return [part.result for part in slices]


def _modes(device: torch.device) -> Callable[[], tuple[bool, int]]:
    """The thread's inference mode and current stream. Asked at each turn: public calls cost a microsecond."""
    inference_mode = torch.is_inference_mode_enabled
    if device.type != "cuda":
        return lambda: (inference_mode(), 0)
    index, current_stream = device.index, torch._C._cuda_getCurrentRawStream
    return lambda: (inference_mode(), current_stream(index))


class _Slice(greenlet):
    """One task, the stream and modes that it runs in, and its result when it has ended."""

    result: T | None = None

    def __init__(
        self,
        task: Callable[[], T],
        stream: torch.cuda.Stream | None,
        modes: tuple[bool, int],
    ):
        super().__init__(task)
        self._stream = stream
        self.modes = modes if stream is None else (modes[0], stream.cuda_stream)

    def go_on(self) -> T:
        """Run it, on its stream, until it or one that it hands over to ends; what that one returns."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        return self.switch()

    def unwind(self, error: BaseException) -> None:
        """Run its `finally` blocks; what they raise is noted on `error`."""
        try:
            self.throw()
        except BaseException as another:
            error.add_note(f"unwinding another slice raised {another!r}")


@contextmanager
def forked(streams: Iterable[torch.cuda.Stream | None]) -> Iterator[None]:
    """`streams` go on behind what the current one was given by now, and it behind them, also where an error ends it.

    So whatever slices that are unwound held may be freed, and a CUDA graph can hold all of it.
    """
    streams = list(filter(None, streams))
    current = torch.cuda.current_stream() if streams else None
    for stream in streams:
        stream.wait_stream(current)
    try:
        yield
    finally:
        for stream in streams:
            current.wait_stream(stream)


@contextmanager
def sm_split(kernels: Sequence[Backends], comm_sms: int | None, total_sms: int) -> Iterator[None]:
    """`comm_sms` of the device's SMs for the exchanges, the others for the expert product; no limit afterwards."""
    if comm_sms is None:
        yield
        return
    assert 0 < comm_sms < total_sms, f"{comm_sms} of {total_sms} SMs for the exchange"
    try:
        for own in kernels:
            own.all2all.set_num_sms(comm_sms)
            own.grouped_gemm.set_num_sms(total_sms - comm_sms)
        yield
    finally:
        for own in kernels:
            own.all2all.set_num_sms(None)
            own.grouped_gemm.set_num_sms(None)
