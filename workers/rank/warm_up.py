"""Step sizes to run before traffic, so that no kernel compiles during traffic. Pure arithmetic."""

# DeepGEMM picks a tile by the number of rows: step sizes at this distance meet every tile.
DENSE_TOKENS = 128
# On Hopper GPUs products of so few rows are not DeepGEMM's, but for matrices of more than 16 million weights.
FEW_TOKENS = 32


def warm_up_sizes(max_num_tokens: int, *, dense: bool) -> list[int]:
    """Return the tokens of the steps to run once, largest first: memory is then allocated once and reused.

    Powers of two and the largest step: a kernel with a size-dependent form changes it at most once between two of
    these sizes. With `dense` every multiple of DENSE_TOKENS as well.
    """
    sizes = {max_num_tokens} | {1 << power for power in range(max_num_tokens.bit_length())}
    if dense:
        sizes |= set(range(DENSE_TOKENS, max_num_tokens, DENSE_TOKENS))
    return sorted(sizes, reverse=True)


def few_first(sizes: list[int]) -> list[tuple[int, list[int]]]:
    """Return each size with the sizes of the dense products to compile before its step, which are none for most.

    Steps of few tokens come first, because other processes compile DeepGEMM's products meanwhile.
    """
    parts = ([x for x in sizes if (x > FEW_TOKENS) == many] for many in (False, True))
    return [(size, part if size == part[0] else []) for part in parts for size in part]
