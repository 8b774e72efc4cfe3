"""The model of all families, read from top to bottom: embedding, layers of blocks, final norm, head.

A family differs by the specs of its layers, from which each layer gets its blocks.

T tokens (padding included), L logits rows, D hidden, V vocabulary. Knows nothing of requests, steps or files.
"""

from pkgutil import resolve_name

import torch

from kernels.lora.product import EmbeddingLora
from kernels.lora.rows import AdapterRows
from workers.layers.builder import LayerBuilder
from workers.layers.linear import DenseLinear
from workers.models.layer_stack import LayerStack
from workers.models.vision.tower import VisionTower
from workers.step.forward_batch import ForwardBatch


class DecoderLM(LayerStack):
    """The model of one rank: all layers between an embedding and a head.

    embedding_lora   the slots of adapters of the embedding; None: it takes none
    vision           makes the embeddings of images, outside of forwards; None: the model takes none
    """

    embedding_lora: EmbeddingLora | None = None

    def _allocate(self, builder: LayerBuilder) -> None:
        config = self.config
        table = (config.vocab_size, config.hidden_size)
        self.embed_VD = builder.empty(*table)
        self.norm = builder.norm(config.hidden_size)
        self.lm_head = self._logits_head(builder)
        self.vision = self._vision_tower()
        labels = config.num_labels
        self.score = builder.dense(labels, config.hidden_size) if labels else None

    def _vision_tower(self) -> VisionTower | None:
        spec = self.config.vision
        if spec is None:
            return None
        tower: VisionTower = resolve_name(spec.tower)(spec, device=self.device, dtype=self.dtype)
        return tower

    def _logits_head(self, builder: LayerBuilder) -> DenseLinear | None:
        config = self.config
        if not config.has_logits:
            return None
        if config.tie_word_embeddings:
            return DenseLinear(self.embed_VD)
        return builder.dense(config.vocab_size, config.hidden_size)

    def embed(self, input_ids: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return the embeddings of int64 [T], a new tensor [T, D]."""
        embedded_TD = torch.embedding(self.embed_VD, input_ids)
        if adapters is not None and self.embedding_lora is not None:
            self.embedding_lora.add_to(embedded_TD, input_ids, adapters)
        factor = self.config.embedding_factor
        return embedded_TD if factor == 1.0 else embedded_TD.mul_(factor)

    def embed_rows(self, batch: ForwardBatch, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Return the embeddings of all rows, of tokens or of images, a new tensor [T, D]."""
        embedded_TD = self.embed(batch.input_ids, adapters)
        if batch.image_mask is None or batch.image_embeds is None:
            return embedded_TD
        is_image_T1 = batch.image_mask.bool()[:, None]
        return torch.where(is_image_T1, batch.image_embeds[:, 0], embedded_TD)

    def forward(
        self, batch: ForwardBatch, hidden_after: dict[int, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return hidden_TD after the last layer, before the final norm; call `attention.plan(batch)` before.

        hidden_after    by number of a layer, each set to hidden_TD after the layer
        """
        residual_TD = self.embed_rows(batch, batch.adapters)
        added = () if batch.image_embeds is None else batch.image_embeds.unbind(1)[1:]
        return self.run_layers(residual_TD, batch, hidden_after, added)

    @property
    def head_takes_adapters(self) -> bool:
        """Whether logits depend on the adapters of their rows beside the hidden states."""
        return self.lm_head is not None and self.lm_head.lora is not None

    def compute_logits(
        self,
        hidden_LD: torch.Tensor,
        out: torch.Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Return float32 [L, V], in `out` if given, of rows of forward's result; norms these rows only."""
        return self.project_logits(self.norm(hidden_LD), out, adapters)

    def project_logits(
        self,
        normed_LD: torch.Tensor,
        out: torch.Tensor | None = None,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """As `compute_logits`, of rows that are normed already."""
        assert self.lm_head is not None, "the checkpoint has no logits"
        logits_LV = self.lm_head(normed_LD, adapters=adapters)
        logits_LV = logits_LV.float() if out is None else out.copy_(logits_LV)
        factor = self.config.logits_factor
        return logits_LV if factor == 1.0 else logits_LV.mul_(factor)
