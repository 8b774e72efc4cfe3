"""Compiles grammars with llguidance. Knows nothing of JSON, logits or tensors."""

import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from workers.step.grammar import GRAMMAR_FAILED, Grammar, plain

logger = logging.getLogger(__name__)


SMALL_CHARS = 16 * 1024
"""Of a grammar that compiles in 0.2 s at most. Larger ones take seconds, so no small one may wait behind them."""
_MAX_COMPILED = 64  # grammars kept, because a copy takes 0.01 ms and a compilation 1 to 100 ms
# llguidance follows the references of a schema or grammar by recursion: 20,000 levels ended the process at 8 MiB.
# The stack is only reserved: unused pages take no memory.
_STACK_BYTES = 256 * 2**20


def compile_thread(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread. No grammar within the limits of the API can exhaust its stack."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return pool


def limits() -> LLParserLimits:
    """Return llguidance's own limits, with errors that do not repeat the grammar."""
    return LLParserLimits(verbose_errors=False)


# Result of `GrammarCompiler.compile`: a fresh grammar, or the reason of the failure.
Compiled = Grammar | str


class GrammarCompiler:
    """Compiles grammars for the tokenizer of one checkpoint: small ones on one thread, large ones on another."""

    def __init__(self, folder: str | Path, vocab_size: int):
        self._compiled: dict[str, LLMatcher] = {}
        self._lock = threading.Lock()
        self._thread = compile_thread("grammar-compile")
        self._large_thread = compile_thread("grammar-compile-large")
        # Loaded now, because it holds the interpreter lock for 0.5 s and the first grammar would delay the step loop.
        self._tokenizer = self._thread.submit(_load_tokenizer, Path(folder), vocab_size)

    def ready(self, grammar: str) -> Grammar | None:
        """Return a fresh copy of a grammar that was compiled before, or None. For the thread that owns the requests."""
        matcher = self._compiled.get(grammar)
        return None if matcher is None else Grammar(matcher.deep_copy())

    def compile(self, grammar: str, done: Callable[[Compiled], None]) -> "Future[None]":
        """Compile llguidance's `grammar` on a compile thread and call `done` there; it can be cancelled before."""
        thread = self._thread if len(grammar) <= SMALL_CHARS else self._large_thread
        return thread.submit(self._compile, grammar, done)

    def wait(self) -> None:
        """Wait until all grammars so far are compiled."""
        for thread in (self._thread, self._large_thread):
            thread.submit(int).result()

    def close(self) -> None:
        """Drop grammars that wait."""
        for thread in (self._thread, self._large_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str, done: Callable[[Compiled], None]) -> None:
        try:
            done(self._fresh(grammar))
        except BaseException as error:  # panics of llguidance too, because `done` must be called
            logger.exception("a grammar was not compiled")
            done(f"{GRAMMAR_FAILED} could not be compiled: {error}")

    def _fresh(self, grammar: str) -> Compiled:
        found = self.ready(grammar)
        if found is not None:
            return found
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=limits())
        if matcher.is_error():
            return f"{GRAMMAR_FAILED} could not be compiled: {plain(matcher.get_error())}"
        with self._lock:
            self._compiled[grammar] = matcher
            if len(self._compiled) > _MAX_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        return Grammar(matcher.deep_copy())


def _load_tokenizer(folder: Path, vocab_size: int) -> LLTokenizer:
    """Return the checkpoint's tokenizer. Ids beyond it, up to vocab_size, are never allowed."""
    file = folder / "tokenizer.json"
    if file.is_file():
        text = file.read_text(encoding="utf-8")
    else:
        from transformers import AutoTokenizer  # takes seconds; old checkpoints only

        text = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str()
    ends = end_token_ids(folder, text)
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends or None)


def end_token_ids(folder: Path, tokenizer_json: str) -> list[int]:
    """Return the tokens that end an output, from generation_config, config and tokenizer_config in this order."""
    config = _read_json(folder / "config.json")
    config = config.get("text_config") or config
    found: list[int] = []
    for source in (_read_json(folder / "generation_config.json"), config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    added = json.loads(tokenizer_json).get("added_tokens") or []
    found += [entry["id"] for entry in added if entry["content"] == token]
    return list(dict.fromkeys(found))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
