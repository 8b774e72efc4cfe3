"""The tokenizer of the checkpoint for the HTTP layer: encode, decode, chat prompt, end tokens. Knows nothing of HTTP.

transformers is imported at load only, because the import takes seconds.
"""

import inspect
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

from cluster.api.answer.detokenizer import DecoderFactory, byte_alphabet
from cluster.api.template_fit import TemplateFit, complete_tool
from cluster.errors import BadRequestError

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

TokenizerSource = tuple[str, str | None]
"""The arguments of `load_tokenizer`, by which another process loads the same."""


class ServingTokenizer:
    """One tokenizer shared by all requests; safe to use from several threads."""

    def __init__(
        self,
        hf_tokenizer: Any,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        source: TokenizerSource = ("", None),
    ) -> None:
        backend = getattr(hf_tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"tokenizer: {type(hf_tokenizer).__name__} has no Rust tokenizer behind it; "
                "give the checkpoint a tokenizer.json"
            )
        backend.no_truncation()  # a checkpoint may ship with truncation on: it would drop input
        backend.no_padding()
        self._hf = hf_tokenizer
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._hidden = frozenset(token.content for token in added.values() if token.special)
        self._grammar_token_ids = _grammar_token_ids(added)
        self._reserved = frozenset(inspect.signature(hf_tokenizer.apply_chat_template).parameters)
        self.source = source
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.decoders = DecoderFactory(backend)
        self._fits: dict[str, TemplateFit] = {}  # by the text of the chat template

    @property
    def chat_template(self) -> str:
        """The chat template of the checkpoint (all of them if there are several); empty if there is none."""
        return str(self._hf.chat_template or "")

    def is_hidden(self, text: str) -> bool:
        """Whether `text` is an added token that decoding with skip_special_tokens leaves out."""
        return text in self._hidden

    def grammar_token_id(self, text: str) -> int | None:
        """Return the id by which a grammar names the added token `text`; None if grammars write it as text."""
        return self._grammar_token_ids.get(text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Special tokens written in the text become their ids.

        The text is a batch of one, because only batches release the GIL: `encode` of 1.8 MB stalled all streams for
        2.2 s. The fast variant computes no offsets and takes 0.6 s.
        """
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_pair(
        self,
        first: str,
        second: str | None,
        *,
        keep: int | None,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Return the token ids of one text or of a pair, with the special tokens of the tokenizer around them.

        keep   most token ids; the end of the last text is cut. None: all. Raises BadRequestError if the rest is longer
        """
        texts = [first] if second is None else [first, second]
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        if keep is not None:
            special = self._backend.num_special_tokens_to_add(second is not None)
            lengths = [len(encoding.ids) for encoding in encodings]
            others = sum(lengths[:-1]) + (special if add_special_tokens else 0)
            if others > keep:
                raise BadRequestError(
                    f"truncate_prompt_tokens = {keep} leaves no room for {others} tokens that are never cut",
                    param="truncate_prompt_tokens",
                )
            encodings[-1].truncate(keep - others)
        first_part, pair = encodings[0], encodings[1] if second is not None else None
        whole = self._backend.post_process(first_part, pair, add_special_tokens)
        return list(whole.ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, special tokens included; as a batch of one, as in `encode`."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=False)[0]

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return each token as the vocabulary writes it; "" for ids without a token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def check_token_ids(self, token_ids: Collection[int], param: str) -> None:
        """Raise BadRequestError for ids without an embedding row."""
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.vocab_size):
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            shown = wrong if abs(wrong) < 10**20 else "a huge number"
            raise BadRequestError(
                f"{param}: token id {shown} is not in the vocabulary of {self.vocab_size} ids",
                param=param,
            )

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        template_kwargs: dict[str, Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt text of a conversation.

        add_generation_prompt opens a turn of the assistant; continue_final_message leaves the last turn open.
        """
        template = self._hf.chat_template
        if not template:
            raise BadRequestError(
                "this model has no chat template; use /v1/completions", code="no_chat_template"
            )
        reserved = sorted(self._reserved & template_kwargs.keys())
        if reserved:
            raise BadRequestError(
                f"chat_template_kwargs: {reserved[0]!r} cannot be set",
                param="chat_template_kwargs",
            )
        fit = self._fit(str(template))
        messages = fit.messages(messages)
        options = {
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **fit.variables(template_kwargs),
        }
        try:
            return self._render(messages, tools, options)
        except BadRequestError:
            complete = [complete_tool(tool) for tool in tools or []]
            if complete == (tools or []):
                raise
            return self._render(messages, complete, options)

    def _fit(self, template: str) -> TemplateFit:
        if template not in self._fits:
            self._fits[template] = TemplateFit(
                template, lambda messages: self._render(messages, None, {})
            )
        return self._fits[template]

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> str:
        try:
            text: str = self._hf.apply_chat_template(
                messages, tools=tools, tokenize=False, **options
            )
            return text
        except Exception as error:  # templates raise errors of any type
            reason = str(error) or type(error).__name__
            raise BadRequestError(
                f"the chat template refused the messages: {reason[:500]}",
                param="messages",
                code="chat_template_error",
            ) from error


def _grammar_token_ids(added: dict[int, AddedToken]) -> dict[str, int]:
    """Return content -> id of the added tokens that llguidance treats as special, which no text of a grammar matches.

    llguidance has a rule of its own: every added token written like <this>, also with `special: false`. A tokenizer of
    bytes and the added tokens is enough to ask it; all of a vocabulary of 151,643 tokens took 2.7 s and 80 MiB.
    """
    probe = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    probe.decoder = decoders.ByteLevel()
    probe.add_tokens(list(added.values()))
    tokenizer = LLTokenizer(probe.to_str())
    probe_ids = probe.get_vocab()
    return {
        token.content: token_id
        for token_id, token in added.items()
        if tokenizer.is_special_token(probe_ids[token.content])
    }


def load_tokenizer(folder: str | Path, chat_template: str | None = None) -> ServingTokenizer:
    """Read the tokenizer and its end tokens from a checkpoint folder. Takes a second or more.

    chat_template: text of a template that replaces the checkpoint's.
    """
    folder = Path(folder)
    hf_tokenizer = _load_hf_tokenizer(folder)
    if chat_template is None and not hf_tokenizer.chat_template:
        # Of the processor of a model with images, as transformers wrote it before version 5.
        chat_template = _read_json(folder / "chat_template.json").get("chat_template")
    if chat_template is not None:
        hf_tokenizer.chat_template = chat_template
    config = _read_json(folder / "config.json")
    config = config.get("text_config") or config
    generation = _read_json(folder / "generation_config.json")
    eos_ids: set[int] = set()
    for source in (
        generation.get("eos_token_id"),
        config.get("eos_token_id"),
        hf_tokenizer.eos_token_id,
    ):
        if source is not None:
            eos_ids.update(source if isinstance(source, list) else [source])
    return ServingTokenizer(
        hf_tokenizer,
        # The embedding decides which ids a rank can take; it may have more rows than tokens.
        vocab_size=int(config.get("vocab_size") or len(hf_tokenizer)),
        eos_token_ids=frozenset(eos_ids),
        source=(str(folder), chat_template),
    )


def _load_hf_tokenizer(folder: Path) -> Any:
    # Four times faster to import than AutoTokenizer, which is needed only where there is no tokenizer.json.
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), use_fast=True)


def load_default_sampling(folder: str | Path) -> dict[str, Any]:
    """Return the sampling defaults of a checkpoint's generation_config.json."""
    generation = _read_json(Path(folder) / "generation_config.json")
    return {key: generation[key] for key in _SAMPLING_KEYS if generation.get(key) is not None}


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content
