"""In a CUDA graph slices of a step write K and V to the same caches on streams of their own: how one sees another's."""

import torch


class CacheOrder:
    """One slice's place in the order. All slices before it have reached a layer when it does.

    A request that straddles the border of two slices is continued by the second, which reads what the first wrote.
    """

    def __init__(self, before: "CacheOrder | None"):
        self._before, self._written = before, torch.cuda.Event()

    def written(self) -> None:
        """K and V of a layer have been written: what the current stream is given next sees earlier slices' too."""
        if not torch.cuda.is_current_stream_capturing():
            return  # on one stream for all slices
        stream = torch.cuda.current_stream()
        if self._before is not None:
            stream.wait_event(self._before._written)
        self._written.record(stream)
