"""Runs a module of kernels written in Gluon as Python: a thread for each group of warps, torch for what they compute.

What is asynchronous happens as late as it may: a product when it is waited for, a store when its buffer is asked back.
So a stage of a ring that is given back too early, a barrier that counts wrong or a missing wait gives wrong numbers or
an error here too. Registers, layouts, fences and speed are the compiler's; test_forms.py compiles the same kernels.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton  # noqa: F401 - before its parts are replaced

SHARED_PARTS = (
    *("kernels.triton.hopper_ring", "kernels.triton.hopper_tiles"),
    "kernels.triton.hopper_load_fp8",
)
PATIENCE_S = 60.0  # at a barrier, after which the kernel is taken for stuck
ADDRESSES = 2**63  # of two bytes each, after which they begin anew

Pending = list[Callable[[], object]]


class Registers(torch.Tensor):
    """Values of a group of warps."""

    def split(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Along the last axis, which is two long."""
        return self.unbind(-1)


class Pointer:
    """One or many places in a tensor's memory."""

    def __init__(self, memory: torch.Tensor, places: Any = 0):
        self.memory, self.places = memory, places

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.places + offset)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def read(self, mask: Any = True, other: Any = 0) -> Any:
        if isinstance(self.places, int):
            return self.memory[self.places].item()
        places = torch.where(torch.as_tensor(mask), self.places, 0)
        values = _gather(self.memory, places)
        return values if mask is True else torch.where(torch.as_tensor(mask), values, other)

    def write(self, values: torch.Tensor, mask: Any) -> None:
        places, mask, values = torch.broadcast_tensors(self.places, mask, values)
        _scatter(self.memory, places[mask], values[mask])


class Shared:
    """Shared memory, at first not numbers."""

    def __init__(self, values: torch.Tensor):
        self.values, self.shape, self.dtype = values, list(values.shape), values.dtype

    def index(self, index: int) -> "Shared":
        return Shared(self.values[index])

    def slice(self, start: int, length: int) -> "Shared":
        assert start + length <= self.shape[0]
        return Shared(self.values[start : start + length])

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.values.permute(*order))

    def load(self, _: Any) -> torch.Tensor:
        return self.values.clone()

    def store(self, values: torch.Tensor) -> None:
        assert list(values.shape) == self.shape, (values.shape, self.shape)
        self.values.copy_(values)


class Stuck(Exception):
    """A wait without end, or one whose end another group of warps will not bring."""


class Barrier:
    """An mbarrier: its phase ends when all have arrived, and all bytes that were announced."""

    def __init__(self, machine: "Machine"):
        self.machine = machine
        self.count = self.missing = self.bytes = self.phase = 0

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        with self.machine.changed:
            self.missing -= count
            self.bytes += num_bytes
            assert self.missing >= 0, "more arrived than the barrier counts"
            if self.missing == self.bytes == 0:
                self.missing, self.phase = self.count, self.phase ^ 1
                self.machine.changed.notify_all()

    def wait(self, phase: int) -> None:
        """Until the phase of this parity is over."""
        with self.machine.changed:
            self.machine.changed.wait_for(
                lambda: self.phase != phase or self.machine.errors, PATIENCE_S
            )
            if self.phase == phase:
                raise Stuck


