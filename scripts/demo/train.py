"""Train the demo model: a small Qwen3-MoE that talks about Python's standard library.

    python -m scripts.demo.train --corpus default --out configs/models/demo --compile

The corpus is what corpus.py gathers (`default`: the running interpreter's docstrings; a
folder: also the documentation's rst sources; a .jsonl.gz: a saved corpus). The weights are trained
in bfloat16 with float32 master copies, so the checkpoint on disk is exactly the model that was
evaluated. Needs torch, transformers, tokenizers, and a GPU unless it is a trial of a few steps.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from scripts.byte_tokenizer import SPECIAL_TOKENS, generation_config, save_tokenizer
from scripts.demo.corpus import load
from scripts.demo.data import (
    END_OF_TEXT_ID,
    IGNORED,
    ROW,
    Rows,
    chat_rows,
    text_rows,
    train_tokenizer,
)

SAMPLES = [
    "Hello",
    "Who are you?",
    "What is Phalanx?",
    "What does textwrap.dedent do?",
    "Explain the json module.",
    "what is os.path.join",
    "When is KeyError raised?",
    "What is a decorator?",
    "How do I read a file?",
    "Show me an example of statistics.mean.",
    "What is the capital of France?",
]
CONTINUED = ["The `collections` module", "In Python, a generator is", "If an exception occurs"]


def attention_bias(input_ids: torch.Tensor) -> torch.Tensor:
    """[B, 1, ROW, ROW] bfloat16, 0 or -inf: causal, and never beyond the last end-of-text token.

    Several documents or chats share a row. Seeing each other they would be learned in their order,
    one as the cue of the next, and a question asked alone would find no answer.
    """
    ended = (input_ids == END_OF_TEXT_ID).cumsum(-1)
    segment = F.pad(ended[:, :-1], (1, 0))
    allowed = (segment[:, :, None] == segment[:, None, :]).tril()
    bias = torch.zeros(allowed.shape, dtype=torch.bfloat16, device=input_ids.device)
    return bias.masked_fill_(~allowed, -math.inf)[:, None]


def build_model(vocab_size: int, special_ids: list[int], device: str) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=special_ids[2],
        pad_token_id=special_ids[0],
    )
    implementation = "grouped_mm" if device == "cuda" else "eager"
    config._experts_implementation = implementation
    return Qwen3MoeForCausalLM(config).to(device)


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch-style balance loss, layer by layer, so that no layer can hide behind another."""
    total = torch.zeros((), device=router_logits[0].device)
    for logits_TE in router_logits:
        probs_TE = logits_TE.float().softmax(-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(top_k).indices, 1.0)
        share_E = chosen_TE.mean(0) / top_k
        total = total + (share_E * probs_TE.mean(0)).sum() * logits_TE.shape[1]
    return total / len(router_logits)


