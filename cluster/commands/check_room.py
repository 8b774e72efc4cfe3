"""Refuses weights that are larger than a GPU, before anything loads, with settings under which they fit.

Every setting that an error proposes has passed the same arithmetic and the choice of backends. Builds nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from cluster.commands import check_memory
from cluster.config.errors import ConfigError
from kernels.backends import select
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.registry import GROUPED_GEMM
from workers.config import RankConfig
from workers.parallel import ParallelDims
from workers.rank.device_memory import size
from workers.specs.model import ModelConfig
from workers.weights.tensors import rank_weight_bytes


def refuse_too_large(
    config: RankConfig,
    model: ModelConfig,
    selection: select.Selection,
    unavailable: Mapping[str, str],
    shape: BackendShape,
    kernels: KernelsConfig,
) -> None:
    """Raise ConfigError if a rank's weights alone leave nothing of a GPU like the one here."""
    total, cache = check_memory.gpu_bytes(), config.cache
    if total is None:
        return
    allowed = total if cache.num_blocks != "auto" else int(total * cache.memory_fraction)
    needed = _weight_bytes(config, model, selection, config.dims)
    if needed < allowed:
        return

    def fits(kernels: KernelsConfig, num_ranks: int) -> int | None:
        """Return the bytes of a rank's weights under these settings if they can run and fit."""
        try:
            chosen = select.select(kernels, unavailable, replace(shape, num_ranks=num_ranks))
        except select.BackendChoiceError:
            return None
        dims = replace(config.dims, num_ranks=num_ranks)
        found = _weight_bytes(config, model, chosen, dims)
        return found if found < allowed else None

    remedies = " or ".join(_remedies(fits, config, model, kernels))
    advice = f"What fits: {remedies}" if remedies else "No number of ranks and no backend here fits"
    raise ConfigError(
        f"rank 0 needs {size(needed)} for weights, but may take {size(allowed)} of its GPU. {advice}"
    )


def _remedies(
    fits: Callable[[KernelsConfig, int], int | None],
    config: RankConfig,
    model: ModelConfig,
    kernels: KernelsConfig,
) -> Iterator[str]:
    """Yield settings under which the weights fit, each alone."""
    ranks = config.num_ranks
    for name in GROUPED_GEMM:
        found = fits(kernels.model_copy(update={"grouped_gemm": name}), ranks)
        if found is not None:
            yield f"kernels.grouped_gemm: {name} ({size(found)})"
    more = 2 * ranks
    while more <= model.num_experts:
        found = fits(kernels, more)
        if found is not None:
            yield f"cluster.ranks: {more} ({size(found)} each)"
            return
        more *= 2


def _weight_bytes(
    config: RankConfig, model: ModelConfig, selection: select.Selection, dims: ParallelDims
) -> int:
    dtype = config.model.dtype
    assert dtype != "auto", "a RankConfig has the checkpoint's dtype in its place"
    return rank_weight_bytes(
        model,
        dims.expert_map(model.num_experts, config.experts.redundant_slots),
        0,
        dtype,
        fp8_experts=selection.fp8_experts,
        fp8_dense=selection.fp8_dense,
        in_four_bits=selection.four_bit_experts,
    )
