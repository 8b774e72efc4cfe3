"""The slots of adapters on the device, at fixed addresses, and the flat host copies that fill them.

One copy brings an adapter into a slot. The products of the model read the slots through views. Knows nothing of
requests and of names.

S slots, e experts with adapters on this rank, P parts, r the largest rank, N outputs and K inputs of a product.
"""

import torch

from kernels.attention.latent_up import LatentUp
from kernels.lora.experts import ExpertAdapters, ExpertLora
from kernels.lora.product import EmbeddingLora, LoraWeights
from workers.adapters.expert_layout import ExpertFill, ExpertProduct
from workers.adapters.layout import AdapterLayout, Product
from workers.adapters.peft_folder import LoraPair, PeftFolder, check_finite
from workers.layers.linear import Linear
from workers.models.decoder import DecoderLM
from workers.weights.slots import WeightSlot, parameter_of


class AdapterPools:
    """The slots 1 to `num_slots` of one rank; `attach` makes a model read them.

    pool   [S, values of a slot] on the device
    """

    def __init__(
        self, layout: AdapterLayout, num_slots: int, *, device: torch.device, dtype: torch.dtype
    ):
        self.layout = layout
        self._pinned = device.type == "cuda"
        self.pool = torch.zeros(num_slots, layout.size, device=device, dtype=dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.pool.numel() * self.pool.element_size()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, and of one adapter in host memory."""
        return self.num_bytes // len(self.pool)

    def attach(self, model: DecoderLM) -> None:
        """Let the products of `model`, and of its views, add the adapters of their rows."""
        for product in self.layout.products:
            a_SQK, b_SNr = self._views(self.pool, product)
            if product.is_table:
                model.embedding_lora = EmbeddingLora(a_SQK, b_SNr)
                continue
            linear: Linear | LatentUp = parameter_of(model, product.linear)
            linear.lora = LoraWeights(a_SQK, b_SNr, product.blocks)
        of_blocks: dict[str, list[ExpertLora]] = {}
        for routed in self.layout.experts.products:
            places_e = parameter_of(model, routed.block).adapter_places(routed.num_experts)
            adapters = ExpertLora(*self._expert_views(self.pool, routed), routed.blocks, places_e)
            of_blocks.setdefault(routed.block, []).append(adapters)
        for path, (up, down) in of_blocks.items():
            parameter_of(model, path).lora = ExpertAdapters(up, down)

    def stage(self, folder: PeftFolder) -> torch.Tensor:
        """Return the host copy of an adapter: zeros where the adapter has nothing. Raises AdapterError."""
        placed = self.layout.place(folder)
        staged = torch.zeros(1, self.layout.size, dtype=self.pool.dtype, pin_memory=self._pinned)
        with folder.tensors() as tensors:
            for name, pair in folder.pairs.items():
                a, b = tensors.get_tensor(pair.a), tensors.get_tensor(pair.b)
                check_finite(a, pair.a, folder.folder)
                check_finite(b, pair.b, folder.folder)
                if name in placed.parts:
                    self._fill_part(staged, pair, a, b, *placed.parts[name])
                else:
                    self._fill_experts(staged, pair, a, b, placed.experts[name])
        return staged[0]

    def _fill_part(
        self,
        staged: torch.Tensor,
        pair: LoraPair,
        a_rK: torch.Tensor,
        b_Nr: torch.Tensor,
        product: Product,
        part: int,
    ) -> None:
        a_SQK, b_SNr = self._views(staged, product)
        first = part * self.layout.rank
        scaled_Nr = b_Nr.float() * pair.scale(pair.rank)
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

    def _fill_experts(
        self,
        staged: torch.Tensor,
        pair: LoraPair,
        a: torch.Tensor,
        b: torch.Tensor,
        fills: list[ExpertFill],
    ) -> None:
        for fill in fills:
            product, part = fill.product, fill.part
            a_SeQK, b_SeNr = self._expert_views(staged, product)
            a_rK, b_Nr = fill.matrices(a, b)
            rank, first = len(a_rK), part * self.layout.rank
            a_SeQK[0, fill.place, first : first + rank] = a_rK
            start, end, _ = product.blocks[part]
            b_SeNr[0, fill.place, start:end, :rank] = b_Nr.float() * pair.scale(rank)

    def write(self, slot: int, staged: torch.Tensor) -> None:
        """Copy an adapter into a slot, behind the work of the current stream."""
        self.pool[slot - 1].copy_(staged, non_blocking=True)

    def _views(self, pool: torch.Tensor, product: Product) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [S, P * r, K], of an embedding [S, K, r], and B [S, N, r] of a product."""
        rank, count = self.layout.rank, len(pool)
        height = len(product.modules) * rank
        a_end, b_end = product.a + height * product.columns, product.b + product.rows * rank
        shape = (product.columns, rank) if product.is_table else (height, product.columns)
        a_SQK = pool[:, product.a : a_end].view(count, *shape)
        return a_SQK, pool[:, product.b : b_end].view(count, product.rows, rank)

    def _expert_views(
        self, pool: torch.Tensor, product: ExpertProduct
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [S, e, P * r, K] and B [S, e, N, r] of a product of experts."""
        rank, slots, experts = self.layout.rank, len(pool), product.num_experts
        height = product.num_parts * rank
        a_end = product.a + experts * height * product.columns
        b_end = product.b + experts * product.rows * rank
        a_SeQK = pool[:, product.a : a_end].view(slots, experts, height, product.columns)
        return a_SeQK, pool[:, product.b : b_end].view(slots, experts, product.rows, rank)
