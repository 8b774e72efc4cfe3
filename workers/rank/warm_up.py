"""Which sizes of step have kernels of their own, so that none compiles in the middle of traffic. Pure arithmetic."""

# DeepGEMM picks a tile for each number of rows: steps this far apart meet all that it may pick.
DENSE_TOKENS = 128


def warm_up_sizes(max_num_tokens: int, *, dense: bool) -> list[int]:
    """Tokens of a rank's steps to run once, largest first; memory is then taken once and reused.

    Powers of two and the largest step: a kernel whose form depends on the size changes it at most once between two of
    them. With `dense` every multiple of DENSE_TOKENS as well.
    """
    sizes = {max_num_tokens} | {1 << power for power in range(max_num_tokens.bit_length())}
    if dense:
        sizes |= set(range(DENSE_TOKENS, max_num_tokens, DENSE_TOKENS))
    return sorted(sizes, reverse=True)
