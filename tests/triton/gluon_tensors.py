"""Runs a module of kernels written in Gluon, without groups of warps, as Python: registers are torch's tensors.

A product of groups of warps happens when it is waited for, so that one whose operands are overwritten before is wrong.
Assembly is replaced by functions of the test. Layouts are the compiler's: test_forms.py compiles the same kernels, and
a conversion that is asserted to move nothing fails there if it does.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.triton.gluon_in_python import Pending, Pointer, Shared, _finish, _memory

Assembly = Mapping[str, Callable[..., tuple[torch.Tensor, ...]]]


class Values(torch.Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> "Values":  # type: ignore[override]
        plain = self.as_subclass(torch.Tensor)
        found = plain.contiguous().view(dtype) if bitcast else plain.to(dtype)
        return found.as_subclass(Values)


def values(x: Any) -> Any:
    """Return x as registers."""
    return x.as_subclass(Values) if isinstance(x, torch.Tensor) else x


class Constant:
    """gl.constexpr: of a call the value itself, in annotations nothing."""

    def __new__(cls, value: Any) -> Any:
        return value


class Layout:
    """Any layout; `value` is what a constexpr of it holds."""

    def __init__(self, *_: Any):
        self.value = self


class Language:
    """What kernels take for `gluon.language`."""

    def __init__(self, assembly: Assembly):
        self.program = (0, 0)
        self._assembly = assembly
        self._products: Pending = []

    def multiply(
        self, x: Shared, y: Shared, total: torch.Tensor, *, use_acc: bool, is_async: bool
    ) -> torch.Tensor:
        """Begin a product, which is no number before it is waited for."""
        assert is_async
        out = values(torch.full_like(total, float("nan")))
        before = total if use_acc else torch.zeros_like(total)
        product = lambda: out.copy_(before + x.values.float() @ y.values.float())  # noqa: E731
        self._products.append(product)
        return out

    def wait(self, left: int, results: tuple[Any, ...]) -> Any:
        """Wait for all but the last `left` products."""
        _finish(self._products, left)
        return results if len(results) > 1 else results[0]

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        """Shared memory, at first not numbers."""
        memory = torch.empty(shape, dtype=dtype)
        memory.view(torch.uint8).fill_(255)
        return Shared(values(memory))

    def namespace(self) -> SimpleNamespace:
        """Return the names."""
        layouts = ("DistributedLinearLayout", "NVMMADistributedLayout", "DotOperandLayout")
        types = ("int32", "int64", "float32", "float16", "bfloat16")
        return SimpleNamespace(
            **dict.fromkeys((*layouts, "BlockedLayout", "SliceLayout"), Layout),
            SwizzledSharedLayout=Layout,
            NVMMASharedLayout=SimpleNamespace(get_default_for=Layout),
            **{name: getattr(torch, name) for name in types},
            float8e4nv=torch.float8_e4m3fn,
            allocate_shared_memory=self.allocate,
            thread_barrier=lambda: None,
            constexpr=Constant,
            program_id=lambda axis: values(torch.tensor(self.program[axis], dtype=torch.int32)),
            load=lambda at, mask=True, other=0: values(_load(at, mask, other)),
            store=lambda at, x, mask: at.write(x.as_subclass(torch.Tensor), mask),
            arange=lambda start, end, _: values(torch.arange(start, end)),
            full=lambda shape, x, dtype, _: values(torch.full(shape, x, dtype=dtype)),
            zeros=lambda shape, dtype, _: values(torch.zeros(shape, dtype=dtype)),
            convert_layout=lambda x, _, assert_trivial=False: x,
            inline_asm_elementwise=lambda asm, _, args, *__: tuple(
                values(x) for x in self._assembly[getattr(asm, "value", asm)](*args)
            ),
            join=lambda x, y: torch.stack((x, y), -1),
            split=lambda x: x.unbind(-1),
            reshape=lambda x, shape: x.reshape(shape),
            permute=lambda x, order: x.permute(order),
            where=lambda seen, x, y: values(torch.where(seen, x, y)),
            minimum=_of_any(torch.minimum),
            maximum=_of_any(torch.maximum),
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            abs=torch.abs,
            exp2=torch.exp2,
            log2=torch.log2,
        )


def _load(at: Pointer, mask: Any, other: Any) -> Any:
    found = at.read(mask, other)
    return torch.tensor(found, dtype=at.memory.dtype) if isinstance(found, int) else found


def _of_any(function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], Any]:
    def of(x: Any, y: Any) -> Any:
        return values(function(torch.as_tensor(x), torch.as_tensor(y)))

    return of


class _Kernel:
    """What gluon.jit makes of a function: called by others, or launched."""

    def __init__(self, function: Callable[..., Any], language: Language):
        self._function, self._language = function, language

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            known = inspect.signature(self._function).parameters
            named = {name: value for name, value in named.items() if name in known}
            pointers = [Pointer(_memory(it)) if isinstance(it, torch.Tensor) else it for it in args]
            for first in range(grid[0]):
                for second in range(grid[1]):
                    self._language.program = first, second
                    self._function(*pointers, **named)

        return launch


def in_python(name: str, assembly: Assembly, parts: Sequence[str] = ()) -> ModuleType:
    """Return the module of this name, its kernels run as Python, and with it those of `parts`, which it imports.

    assembly   what stands in for each text
    """
    language, root = Language(assembly), "triton.experimental.gluon"

    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return jit if function is None else _Kernel(function, language)

    def mma(x: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return values(total + (x.float() @ y.float()))

    gluon = SimpleNamespace(jit=jit, language=language.namespace())
    modules: dict[str, Any] = {
        "triton.experimental": SimpleNamespace(gluon=gluon),
        root: gluon,
        f"{root}.language": gluon.language,
        f"{root}.language.nvidia.ampere": SimpleNamespace(mma_v2=mma),
        f"{root}.language.nvidia.hopper": SimpleNamespace(
            fence_async_shared=lambda: None,
            warpgroup_mma=language.multiply,
            warpgroup_mma_wait=language.wait,
        ),
        f"{root}.nvidia.hopper": SimpleNamespace(TensorDescriptor=None),
    }
    for part in (*parts, name):
        spec = find_spec(part)
        assert spec is not None and spec.origin is not None
        modules[part] = ModuleType(part)
        source = compile(Path(spec.origin).read_text(), spec.origin, "exec")
        with mock.patch.dict(sys.modules, modules):
            exec(source, modules[part].__dict__)
    found: ModuleType = modules[name]
    return found
