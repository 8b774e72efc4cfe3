"""Fills the flat host copy of an adapter from the tensors of its file. Knows nothing of devices.

Pairs of single experts at neighbouring places are one copy, and several threads copy them: calls that release
Python's lock for each of tens of thousands of small matrices would make the threads wait for each other. See `layout`
for the letters; e experts.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from workers.adapters.expert_layout import ExpertProduct, FusedFill, SingleFill
from workers.adapters.layout import AdapterLayout, PartFill, Placed, Product
from workers.adapters.mapped_tensors import Scratch
from workers.adapters.peft_folder import LoraPair, PeftFolder, check_finite
from workers.weights.slots import WeightSlot

COPIERS = 4  # threads of one adapter

Single = tuple[SingleFill, LoraPair]


class Staging:
    """The copy of one adapter into `staged` [1, values of a slot], which holds zeros."""

    def __init__(self, layout: AdapterLayout, folder: PeftFolder, staged: torch.Tensor):
        self._rank, self._folder, self._staged = layout.rank, folder, staged

    def run(self, placed: Placed) -> None:
        """Copy all pairs. Raises AdapterError for values that are no numbers."""
        singles: list[Single] = []
        for name, fills in placed.items():
            pair = self._folder.pairs[name]
            fused = [fill for fill in fills if isinstance(fill, FusedFill)]
            if fused:
                self._fill_fused(pair, fused)
            for fill in fills:
                if isinstance(fill, PartFill):
                    self._fill_part(pair, fill)
                elif isinstance(fill, SingleFill):
                    singles.append((fill, pair))
        batches = list(self._batches(singles))
        count = min(COPIERS, len(batches))  # the pool starts no thread without work
        with ThreadPoolExecutor(COPIERS, "copies") as pool:
            list(pool.map(self._fill_batches, (batches[n::count] for n in range(count))))

    def _checked(self, name: str) -> torch.Tensor:
        tensor = self._folder.tensors.tensor(name)
        check_finite(tensor.unsqueeze(0), [name], self._folder.folder)
        return tensor

    def _fill_part(self, pair: LoraPair, fill: PartFill) -> None:
        product, part, factor = fill
        a_rK, b_Nr = self._checked(pair.a), self._checked(pair.b)
        a_SQK, b_SNr = views(self._staged, product, self._rank)
        first = part * self._rank
        scaled_Nr = b_Nr.float() * factor
        if product.is_table:
            a_SQK[0, :, : pair.rank] = a_rK.t()
            b_SNr[0, :, : pair.rank] = scaled_Nr
            return
        a_SQK[0, first : first + pair.rank] = a_rK
        for entry, its_part in product.entries:
            if its_part == part:
                target = b_SNr[0, slice(*(entry.rows or (0, product.rows))), : pair.rank]
                shape = (pair.outputs, pair.rank)
                rows = entry._replace(shape=shape, transposed=False)
                WeightSlot.rows(target, rows, 1.0).fill(scaled_Nr)

    def _fill_fused(self, pair: LoraPair, fills: list[FusedFill]) -> None:
        a, b = self._checked(pair.a), self._checked(pair.b)
        floats = Scratch()
        for fill in fills:
            a_erK, b_eNr = fill.matrices(a, b)
            rank = a_erK.shape[1]
            a_target, b_target = self._targets(fill.product, fill.part, fill.places, rank)
            a_target.copy_(a_erK)
            _copy_scaled(b_target, b_eNr, fill.factor, floats)

    def _batches(self, singles: Iterable[Single]) -> Iterator[list[Single]]:
        """Yield pairs of neighbours of one part, with equal shapes, dtypes and factors."""
        stored = self._folder.tensors.stored
        batch: list[Single] = []
        last: tuple[object, ...] = ()
        for single in sorted(singles, key=lambda it: (it[0].product.a, it[0].part, it[0].place)):
            (product, part, place, factor), pair = single
            form = pair.rank, factor, stored[pair.a].dtype, stored[pair.b].dtype
            if batch and (product.a, part, place - 1, *form) != last:
                yield batch
                batch = []
            batch.append(single)
            last = product.a, part, place, *form
        if batch:
            yield batch

    def _fill_batches(self, batches: list[list[Single]]) -> None:
        values, floats = Scratch(), Scratch()
        for batch in batches:
            (product, part, first, factor), pair = batch[0]
            places = slice(first, first + len(batch))
            a_target, b_target = self._targets(product, part, places, pair.rank)
            a_target.copy_(self._stack([it.a for _, it in batch], values))
            b_eNr = self._stack([it.b for _, it in batch], values)
            _copy_scaled(b_target, b_eNr, factor, floats)

    def _stack(self, names: list[str], scratch: Scratch) -> torch.Tensor:
        stacked = self._folder.tensors.stack(names, scratch)
        check_finite(stacked, names, self._folder.folder)
        return stacked

    def _targets(
        self, product: ExpertProduct, part: int, places: slice, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [e, rank, K] and B [e, N / P, rank] of these places in the host copy."""
        a_SeQK, b_SeNr = expert_views(self._staged, product, self._rank)
        first, (start, end, _) = part * self._rank, product.blocks[part]
        return (
            a_SeQK[0, places, first : first + rank],
            b_SeNr[0, places, start:end, :rank],
        )


def _copy_scaled(
    target: torch.Tensor, values: torch.Tensor, factor: float, scratch: Scratch
) -> None:
    """Copy the products of `values` and a factor, which are rounded to float32 and to the target's dtype."""
    if factor == 1.0:
        target.copy_(values)
        return
    floats = scratch.take(values.shape, torch.float32)
    target.copy_(floats.copy_(values).mul_(factor))


def views(pool: torch.Tensor, product: Product, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [S, P * r, K], of an embedding [S, K, r], and B [S, N, r] of a product in `pool`."""
    count, height = len(pool), len(product.modules) * rank
    a_end, b_end = product.a + height * product.columns, product.b + product.rows * rank
    shape = (product.columns, rank) if product.is_table else (height, product.columns)
    a_SQK = pool[:, product.a : a_end].view(count, *shape)
    return a_SQK, pool[:, product.b : b_end].view(count, product.rows, rank)


def expert_views(
    pool: torch.Tensor, product: ExpertProduct, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [S, e, P * r, K] and B [S, e, N, r] of a product of experts in `pool`."""
    slots, experts, height = len(pool), product.num_experts, product.num_parts * rank
    a_end = product.a + experts * height * product.columns
    b_end = product.b + experts * product.rows * rank
    a_SeQK = pool[:, product.a : a_end].view(slots, experts, height, product.columns)
    return a_SeQK, pool[:, product.b : b_end].view(slots, experts, product.rows, rank)
