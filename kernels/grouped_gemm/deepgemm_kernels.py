"""Compiles DeepGEMM's kernels of a model in several processes, before its ranks need them.

DeepGEMM compiles a kernel within the first call that needs it. One process compiles one kernel at a time: the table of
loaded kernels has no lock, so threads must not call at once. Each process here calls products of other shapes, and
finds in the folder what another process has compiled. Tensors lie in managed memory, and no expert has rows: their
weights take no memory of the GPU.

N rows, K columns of a weight matrix.
"""

import ctypes
import hashlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.block_fp8 import BLOCK, num_blocks
from kernels.grouped_gemm.deepgemm_package import installed, load_deep_gemm
from kernels.host.cache_folder import cache_folder
from kernels.interface.backend import BackendShape
from kernels.routing.device_routing import max_permuted
from kernels.routing.expert_map import ContiguousMap

MOST_PROCESSES = 16  # each holds some 0.5 GB of a GPU
NICENESS = 10  # attention's compilers beside them take longest, so they come first
_ATTACH_GLOBAL = 1  # CU_MEM_ATTACH_GLOBAL


class Product(NamedTuple):
    """Rows times the weights [N, K] of each of `num_groups` experts, or of a dense product (0)."""

    num_groups: int
    width: int
    depth: int
    num_rows: int
    fp8: bool


def products_of(
    shape: BackendShape,
    dense: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    *,
    fp8: bool,
    alignment: int,
    fewest: float = 0.0,
) -> list[Product]:
    """Return the products of steps of `sizes` tokens a rank, with the rows of experts in contiguous groups.

    dense    [N, K] of the dense products in FP8
    fewest   mean rows of an expert that DeepGEMM multiplies
    """
    found = [Product(0, *matrix, size, True) for matrix in dict.fromkeys(dense) for size in sizes]
    expert_map = ContiguousMap(shape.num_experts, shape.num_ranks)
    counts = {len(expert_map.slots_of(rank)) for rank in range(shape.num_ranks)}
    width, hidden, top_k = shape.moe_intermediate_size, shape.hidden_size, shape.top_k
    for num_rows in (size * shape.num_ranks for size in sizes):
        if num_rows * top_k / shape.num_experts < fewest:
            continue
        for experts in sorted(counts - {0}):
            permuted = max_permuted(num_rows, top_k, experts, alignment)
            found.append(Product(experts, 2 * width, hidden, permuted, fp8))
            found.append(Product(experts, hidden, width, permuted, fp8))
    return found


def compile_products(products: Sequence[Product]) -> int:
    """Compile the kernels of these products unless that was done before; return the number of processes.

    Raises BrokenProcessPool if a process dies, and the error of a call.
    """
    num_gpus = torch.cuda.device_count()
    done = _mark(products)
    if done.exists() or not products:
        return 0
    cores = len(os.sched_getaffinity(0))
    count = min(MOST_PROCESSES, max(1, cores // 2), len(products))
    context = multiprocessing.get_context("spawn")
    counter = context.Value("i", 0)
    with ProcessPoolExecutor(count, context, _begin, (counter, num_gpus)) as pool:
        for _ in pool.map(_call, spread(products)):
            pass
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
    return count


def _mark(products: Sequence[Product]) -> Path:
    """Return the file beside the kernels that exists once these products are compiled for this GPU and software."""
    facts = (installed(), torch.__version__, torch.cuda.get_device_name(0), sorted(products))
    folder = os.environ.get("DG_JIT_CACHE_DIR") or cache_folder() / "deep_gemm"
    return Path(folder) / f"compiled-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def spread(products: Sequence[Product]) -> list[Product]:
    """Return the products with neighbours far apart, because neighbours often share a kernel."""
    bits = len(products).bit_length()
    order = sorted(range(len(products)), key=lambda index: f"{index:0{bits}b}"[::-1])
    return [products[index] for index in order]


_memory: list[torch.Tensor] = []  # of this process: weights, rows, results


def _begin(counter: "multiprocessing.sharedctypes.Synchronized[int]", num_gpus: int) -> None:
    with counter.get_lock():
        index, counter.value = counter.value, counter.value + 1
    os.nice(NICENESS)
    torch.cuda.set_device(index % num_gpus)
    torch.zeros(1, device="cuda")  # makes CUDA's context, which the driver's allocations need


def _call(product: Product) -> None:
    """Run one product, in a process of the pool."""
    deep_gemm = load_deep_gemm()
    groups, width, depth, num_rows, fp8 = product
    itemsize = 1 if fp8 else 2
    experts = max(1, groups)
    sizes = (experts * width * depth * itemsize, num_rows * depth * itemsize, 2 * num_rows * width)
    weights, rows, out = map(_managed, range(3), sizes)
    w = weights.view(torch.float8_e4m3fn if fp8 else torch.bfloat16).view(experts, width, depth)
    x = rows.view(w.dtype).view(num_rows, depth)
    y = out.view(torch.bfloat16).view(num_rows, width)
    w_scales, x_scales = _scales(experts, width, depth, num_rows)
    ends = torch.zeros(experts, dtype=torch.int32, device="cuda")
    if not groups:
        deep_gemm.fp8_gemm_nt((x, x_scales), (w[0], w_scales[0]), y)
    elif fp8:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (x, x_scales), (w, w_scales), y, ends, use_psum_layout=True
        )
    else:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w, y, ends, use_psum_layout=True)
    torch.cuda.synchronize()


def _scales(
    experts: int, width: int, depth: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales of weights and of rows, in the order in which the model's kernels write them."""
    from kernels.triton.quantise_rows import empty_scales

    shape = (experts, num_blocks(width), num_blocks(depth))
    device = torch.device("cuda", torch.cuda.current_device())
    of_rows = empty_scales(num_rows, depth // BLOCK, device)
    return torch.empty(shape, dtype=torch.float32, device=device), of_rows


def _managed(index: int, num_bytes: int) -> torch.Tensor:
    """Return bytes at a place that is used again by the next call; pages take memory once they are used."""
    while len(_memory) <= index:
        _memory.append(torch.empty(0, dtype=torch.uint8, device="cuda"))
    if len(_memory[index]) < num_bytes:
        # Never freed: a process lives for some seconds.
        _memory[index] = torch.as_tensor(_Managed(num_bytes), device="cuda")
    return _memory[index][:num_bytes]


class _Managed:
    """Memory of the driver that moves to the GPU page by page."""

    def __init__(self, num_bytes: int):
        driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
        code = driver.cuMemAllocManaged(
            ctypes.byref(address), ctypes.c_size_t(num_bytes), _ATTACH_GLOBAL
        )
        if code:
            raise RuntimeError(f"cuMemAllocManaged of {num_bytes} bytes: CUDA error {code}")
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address.value, False),
            "version": 3,
        }
