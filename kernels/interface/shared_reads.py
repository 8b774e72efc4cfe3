"""Counts of the KV blocks that the attentions of one rank read once for several decodes. Imports no torch."""


class SharedReads:
    """Counts since `clear`.

    rows     decodes with leading blocks that were read once for several decodes
    tokens   tokens of K and V that a layer has not read therefore
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Count from zero."""
        self.rows = self.tokens = 0

    def add(self, rows: int, tokens: int) -> None:
        """Count a planned forward."""
        self.rows += rows
        self.tokens += tokens

    def counts(self) -> dict[str, int]:
        """Return the counts by the names of a rank's statistics."""
        return {"shared_prefix_rows": self.rows, "shared_prefix_tokens_saved": self.tokens}
