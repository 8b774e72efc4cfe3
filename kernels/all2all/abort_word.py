"""A word by which the host ends the waits of its GPU's kernels for peers. Knows nothing of all-to-alls."""

import torch


class AbortWord:
    """One word of the host, which is 0 until `set`; kernels read it every few hundred polls.

    It lies in pinned memory, so that the host needs no stream to write it: every stream may be waiting.

    word    int32 [1] on the host, readable by the GPU
    """

    def __init__(self, device: torch.device):
        self.word = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def set(self) -> None:
        """End all waits that poll this word, now and later. From any thread."""
        self.word.fill_(1)