class Descriptor:
    """A tensor in blocks: what lies outside reads as zero and is never written."""

    def __init__(
        self, base: torch.Tensor, shape: list[int], strides: list[int], block: list[int], _: Any
    ):
        size = base.element_size()
        assert strides[-1] == 1 and all(step * size % 16 == 0 for step in strides[:-1]), strides
        self.memory, self.shape, self.strides, self.block = _memory(base), shape, strides, block
        self.dtype, self.layout = base.dtype, None
        num_bytes = torch.Size(block).numel() * size
        self.block_type = SimpleNamespace(nbytes=num_bytes)

    def places(self, corner: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each element of a block: whether it is inside, and its place, 0 outside."""
        assert len(corner) == len(self.block)
        inside, places = torch.tensor(True), torch.tensor(0)
        for axis, start in enumerate(corner):
            line = range(start, start + self.block[axis])
            inside = inside.unsqueeze(-1) & torch.tensor(
                [0 <= at < self.shape[axis] for at in line]
            )
            steps = torch.tensor([at * self.strides[axis] % ADDRESSES for at in line])
            places = places.unsqueeze(-1) + steps & ADDRESSES - 1
        return inside, torch.where(inside, places, 0)

    def load(self, corner: Sequence[int]) -> torch.Tensor:
        inside, places = self.places(corner)
        values = _gather(self.memory, places)
        return torch.where(inside, values.float(), 0).to(values.dtype)

    def store(self, corner: Sequence[int], values: torch.Tensor) -> None:
        inside, places = self.places(corner)
        self.memory[places[inside]] = values[inside]


def _gather(memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Values of any dtype; torch indexes none of 8 bits but integers."""
    if memory.element_size() == 1:
        return memory.view(torch.uint8)[places].view(memory.dtype)
    return memory[places]


def _scatter(memory: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
    if memory.element_size() == 1:
        memory, values = memory.view(torch.uint8), values.view(torch.uint8)
    memory[places] = values


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All that follows its first element."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((count,), (1,))


class Warps(threading.local):
    """What a group of warps is, and what it began and has not waited for."""

    def __init__(self) -> None:
        self.num_warps = 4
        self.copies: Pending = []
        self.products: Pending = []
        self.stores: Pending = []


def _finish(pending: Pending, left: int = 0) -> None:
    """All but the last `left` of them."""
    while len(pending) > left:
        pending.pop(0)()


class Machine:
    """Runs programs one after the other, and is what kernels take for the language."""

    def __init__(self) -> None:
        self.warps = Warps()
        self.program = self.num_programs = 0
        self.changed, self.errors = threading.Condition(), list[BaseException]()

    def launch(
        self, kernel: Callable[..., None], grid: tuple[int], *args: Any, **named: Any
    ) -> None:
        """With the arguments of a compiled launch; options of the compiler are left out."""
        known = inspect.signature(kernel).parameters
        named = {name: value for name, value in named.items() if name in known}
        pointers = [Pointer(_memory(it)) if isinstance(it, torch.Tensor) else it for it in args]
        (self.num_programs,) = grid
        for program in range(self.num_programs):
            self.program = program
            kernel(*pointers, **named)

    def specialize(self, parts: list[Any], num_warps: list[int], _: list[int]) -> None:
        """Each part in a thread, the first with as many warps as the program."""
        sizes, inference = [self.warps.num_warps, *num_warps], torch.is_inference_mode_enabled()
        threads = [
            threading.Thread(target=self._run, args=(*part, size, inference))
            for part, size in zip(parts, sizes, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = self.errors[:]
        self.errors.clear()
        if errors:
            raise errors[0]  # the others wait for what it would have done

    def _run(
        self, part: Callable[..., None], args: tuple[Any, ...], num_warps: int, inference: bool
    ) -> None:
        own = self.warps
        own.num_warps = num_warps
        try:
            with torch.inference_mode(inference):
                part(*args)
            assert not (own.copies or own.products or own.stores), "something was not awaited"
        except BaseException as error:
            with self.changed:
                self.errors.append(error)
                self.changed.notify_all()

    def multiply(self, x: Shared, w: Shared, out: Any, *, use_acc: bool, is_async: bool) -> Any:
        assert is_async

        def product() -> None:
            before = out if use_acc else 0.0
            out.copy_(before + x.values.float() @ w.values.float())

        self.warps.products.append(product)
        return out

    def wait_products(self, left: int, results: tuple[Any, ...]) -> Any:
        _finish(self.warps.products, left)
        return results if len(results) > 1 else results[0]

    def fetch(self, buffer: Shared, pointer: Pointer) -> None:
        self.warps.copies.append(lambda: buffer.store(pointer.read()))

    def fetched(self, barrier: Barrier, increment_count: bool) -> None:
        """Every thread arrives when its own copies have."""
        assert not increment_count
        _finish(self.warps.copies)
        barrier.arrive(32 * self.warps.num_warps)

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        """Memory, or barriers where that is the layout."""
        if layout is MBARRIER:
            barriers = [Barrier(self) for _ in range(shape[0])]
            return SimpleNamespace(index=lambda index: barriers[index])
        return Shared(torch.full(shape, float("nan"), dtype=dtype))

    def language(self) -> SimpleNamespace:
        """What gl has, as far as it is used."""
        layout = lambda *_: None  # noqa: E731
        return SimpleNamespace(
            **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "float16")},
            bfloat16=torch.bfloat16,
            float8e4nv=torch.float8_e4m3fn,
            **dict.fromkeys(("BlockedLayout", "SliceLayout", "NVMMADistributedLayout"), layout),
            SwizzledSharedLayout=layout,
            NVMMASharedLayout=SimpleNamespace(get_default_for=layout),
            constexpr=type("constexpr", (int,), {"value": property(int)}),
            program_id=lambda _: self.program,
            num_programs=lambda _: self.num_programs,
            num_warps=lambda: self.warps.num_warps,
            warp_specialize=self.specialize,
            static_range=range,
            arange=lambda start, end, _: torch.arange(start, end),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype).as_subclass(Registers),
            load=lambda pointer, **options: pointer.read(**options),
            where=lambda condition, yes, no: yes if condition else no,
            store=lambda pointer, values, mask: pointer.write(values, mask),
            convert_layout=lambda values, _: values,
            inline_asm_elementwise=lambda *_, **__: None,
            thread_barrier=lambda: None,
            associative_scan=_sums_so_far,
            sum=lambda values, axis: int(values.sum(axis)),
            max=lambda values, axis: values.amax(axis),
            abs=torch.abs,
            exp=torch.exp,
            minimum=lambda values, limit: values.clamp(max=limit),
            maximum=lambda values, limit: values.clamp(min=limit),
            erf=torch.erf,
            static_assert=_check,
            reshape=lambda values, shape: values.reshape(shape),
            permute=lambda values, order: values.permute(order),
            allocate_shared_memory=self.allocate,
        )

    def modules(self) -> dict[str, Any]:
        """By name, what stands in for Gluon's."""
        language, root = self.language(), "triton.experimental.gluon"

        def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
            return jit if function is None else _Kernel(function, self)

        gluon = SimpleNamespace(jit=jit, constexpr_function=lambda it: it, language=language)
        warps = self.warps
        tma = SimpleNamespace(
            async_copy_global_to_shared=_receive,
            async_copy_shared_to_global=lambda tiles, corner, buffer: warps.stores.append(
                lambda: tiles.store(corner, buffer.values)
            ),
            store_wait=lambda left: _finish(warps.stores, left),
        )
        hopper = SimpleNamespace(
            tma=tma,
            mbarrier=MBARRIER,
            fence_async_shared=lambda: None,
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.wait_products,
        )
        async_copy = SimpleNamespace(
            async_copy_global_to_shared=self.fetch, mbarrier_arrive=self.fetched
        )
        return {
            "triton.experimental": SimpleNamespace(gluon=gluon),
            root: gluon,
            f"{root}.language": language,
            f"{root}.language.nvidia.hopper": hopper,
            f"{root}.language.nvidia.ampere": SimpleNamespace(async_copy=async_copy),
            f"{root}.nvidia.hopper": SimpleNamespace(TensorDescriptor=Descriptor),
        }


class _Kernel:
    """What gluon.jit makes of a function: called by others, or launched."""

    def __init__(self, function: Callable[..., Any], machine: Machine):
        self._function, self._machine = function, machine

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *args, **named: self._machine.launch(self._function, grid, *args, **named)


def _receive(tiles: Descriptor, corner: Sequence[int], barrier: Barrier, buffer: Shared) -> None:
    buffer.store(tiles.load(corner))
    barrier.arrive(0, -tiles.block_type.nbytes)


def _sums_so_far(values: torch.Tensor, axis: int, add: Callable[[Any, Any], Any]) -> torch.Tensor:
    assert add(2, 3) == 5
    return values.cumsum(axis)


def _check(condition: bool) -> None:
    assert condition


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


MBARRIER = SimpleNamespace(
    MBarrierLayout=lambda: MBARRIER,
    init=_init,
    expect=lambda barrier, num_bytes: barrier.arrive(1, num_bytes),
    wait=lambda barrier, phase: barrier.wait(phase),
    arrive=lambda barrier, pred=True: barrier.arrive(1) if pred else None,
)


def in_python(name: str) -> ModuleType:
    """The module of this name, and what such modules share, its kernels run as Python."""
    modules = Machine().modules()
    for part in (*SHARED_PARTS, name):
        spec = find_spec(part)
        assert spec is not None and spec.origin is not None
        modules[part] = ModuleType(part)
        source = compile(Path(spec.origin).read_text(), spec.origin, "exec")
        with mock.patch.dict(sys.modules, modules):
            exec(source, modules[part].__dict__)
    found: ModuleType = modules[name]
    return found
