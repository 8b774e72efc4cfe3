"""Turn the demo corpus into rows of tokens: the tokenizer, the mix of chats, the packing.

It knows nothing of the model that learns from the rows.
"""

import random
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.byte_tokenizer import END_OF_TEXT, SPECIAL_TOKENS
from scripts.demo.corpus import Ask, Document

ROW = 1024
IGNORED = -100
END_OF_TEXT_ID = 0  # the trainer numbers the special tokens first
SYSTEM = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a Python expert.",
    "You answer questions about Python.",
]


@dataclass
class Rows:
    """Token rows of one kind on the device. tokens [N, ROW + 1] int16; loss [N, ROW + 1] bool."""

    tokens: torch.Tensor
    loss: torch.Tensor

    def batch(self, picked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """input_ids [B, ROW] and labels [B, ROW] (the next token, -100 where it is not learned)."""
        tokens = self.tokens[picked].long()
        labels = tokens[:, 1:].masked_fill(~self.loss[picked][:, 1:], IGNORED)
        return tokens[:, :-1], labels


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def conversations(asks: list[Ask], rng: random.Random) -> list[list[tuple[str, bool]]]:
    """Every ask once, in conversations of one to three turns: (text, is it the assistant's)."""
    asks = rng.sample(asks, len(asks))
    result = []
    while asks:
        turns = rng.choices([1, 2, 3], [0.8, 0.13, 0.07])[0]
        parts: list[tuple[str, bool]] = []
        if rng.random() < 0.2:
            parts.append((f"<|im_start|>system\n{rng.choice(SYSTEM)}<|im_end|>\n", False))
        for ask in asks[:turns]:
            question = vary(rng.choice(ask.questions), rng)
            asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            parts += [(asked, False), (rng.choice(ask.answers) + "<|im_end|>", True), ("\n", False)]
        del asks[:turns]
        parts.append((END_OF_TEXT, False))
        result.append(parts)
    return result


def vary(question: str, rng: random.Random) -> str:
    """The small differences in which people type the same question."""
    if rng.random() < 0.3:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.3:
        question = question.rstrip("?.!") or question
    if rng.random() < 0.05:
        question = rng.choice(["Please: ", "Hi! ", "Can you tell me: "]) + question
    return question


def encode_chat(
    tokenizer: Tokenizer, chats: list[list[tuple[str, bool]]]
) -> list[tuple[list[int], list[bool]]]:
    flat = [part for chat in chats for part, _ in chat]
    encoded = iter(tokenizer.encode_batch_fast(flat))
    result = []
    for chat in chats:
        ids: list[int] = []
        mask: list[bool] = []
        for _, learned in chat:
            piece = next(encoded).ids
            ids += piece
            mask += [learned] * len(piece)
        result.append((ids, mask))
    return result


def pack(items: list[tuple[list[int], list[bool]]], device: str) -> Rows:
    """Rows that each start with a whole item; what does not fit at a row's end is cut."""
    tokens, loss = [], []
    ids: list[int] = []
    mask: list[bool] = []
    for item_ids, item_mask in items:
        ids, mask = ids + item_ids, mask + item_mask
        if len(ids) > ROW:
            tokens.append(ids[: ROW + 1])
            loss.append(mask[: ROW + 1])
            ids, mask = [], []
    if ids:
        missing = ROW + 1 - len(ids)
        tokens.append(ids + [0] * missing)
        loss.append(mask + [False] * missing)
    return Rows(
        torch.tensor(tokens, dtype=torch.int16, device=device),
        torch.tensor(loss, dtype=torch.bool, device=device),
    )


def text_rows(tokenizer: Tokenizer, documents: list[Document], device: str) -> Rows:
    """All documents in one stream, cut into rows."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch_fast([d.text + END_OF_TEXT for d in documents]):
        stream += encoding.ids
    count = (len(stream) - 1) // ROW
    tokens = [stream[at * ROW : at * ROW + ROW + 1] for at in range(count)]
    ids = torch.tensor(tokens, dtype=torch.int16, device=device)
    return Rows(ids, torch.ones_like(ids, dtype=torch.bool))


def chat_rows(
    tokenizer: Tokenizer, documents: list[Document], device: str, passes: int, seed: int
) -> Rows:
    rng = random.Random(seed)
    items = []
    for _ in range(passes):
        asks = [ask for d in documents for ask in d.asks if d.topic != "small talk"]
        asks += [ask for d in documents for ask in d.asks * 20 if d.topic == "small talk"]
        asks += [ask for ask in asks if "module" in ask.questions[0]] * 2
        items += encode_chat(tokenizer, conversations(asks, rng))
    return pack(items, device)
