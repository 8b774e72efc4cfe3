"""Random JSON schemas, a small tokenizer with tokens of several bytes, and a model of random logits."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from scripts.byte_tokenizer import (
    SPECIAL_TOKENS,
    byte_tokenizer,
    generation_config,
    save_tokenizer,
)
from workers.sampling.grammar_bitmask import GrammarBitmasks
from workers.sampling.grammar_compiler import GrammarCompiler
from workers.sampling.token_sampling import SamplingBatch, sample_tokens
from workers.step.grammar import Grammar
from workers.wire.request import SamplingParams

VOCAB_SIZE = 512  # more than the tokenizer has
_TOKENS = [
    '"}',
    '":',
    '": "',
    '", "',
    '{"',
    "}}",
    "]}",
    '"]',
    "true",
    "null",
    "12",
    ".5",
    "e-",
    "\n  ",
    "ab",
    "é",
]
_KEYS = ["a", "b", "name", "value", "x y", "é"]


def wide_tokenizer() -> Tokenizer:
    """Bytes, tokens that cross the borders of JSON's parts, and the special tokens of test checkpoints."""
    bytes_ = {token: i for token, i in byte_tokenizer().get_vocab().items() if i < 256}
    alphabet = {i: token for token, i in bytes_.items()}
    vocab, merges = dict(bytes_), []
    for text in _TOKENS:
        written = "".join(alphabet[byte] for byte in text.encode())
        for end in range(2, len(written) + 1):
            if written[:end] not in vocab:
                vocab[written[:end]] = len(vocab)
                merges.append((written[: end - 1], written[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_folder(folder: Path) -> Path:
    """What `GrammarCompiler` reads of a checkpoint."""
    tokenizer = wide_tokenizer()
    save_tokenizer(folder, tokenizer, 4096)
    special = [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS]
    (folder / "generation_config.json").write_text(json.dumps(generation_config(special)))
    return folder


def compile_now(compiler: GrammarCompiler, grammar: str) -> Grammar | str:
    """Wait for the compile thread."""
    results: list[Grammar | str] = []
    compiler.compile(grammar, results.append)
    compiler.wait()
    return results[0]


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of all kinds of parts, whose answers are short."""
    definitions = {
        "leaf": _leaf(rng),
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["v"],
            "additionalProperties": False,
        },
    }
    return {"$defs": definitions, **_schema(rng, depth)}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0 or rng.random() < 0.2:
        return _leaf(rng)
    kind = rng.choice(["object", "object", "object", "array", "tuple", "anyOf", "ref"])
    if kind == "object":
        keys = rng.sample(_KEYS, rng.randint(0, 4))
        return {
            "type": "object",
            "properties": {key: _schema(rng, depth - 1) for key in keys},
            "required": rng.sample(keys, rng.randint(0, len(keys))),
            "additionalProperties": rng.choice([False, False, False, {"type": "integer"}]),
        }
    if kind == "array":
        low = rng.randint(0, 2)
        items = _schema(rng, depth - 1)
        return {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + rng.randint(0, 2),
        }
    if kind == "tuple":
        parts = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    if kind == "anyOf":
        return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    return {"$ref": "#/$defs/" + rng.choice(["leaf", "tree"])}


def _leaf(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-120, 100)
    high = low + rng.randint(1, 300)
    short = rng.randint(0, 3)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": low, "maximum": high},
            {"type": "integer", "exclusiveMinimum": low, "multipleOf": rng.randint(2, 9)},
            {"type": "number"},
            {"type": "number", "minimum": low / 4, "maximum": high / 3},
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high},
            {"type": "string", "minLength": short, "maxLength": short + rng.randint(0, 5)},
            {"type": "string", "pattern": r"^[a-f]{2,5}(-\d+)?$"},
            {"type": "string", "pattern": r"(ab|é|\"){1,3}", "maxLength": 12},
            {"type": "string", "format": "date"},
            {"type": ["boolean", "null"]},
            {"enum": ["x", "x y", '\n"\\', "é😀", 3, 2.5, None, True, {"a": [1]}]},
            {"const": rng.choice(["fixed", 7, [1, 2], {"k": None}])},
        ]
    )


class RandomModel:
    """Draws answers from random logits through the sampler, a token a row and step, all rows together."""

    def __init__(self, seed: int, max_tokens: int):
        self._generator = torch.Generator().manual_seed(seed)
        self._masks = GrammarBitmasks(VOCAB_SIZE, 1)
        self._max_tokens = max_tokens

    def answers(self, grammars: Sequence[Grammar]) -> list[tuple[list[int], bool]]:
        """(tokens, whether they are complete) for each grammar."""
        tokens: list[list[int]] = [[] for _ in grammars]
        finished = [False] * len(grammars)
        running = list(range(len(grammars)))
        for position in range(self._max_tokens):
            if not running:
                break
            pending = self._masks.start((grammars[i], ()) for i in running)
            logits_BV = torch.randn(len(running), VOCAB_SIZE, generator=self._generator) * 3
            assert pending is not None
            pending.wait().apply(logits_BV)
            params = [
                SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95, seed=i) for i in running
            ]
            batch = SamplingBatch.from_rows(params, np.full(len(running), position))
            for i, token in zip(running, sample_tokens(logits_BV, batch).tolist(), strict=True):
                assert token >= 0
                assert grammars[i].advance(token) is None
                tokens[i].append(token)
                finished[i] = grammars[i].complete
            running = [i for i in running if not finished[i]]
        return list(zip(tokens, finished, strict=True))
