"""Cost of a tokenizer of real size: loading it, encoding, decoding a stream, and grammar masks. Writes JSON.

The tokenizer is the published Qwen3 one (`scripts.bench.qwen_tokenizer`). Figures are CPU time, the least of
several rounds, because other processes may share the machine: `python -m scripts.bench.tokenizer`.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from cluster.api.answer.detokenizer import StopRules, TextStream
from cluster.api.request.grammar_check import single_grammar
from cluster.api.request.structured import json_schema_node
from cluster.api.tokenizer import load_tokenizer
from scripts.bench import ROOT, qwen_tokenizer, results
from workers.wire.request import RequestOutput

SHAPE = ROOT / "configs" / "models" / "qwen3-30b-a3b"
ROUNDS = 5
NUM_ADDED = len(qwen_tokenizer.SPECIAL + qwen_tokenizer.NOT_SPECIAL)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
ANSWER = json.dumps(
    {
        "name": "Ada Lovelace",
        "age": 36,
        "tags": ["red", "blue"],
        "address": {"street": "12 St James's Square, London", "note": "first floor"},
    },
    indent=2,
)
GRAMMARS = {
    "JSON schema": single_grammar(json_schema_node(SCHEMA)),
    "any JSON object": single_grammar(json_schema_node({"type": "object"})),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=Path, help="qwen.tiktoken; default: of dashscope")
    results.add_options(parser, "tokenizer", drawn=False)
    options = parser.parse_args()
    vocabulary = options.vocabulary or qwen_tokenizer.find_vocabulary()
    if vocabulary is None:
        parser.error("no qwen.tiktoken: pip install dashscope==1.14.1, or name it by --vocabulary")
    with tempfile.TemporaryDirectory() as name:
        folder = qwen_tokenizer.model_folder(SHAPE, vocabulary, Path(name))
        found = {"method": __doc__, **results.origin(0, options.commit), **measure(folder)}
    results.save(options.out, found)
    results.write(options.out, found, page)
    print(options.out.with_suffix(".md").read_text())


def measure(folder: Path) -> dict[str, Any]:
    """Measure all costs with the tokenizer of a model folder."""
    tokenizer, load_s = timed(lambda: load_tokenizer(folder))
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False)
    outputs = [RequestOutput("r", [token_id]) for token_id in ids]

    def stream() -> str:
        decoder = tokenizer.decoders.new([])
        texts = TextStream(decoder, StopRules(strings=["no such text"]))
        return "".join(map(texts.push, outputs))

    def stream_without_stop_strings() -> str:
        texts = TextStream(tokenizer.decoders.new([]), StopRules())
        return "".join(map(texts.push, outputs))

    assert stream_without_stop_strings() == text
    encode_s = best(lambda: tokenizer.encode(text, add_special_tokens=False))
    llguidance, llguidance_load_s = timed(
        lambda: LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=tokenizer.vocab_size)
    )
    answer_ids = tokenizer.encode(ANSWER, add_special_tokens=False)
    return {
        "vocabulary": qwen_tokenizer.NUM_RANKS,
        "load_s": round(load_s, 2),
        "llguidance_load_s": round(llguidance_load_s, 2),
        "encode_tokens_per_s": round(len(ids) / encode_s),
        "decode_us_per_token": microseconds(best(stream_without_stop_strings) / len(ids)),
        "decode_with_stop_string_us_per_token": microseconds(best(stream) / len(ids)),
        "grammar_masks": {
            name: masks(llguidance, grammar, answer_ids, tokenizer.vocab_size)
            for name, grammar in GRAMMARS.items()
        },
    }


def masks(
    tokenizer: LLTokenizer, grammar: str, token_ids: list[int], vocab_size: int
) -> dict[str, Any]:
    """Compile a grammar and fill the mask of one row before each token of an answer."""
    matcher, compile_s = timed(lambda: LLMatcher(tokenizer, grammar, log_level=0))
    words_W = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    fills: list[float] = []
    for token_id in token_ids:
        copies = [matcher.deep_copy() for _ in range(ROUNDS)]  # a matcher keeps its last mask
        fills.append(min(timed(lambda m=m: fill_next_token_bitmask(m, words_W))[1] for m in copies))
        assert matcher.consume_token(token_id), matcher.get_error()
    assert matcher.is_accepting()
    return {
        "compile_ms": round(1e3 * compile_s, 2),
        "tokens": len(fills),
        "fill_us_median": microseconds(statistics.median(fills)),
        "fill_us_max": microseconds(max(fills)),
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and its seconds of CPU time."""
    begin = time.process_time()
    value = call()
    return value, time.process_time() - begin


def best(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of the fastest of several rounds."""
    return min(timed(call)[1] for _ in range(ROUNDS))


def microseconds(seconds: float) -> float:
    """Seconds as microseconds, rounded."""
    return round(1e6 * seconds, 2)


def page(found: dict[str, Any], _name: str) -> str:
    """The figures as a Markdown page."""
    rows = [
        ("load the tokenizer", f"{found['load_s']} s"),
        ("load it in llguidance, as a rank does", f"{found['llguidance_load_s']} s"),
        ("encode", f"{found['encode_tokens_per_s']:,} tokens/s"),
        ("decode a stream", f"{found['decode_us_per_token']} us a token"),
        (
            "decode a stream with a stop string",
            f"{found['decode_with_stop_string_us_per_token']} us a token",
        ),
    ]
    for name, costs in found["grammar_masks"].items():
        fill = f"{costs['fill_us_median']} us, at most {costs['fill_us_max']} us"
        rows.append((f"compile a grammar: {name}", f"{costs['compile_ms']} ms"))
        rows.append((f"mask of one row: {name}", fill))
    return (
        "# The tokenizer of Qwen3\n\n"
        f"{found['vocabulary']:,} byte strings and {NUM_ADDED} added tokens. {results.origin_line(found)} Written by "
        "`python -m scripts.bench.tokenizer`.\n\n"
        + results.markdown_table(("work", "CPU time"), rows)
    )


if __name__ == "__main__":
    main()
