"""The slots of adapters on the device, at fixed addresses, and the flat host copies that fill them.

Copies on a stream of their own bring an adapter into a slot, piece by piece beside the steps. The products of the model
read the slots through views. Knows nothing of requests and of names.

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

PIECE_BYTES = 2**27
"""Most bytes of a piece. A link of 50 GB/s takes 2.7 ms for so many, which is as long as a short step."""
COPY_BYTES = 2**23
"""Most bytes of one copy: the inputs of a step wait for no more, where they need the same engine."""


class AdapterPools:
    """The slots 1 to `num_slots` of one rank; `attach` makes a model read them.

    pool         [S, values of a slot] on the device
    num_pieces   in which an adapter comes into a slot; the largest `least_pieces` of all ranks
    """

    def __init__(
        self, layout: AdapterLayout, num_slots: int, *, device: torch.device, dtype: torch.dtype
    ):
        self.layout = layout
        self.pool = torch.zeros(num_slots, layout.size, device=device, dtype=dtype)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.pool.record_stream(self._stream)  # a rank may give its slots up while pieces come
        self.num_pieces = self.least_pieces

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.pool.numel() * self.pool.element_size()

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, and of one adapter in host memory."""
        return self.num_bytes // len(self.pool)

    @property
    def least_pieces(self) -> int:
        """Pieces of at most PIECE_BYTES that an adapter of this rank needs; one at least."""
        return max(1, -(-self.slot_bytes // PIECE_BYTES))

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
        pinned = self._stream is not None
        staged = torch.zeros(1, self.layout.size, dtype=self.pool.dtype, pin_memory=pinned)
        Staging(self.layout, folder, staged).run(placed)
        return staged[0]

    def write(self, slot: int, staged: torch.Tensor, piece: int) -> None:
        """Copy a piece of an adapter into a slot, from piece 0 on.

        Piece 0 comes behind the work that the current stream has by then, which may read the slot; work that the
        current stream gets behind the last piece comes after all of them.
        """
        size = -(-self.layout.size // self.num_pieces)
        first, end = piece * size, min((piece + 1) * size, self.layout.size)
        there, here = self.pool[slot - 1, first:end], staged[first:end]
        if self._stream is None:
            there.copy_(here)
            return
        current = torch.cuda.current_stream(self.pool.device)
        if piece == 0:
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step = COPY_BYTES // staged.element_size()
            for target, source in zip(
                torch.split(there, step), torch.split(here, step), strict=True
            ):
                target.copy_(source, non_blocking=True)
        if piece == self.num_pieces - 1:
            current.wait_stream(self._stream)
