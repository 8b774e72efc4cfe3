"""What states of delta nets in bfloat16 cost in precision: outputs of 32,768 decodes beside those with float32 states.

One sequence passes through heads that forget at different rates, from half of the state in 8 tokens to nothing. The
states are rounded after each token: to nearest, as the kernels do, and stochastically, with a random number for each
value. Inputs are random. With `common`, all tokens share a vector that is half of the variance of keys and queries, as
the keys of a text are alike. Runs on the CPU in some minutes: `python -m scripts.bench.state_precision`.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.torch_chunked import TorchLinearAttention
from scripts.bench import results

TOKENS, SHOWN = 32_768, (1_024, 8_192, 32_768)
HALF_LIVES = (8, 64, 512, 4_096, 32_768, math.inf)
SPEC = LinearAttentionSpec(len(HALF_LIVES), len(HALF_LIVES), 128, 128, 1)
INPUTS = {"independent": 0.0, "common": 0.5}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    results.add_options(parser, "state-precision", drawn=False)
    args = parser.parse_args()
    shown = sorted({min(count, args.tokens) for count in SHOWN})
    found = {
        "method": __doc__,
        "spec": vars(SPEC),
        "half_lives": [None if math.isinf(life) else life for life in HALF_LIVES],
        "tokens": shown,
        "errors": {name: measure(share, shown) for name, share in INPUTS.items()},
    }
    found |= results.origin(0, args.commit)
    results.save(args.out, found)
    results.write(args.out, found, page)
    print(page(found, args.out.stem))


def to_nearest(state: torch.Tensor, chance: torch.Generator) -> None:
    """Round values to bfloat16, in place."""
    state.copy_(state.bfloat16())


def stochastically(state: torch.Tensor, chance: torch.Generator) -> None:
    """Round values to one of their neighbours in bfloat16, in place, so that the mean is the value."""
    bits = state.view(torch.int32)
    bits.add_(torch.randint(2**16, bits.shape, generator=chance, dtype=torch.int32))
    bits.bitwise_and_(-(2**16))


ROUNDINGS: dict[str, Callable[[torch.Tensor, torch.Generator], None]] = {
    "nearest": to_nearest,
    "stochastic": stochastically,
}


@torch.inference_mode()
def measure(share: float, shown: list[int]) -> dict[str, Any]:
    """Return the relative error of the outputs of each head, up to each number of tokens, by rounding."""
    subject, chance = TorchLinearAttention([SPEC]), torch.Generator().manual_seed(7)
    copies = 1 + len(ROUNDINGS)
    subject.bind(subject.allocate([SPEC], 1 + copies, torch.float32, torch.device("cpu")))
    heads, (pool,) = SPEC.num_value_heads, subject.states
    decays = [0.0 if math.isinf(life) else -math.log(2) / life for life in HALF_LIVES]
    # softplus of a standard normal number has a mean of 0.806
    weights = torch.ones(SPEC.channels, 1), torch.tensor(decays) / 0.806, torch.zeros(heads)
    common = torch.randn(SPEC.channels, generator=chance) * math.sqrt(share)
    common[2 * SPEC.key_size :] = 0.0
    wrong, whole = np.zeros((len(ROUNDINGS), heads)), np.zeros(heads)
    errors: dict[str, list[list[float]]] = {name: [] for name in ROUNDINGS}
    for token in range(shown[-1]):
        scale = torch.full_like(common, math.sqrt(1 - share))
        scale[2 * SPEC.key_size :] = 1.0
        mixed = common + scale * torch.randn(SPEC.channels, generator=chance)
        gates = torch.randn(2, 1, heads, generator=chance).expand(2, copies, heads)
        subject.plan(decodes(copies, token + 1))
        out_BVv = subject(mixed.expand(copies, -1), gates[0], gates[1], 0, *weights).double()
        for copy, rounding in enumerate(ROUNDINGS.values()):
            rounding(pool.state[2 + copy], chance)
        wrong += (out_BVv[1:] - out_BVv[0]).square().sum(-1).numpy()
        whole += out_BVv[0].square().sum(-1).numpy()
        if token + 1 in shown:
            for name, of_rounding in zip(ROUNDINGS, np.sqrt(wrong / whole), strict=True):
                errors[name].append(of_rounding.round(6).tolist())
    return errors


def decodes(count: int, length: int) -> AttentionBatch:
    """A step of one token of each sequence; sequence i has slot i + 1."""
    return AttentionBatch(
        num_tokens=count,
        num_seqs=count,
        num_single_rows=count,
        query_start_loc_cpu=np.arange(count + 1, dtype=np.int32),
        seq_lens_cpu=np.full(count, length, dtype=np.int32),
        block_table=torch.zeros(count, 1, dtype=torch.int64),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
        state_slots=torch.arange(1, count + 1),
    )


def page(found: results.Found, stem: str) -> str:
    """Return the page."""
    text = "# Precision of states of delta nets in bfloat16\n\n"
    text += f"Heads of 128 x 128 values, random inputs. {results.origin_line(found)} "
    text += f"[{stem}.json]({stem}.json), by `python -m scripts.bench.state_precision`.\n\n"
    text += "Root mean square error of the outputs of all tokens up to the given one, relative to outputs with\n"
    text += "float32 states, by the tokens in which a head forgets half of its state. The outputs themselves are\n"
    text += "rounded to bfloat16 in a model, with an error of 0.17 %.\n"
    lives = ["nothing" if life is None else f"{life:,}" for life in found["half_lives"]]
    head = ["tokens", "rounding", *(f"half in {life}" for life in lives[:-1]), "no decay"]
    for name, errors in found["errors"].items():
        rows = [
            [f"{tokens:,}", rounding, *(f"{error:.2%}" for error in by_tokens[place])]
            for place, tokens in enumerate(found["tokens"])
            for rounding, by_tokens in errors.items()
        ]
        text += f"\n## Keys: {name}\n\n{results.markdown_table(head, rows)}"
    return text


if __name__ == "__main__":
    main()
