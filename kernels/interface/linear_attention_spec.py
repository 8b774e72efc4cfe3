"""The shape of one layer of linear attention, as data. Imports no torch. Knows nothing of model families or pools."""

from dataclasses import dataclass

STATE_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class LinearAttentionSpec:
    """A gated delta net behind a causal convolution of each channel.

    num_key_heads    heads of q and of k
    num_value_heads  heads of v, a multiple of num_key_heads; consecutive value heads share a key head
    key_dim          values of a head of q and k
    value_dim        values of a head of v and of the output
    conv_width       tokens that the convolution reads, the token itself included
    state_dtype      of the states in their pools; all arithmetic is float32
    num_drafts       most drafts of a sequence in a step; slots of sequences keep the inputs of as many rows
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    state_dtype: str = "float32"
    num_drafts: int = 0

    @property
    def group_size(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_size(self) -> int:
        """Values of all heads of k."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Values of all heads of v."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Values of a token that the convolution reads: q of all heads, then k, then v."""
        return 2 * self.key_size + self.value_size

    def conv_shape(self, num_slots: int) -> tuple[int, int, int]:
        """The last tokens before the convolution, oldest first: [slots, conv_width - 1, channels]."""
        return num_slots, self.conv_width - 1, self.channels

    def state_shape(self, num_slots: int) -> tuple[int, int, int, int]:
        """The recurrent states: [slots, value heads, key_dim, value_dim]."""
        return num_slots, self.num_value_heads, self.key_dim, self.value_dim

    @property
    def row_size(self) -> int:
        """Values of a token that a layer reads: channels before the convolution, then a and b of each value head."""
        return self.channels + 2 * self.num_value_heads

    def draft_shape(self, num_slots: int) -> tuple[int, int, int]:
        """The inputs of drafts: [slots, num_drafts, row_size]."""
        return num_slots, self.num_drafts, self.row_size

    def draft_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one slot's inputs of drafts, where a hidden value takes `dtype_bytes`."""
        return self.num_drafts * self.row_size * dtype_bytes

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Bytes of one slot without drafts, where a hidden value takes `dtype_bytes`."""
        conv = (self.conv_width - 1) * self.channels * dtype_bytes
        return conv + self.value_size * self.key_dim * STATE_ITEM_BYTES[self.state_dtype]