def losses(
    model: torch.nn.Module, input_ids: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of the learned tokens, and how unevenly the experts are used (1 = even)."""
    out = model.model(input_ids, attention_mask=bias, use_cache=False, output_router_logits=True)
    logits = model.lm_head(out.last_hidden_state).flatten(0, 1).float()
    balance = balance_loss(out.router_logits, model.config.num_experts_per_tok)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED), balance


@torch.no_grad()
def evaluate(model: torch.nn.Module, rows: Rows, batch_rows: int) -> float:
    """Mean loss per learned token, over at most 128 rows."""
    total, count = 0.0, 0
    for start in range(0, min(128, len(rows.tokens)), batch_rows):
        picked = torch.arange(start, min(start + batch_rows, len(rows.tokens), 128))
        input_ids, labels = rows.batch(picked.to(rows.tokens.device))
        loss, _ = losses(model, input_ids, attention_bias(input_ids), labels)
        learned = int((labels != IGNORED).sum())
        total, count = total + loss.item() * learned, count + learned
    return total / count


class Sampler:
    """Batches of a fixed number of rows of each kind, each kind in random order without repeats."""

    def __init__(self, sources: list[Rows], counts: list[int]) -> None:
        self.sources, self.counts = sources, counts
        self.orders = [torch.empty(0, dtype=torch.long) for _ in sources]

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for kind, (source, count) in enumerate(zip(self.sources, self.counts, strict=True)):
            order = self.orders[kind]
            while len(order) < count:
                order = torch.cat([order, torch.randperm(len(source.tokens))])
            parts.append(source.batch(order[:count].to(source.tokens.device)))
            self.orders[kind] = order[count:]
        return torch.cat([ids for ids, _ in parts]), torch.cat([labels for _, labels in parts])


class Optimizer:
    """AdamW on float32 masters of bfloat16 weights; no weight decay on norms."""

    def __init__(self, model: torch.nn.Module, rate: float, weight_decay: float) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        norms = [m for m in self.masters if m.dim() < 2]
        matrices = [m for m in self.masters if m.dim() > 1]
        groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), weight_decay=weight_decay)

    def step(self, rate: float) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)


def train(
    model: torch.nn.Module, sources: list[Rows], held: dict[str, Rows], options: argparse.Namespace
) -> dict:
    """Cosine decay by steps or by seconds, whichever is further on."""
    optimizer = Optimizer(model, options.lr, options.weight_decay)
    forward = torch.compile(losses) if options.compile else losses
    num_text = round(options.batch_rows * options.text_share)
    sampler = Sampler(sources, [num_text, options.batch_rows - num_text])
    started, step, log = time.monotonic(), 0, []
    while True:
        seconds = time.monotonic() - started
        progress = max(step / options.steps, seconds / options.max_seconds)
        if progress >= 1:
            break
        warm = min(1, (step + 1) / 200)
        rate = options.lr * warm * (0.03 + 0.97 * math.cos(progress * math.pi / 2) ** 2)
        input_ids, labels = sampler.next()
        loss, balance = forward(model, input_ids, attention_bias(input_ids), labels)
        (loss + options.balance * balance).backward()
        optimizer.step(rate)
        step += 1
        if step % 500 == 0 or step in (1, 10, 50, 200):
            row = {"step": step, "loss": loss.item(), "balance": balance.item()}
            row |= {name: evaluate(model, rows, 8) for name, rows in held.items()}
            row |= {"rate": rate, "seconds": time.monotonic() - started}
            log.append({name: float(f"{value:.4g}") for name, value in row.items()})
            print(json.dumps(log[-1]), flush=True)
    seconds = time.monotonic() - started
    return {
        "steps": step,
        "tokens": step * options.batch_rows * ROW,
        "seconds": seconds,
        "log": log,
    }


@torch.no_grad()
def generate(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, limit: int = 120) -> str:
    ids = tokenizer.encode(prompt).ids
    start, stop = len(ids), {tokenizer.token_to_id(text) for text in SPECIAL_TOKENS}
    device = next(model.parameters()).device
    while (len(ids) < start + limit and ids[-1] not in stop) or len(ids) == start:
        logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=False)


def save(model: torch.nn.Module, tokenizer: Tokenizer, special_ids: list[int], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    if "num_local_experts" in config:  # newer transformers; published checkpoints say num_experts
        config["num_experts"] = config.pop("num_local_experts")
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(out, tokenizer, model.config.max_position_embeddings)
    # A small model is at its best near its first choice; servers take this where a request is silent.
    sampling = {"do_sample": True, "temperature": 0.3}
    generation = json.dumps(generation_config(special_ids) | sampling, indent=2) + "\n"
    (out / "generation_config.json").write_text(generation, encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--corpus", default="default", help="default, a folder, or a .jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=4500)
    parser.add_argument(
        "--max-seconds", type=float, default=math.inf, help="end earlier than steps"
    )
    parser.add_argument("--batch-rows", type=int, default=64, help=f"rows of {ROW} tokens a step")
    parser.add_argument("--text-share", type=float, default=0.14, help="of the rows, in text")
    parser.add_argument("--chat-passes", type=int, default=12, help="different chat mixes to draw")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--weight-decay", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    documents = load(options.corpus)
    kept = [d for d in documents if not d.held_out()]
    held = [d for d in documents if d.held_out()]
    answers = [answer for d in kept for ask in d.asks for answer in ask.answers]
    tokenizer = train_tokenizer([d.text for d in kept] + answers, options.vocab_size)
    special_ids = [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS]
    assert special_ids[0] == END_OF_TEXT_ID
    text = text_rows(tokenizer, kept, device)
    chat = chat_rows(tokenizer, kept, device, options.chat_passes, options.seed)
    held_rows = {
        "held-out text": text_rows(tokenizer, held, device),
        "held-out answers": chat_rows(tokenizer, held, device, 1, seed=1),
    }
    measured = {**held_rows, "training text": text, "training answers": chat}
    model = build_model(options.vocab_size, special_ids, device).to(torch.bfloat16)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{len(documents)} documents, {len(held)} held out; {text.tokens.numel():,} tokens of text, "
        f"{chat.tokens.numel():,} of chat; {num_parameters:,} parameters; "
        f"prepared in {time.monotonic() - started:.0f} s",
        flush=True,
    )
    before = {name: evaluate(model, rows, 8) for name, rows in measured.items()}
    result = train(model, [text, chat], held_rows, options)
    after = {name: evaluate(model, rows, 8) for name, rows in measured.items()}
    save(model, tokenizer, special_ids, options.out)
    hardware = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    prompts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in SAMPLES]
    samples = {p: generate(model, tokenizer, p) for p in prompts + CONTINUED}
    report = {"hardware": hardware, "torch": torch.__version__, "parameters": num_parameters,
              "documents": len(documents), "held_out": [d.name for d in held],
              "loss_before": before, "loss_after": after, **result, "samples": samples,
              "options": {k: str(v) for k, v in vars(options).items() if k != "out"}}  # fmt: skip
    (options.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "log"}, indent=1))


if __name__ == "__main__":
    main()
