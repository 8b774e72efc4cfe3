"""The slots of adapters on the device, at fixed addresses, and the flat host copies that fill them.

One copy brings an adapter into a slot. The products of the model read the slots through views. Knows nothing of
requests and of names.

S slots, P parts, r the largest rank, N outputs and K inputs of a product.
"""

import torch

from kernels.lora.product import LoraWeights
from workers.adapters.layout import AdapterLayout, Product
from workers.adapters.peft_folder import PeftFolder, check_finite
from workers.layers.linear import Linear
from workers.models.layer_stack import LayerStack
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

    def attach(self, model: LayerStack) -> None:
        """Let the products of `model`, and of its views, add the adapters of their rows."""
        for product in self.layout.products:
            linear: Linear = parameter_of(model, product.linear)
            a_SQK, b_SNr = self._views(self.pool, product)
            linear.lora = LoraWeights(a_SQK, b_SNr, product.blocks)

    def stage(self, folder: PeftFolder) -> torch.Tensor:
        """Return the host copy of an adapter: zeros where the adapter has nothing. Raises AdapterError."""
        placed = self.layout.place(folder.pairs)
        staged = torch.zeros(1, self.layout.size, dtype=self.pool.dtype, pin_memory=self._pinned)
        with folder.tensors() as tensors:
            for name, (product, part) in placed.items():
                pair = folder.pairs[name]
                a_rK, b_Nr = tensors.get_tensor(pair.a), tensors.get_tensor(pair.b)
                check_finite(a_rK, pair.a, folder.folder)
                check_finite(b_Nr, pair.b, folder.folder)
                a_SQK, b_SNr = self._views(staged, product)
                first = part * self.layout.rank
                a_SQK[0, first : first + pair.rank] = a_rK
                scaled_Nr = b_Nr.float() * pair.scale
                for entry, its_part in product.entries:
                    if its_part == part:
                        target = b_SNr[0, slice(*(entry.rows or (0, product.rows))), : pair.rank]
                        shape = (pair.outputs, pair.rank)
                        rows = entry._replace(shape=shape, transposed=False)
                        WeightSlot.rows(target, rows, 1.0).fill(scaled_Nr)
        return staged[0]

    def write(self, slot: int, staged: torch.Tensor) -> None:
        """Copy an adapter into a slot, behind the work of the current stream."""
        self.pool[slot - 1].copy_(staged, non_blocking=True)

    def _views(self, pool: torch.Tensor, product: Product) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [S, P * r, K] and B [S, N, r] of a product."""
        rank, count = self.layout.rank, len(pool)
        height = len(product.modules) * rank
        a_end, b_end = product.a + height * product.columns, product.b + product.rows * rank
        a_SQK = pool[:, product.a : a_end].view(count, height, product.columns)
        return a_SQK, pool[:, product.b : b_end].view(count, product.rows, rank)
