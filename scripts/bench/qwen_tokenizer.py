"""Build the published Qwen3 tokenizer of its public vocabulary file, for tests and benchmarks of real size.

The vocabulary, `qwen.tiktoken` with 151,643 byte strings in order of their ranks, ships in the PyPI package dashscope;
this repository has no copy, because the file has 2.5 MB. Tokens, merges, pre-tokenizer and added tokens are those of
the published tokenizer.json. The chat template is a short one with the published one's tags.
Knows nothing of models or servers.
"""

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.api.answer.detokenizer import byte_alphabet
from scripts.byte_tokenizer import CHAT_TEMPLATE as TOOL_TEMPLATE
from scripts.byte_tokenizer import END_OF_TEXT, IM_END, IM_START

NUM_RANKS = 151_643
# Added tokens by id, from NUM_RANKS on.
SPECIAL = (
    *(END_OF_TEXT, IM_START, IM_END, "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
NOT_SPECIAL = (  # `special: false` in tokenizer.json: decoding with skip_special_tokens keeps their text
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = TOOL_TEMPLATE + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)
_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 131_072,
    "clean_up_tokenization_spaces": False,
    "bos_token": None,
    "eos_token": IM_END,
    "pad_token": END_OF_TEXT,
    "additional_special_tokens": list(SPECIAL[1:]),
    "chat_template": CHAT_TEMPLATE,
}


def find_vocabulary() -> Path | None:
    """Return the vocabulary file of an installed dashscope, without importing the package; None where there is none."""
    package = find_spec("dashscope")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "resources" / "qwen.tiktoken"
    return file if file.is_file() else None


def read_ranks(file: Path) -> dict[bytes, int]:
    """Read byte string -> rank of a tiktoken file; raise ValueError for another vocabulary."""
    lines = file.read_bytes().split(b"\n")
    ranks = {
        base64.b64decode(token): int(rank) for token, rank in map(bytes.split, filter(None, lines))
    }
    if sorted(ranks.values()) != list(range(NUM_RANKS)):
        raise ValueError(f"{file}: needs the ranks 0 to {NUM_RANKS - 1}, has {len(ranks)} entries")
    return ranks


def build(file: Path) -> Tokenizer:
    """Build the tokenizer; takes about 3 s."""
    ranks = read_ranks(file)
    letters = {byte: char for char, byte in byte_alphabet().items()}

    def written(token: bytes) -> str:
        return "".join(map(letters.__getitem__, token))

    merges = [
        tuple(map(written, last_merge(token, rank, ranks)))
        for token, rank in ranks.items()
        if len(token) > 1
    ]
    vocab = {written(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    added += [AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL]
    tokenizer.add_tokens(added)
    return tokenizer


def last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Split a token of two or more bytes into the two tokens whose merge makes it.

    The parts are what remains when all merges of smaller rank are applied to the token's bytes.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
        best = min(found)
        if best >= rank:
            raise ValueError(f"token {rank} is no merge of two tokens of smaller rank")
        i = found.index(best)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(_CONFIG))
    end_ids = [tokenizer.token_to_id(text) for text in (IM_END, END_OF_TEXT)]
    generation = {"eos_token_id": end_ids, "pad_token_id": end_ids[1]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def model_folder(shape: Path, vocabulary: Path, folder: Path) -> Path:
    """Write a model folder with the config.json of `shape` and the published tokenizer; return it."""
    copyfile(shape / "config.json", folder / "config.json")
    tokenizer = build(vocabulary)
    save(tokenizer, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = tokenizer.token_to_id(IM_END)
    config["pad_token_id"] = tokenizer.token_to_id(END_OF_TEXT)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
