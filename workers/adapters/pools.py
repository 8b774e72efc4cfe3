"""The slots of adapters on the device, at fixed addresses, and the flat host copies that fill them.

One copy brings an adapter into a slot. The products of the model read the slots through views. Knows nothing of
requests and of names.

S slots, P parts, r the largest rank, N outputs and K inputs of a product.
"""

import torch

from kernels.attention.latent_up import LatentUp
from kernels.lora.experts import ExpertAdapters, ExpertLora
from kernels.lora.product import EmbeddingLora, LoraWeights
from workers.adapters.layout import AdapterLayout
from workers.adapters.peft_folder import PeftFolder
from workers.adapters.staging import Staging, expert_views, views
from workers.layers.linear import Linear
from workers.models.decoder import DecoderLM
from workers.weights.slots import parameter_of


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
        rank = self.layout.rank
        for product in self.layout.products:
            a_SQK, b_SNr = views(self.pool, product, rank)
            if product.is_table:
                model.embedding_lora = EmbeddingLora(a_SQK, b_SNr)
                continue
            linear: Linear | LatentUp = parameter_of(model, product.linear)
            linear.lora = LoraWeights(a_SQK, b_SNr, product.blocks)
        of_blocks: dict[str, list[ExpertLora]] = {}
        for routed in self.layout.experts.products:
            places_e = parameter_of(model, routed.block).adapter_places(routed.num_experts)
            adapters = ExpertLora(*expert_views(self.pool, routed, rank), routed.blocks, places_e)
            of_blocks.setdefault(routed.block, []).append(adapters)
        for path, (up, down) in of_blocks.items():
            parameter_of(model, path).lora = ExpertAdapters(up, down)

    def stage(self, folder: PeftFolder) -> torch.Tensor:
        """Return the host copy of an adapter: zeros where the adapter has nothing. Raises AdapterError."""
        placed = self.layout.place(folder)
        staged = torch.zeros(1, self.layout.size, dtype=self.pool.dtype, pin_memory=self._pinned)
        Staging(self.layout, folder, staged).run(placed)
        return staged[0]

    def write(self, slot: int, staged: torch.Tensor) -> None:
        """Copy an adapter into a slot, behind the work of the current stream."""
        self.pool[slot - 1].copy_(staged, non_blocking=True)
