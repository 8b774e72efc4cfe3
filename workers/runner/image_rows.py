"""The rows of a forward that are tokens of images: their embeddings at fixed addresses, and the positions of all rows.

T rows of a forward, X outputs of the vision tower, D hidden.
"""

import numpy as np
import torch

from workers.models.decoder import DecoderLM
from workers.specs.vision import VisionSpec
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import PROMPT


class ImageRows:
    """The embeddings of the images of one rank's forwards of up to `max_num_tokens` rows.

    embeds_TXD   of the last forward, see ForwardBatch.image_embeds
    """

    fields = frozenset({"rope_positions", "image_mask"})

    def __init__(self, spec: VisionSpec, max_num_tokens: int, model: DecoderLM):
        shape = max_num_tokens, spec.num_outputs, spec.output_size
        self.embeds_TXD = torch.zeros(shape, device=model.device, dtype=model.dtype)
        self._used = slice(0, 0)  # rows that are not 0

    @classmethod
    def of(cls, model: DecoderLM, max_num_tokens: int) -> "ImageRows | None":
        """Return the rows of a model; None: it takes no images."""
        spec = model.config.vision
        return None if spec is None else cls(spec, max_num_tokens, model)

    def place(
        self,
        batch: ScheduledBatch,
        starts: np.ndarray,
        query_start_loc: np.ndarray,
        positions_T: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Copy the embeddings of a forward to their rows; return the fields of its ForwardBatch, without padding.

        starts      computed tokens of each sequence
        positions   as if all tokens were text, of the tokens behind prompts less than their places
        """
        rope_T3 = np.repeat(positions_T[:, None], 3, axis=1)
        mask_T = np.zeros(batch.num_tokens, dtype=np.int64)
        rows: list[int] = []
        self.embeds_TXD[self._used].zero_()
        for index, part in enumerate(batch.parts if batch.prefill_tokens else ()):
            images = part.seq.images
            if images is None or part.kind is not PROMPT:
                continue
            start, row = int(starts[index]), int(query_start_loc[index])
            known = images.positions[start : start + part.num_new]
            rope_T3[row : row + len(known)] = known
            for token, outputs_TXD in images.rows(start, start + part.num_new):
                first = row + token - start
                end = first + len(outputs_TXD)
                if (
                    outputs_TXD.is_cuda
                ):  # made on the stream of the encoder, which may reuse its memory
                    outputs_TXD.record_stream(torch.cuda.current_stream(outputs_TXD.device))
                self.embeds_TXD[first:end].copy_(outputs_TXD)
                mask_T[first:end] = 1
                rows += (first, end)
        self._used = slice(min(rows), max(rows)) if rows else slice(0, 0)
        return {"rope_positions": rope_T3, "image_mask": mask_T}

    @property
    def any(self) -> bool:
        """Whether the last forward has rows of images."""
        return self._used.stop > 0
