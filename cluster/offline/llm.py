"""`LLM`: prompts and conversations answered in Python, by ranks that this process starts."""

import atexit
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cluster.config.load import load_config
from cluster.errors import ServingError
from cluster.offline.answer import Answer
from cluster.offline.pool import run_pool

if TYPE_CHECKING:
    from cluster.offline.dispatcher import Dispatcher
    from cluster.offline.engine import OfflineEngine

Fields = Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """The ranks of a configuration, without HTTP. Use it as a context manager, or call `close`.

        with LLM("configs/local.yaml") as llm:
            for answer in llm.generate(["The capital of France is"], max_tokens=8):
                print(answer.text)

    config    path of a YAML, folder of a checkpoint, or the sections of a YAML as a mapping
    settings  sections that change it, such as cluster={"ranks": 2}, or **{"cluster.ranks": 2}
    progress  print the stages of the start, and a bar while prompts are answered, to stderr

    Raises ConfigError when the configuration is wrong, ServerError when the ranks do not start.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        progress: bool = True,
        **settings: Any,
    ) -> None:
        from rich.console import Console

        from cluster.offline.engine import OfflineEngine

        if isinstance(config, str | Path) and Path(config).is_dir():
            config = {"model": {"path": str(Path(config).absolute())}}
        loaded = load_config({} if config is None else config, settings)
        console = Console(stderr=True, highlight=False, markup=False, quiet=not progress)
        self._progress = progress
        self._engine: OfflineEngine | None = OfflineEngine(loaded, console)
        atexit.register(self.close)

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Fields | Sequence[Fields] = (),
        *,
        adapter: str | Path | None = None,
        **fields: Any,
    ) -> list[Answer]:
        """Continue prompts, given as text or token ids. Returns an answer for each prompt, in order.

        `fields` are fields of POST /v1/completions for all prompts; `params` has fields for all prompts, or a mapping
        for each prompt, and goes first. The error of one prompt is in its answer.
        `adapter` is a name of `lora.adapters`, or a folder that PEFT saved or a name on the Hub, which the first call
        loads; each of several adapters may also be `model` in `params`. Raises BadRequestError where it does not load.
        """
        from cluster.api.request.protocol import CompletionRequest
        from cluster.offline.dispatcher import COMPLETIONS

        _check_names(fields, CompletionRequest.model_fields)
        inputs = _as_prompts(prompts)
        return self._answer(
            COMPLETIONS, "prompt", inputs, params, self._with_adapter(fields, adapter)
        )

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: Fields | Sequence[Fields] = (),
        *,
        adapter: str | Path | None = None,
        **fields: Any,
    ) -> list[Answer]:
        """Answer one conversation, a list of messages, or several. Returns an answer for each, in order.

        `fields` are fields of POST /v1/chat/completions; `params` and `adapter` as in `generate`.
        """
        from cluster.api.request.protocol import ChatRequest
        from cluster.offline.dispatcher import CHAT

        _check_names(fields, ChatRequest.model_fields)
        inputs = _as_conversations(conversations)
        return self._answer(CHAT, "messages", inputs, params, self._with_adapter(fields, adapter))

    def embed(
        self,
        inputs: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Fields | Sequence[Fields] = (),
        **fields: Any,
    ) -> list[Answer]:
        """Embed inputs, given as text or token ids. Returns an answer with an `embedding` for each input, in order.

        `fields` are fields of POST /v1/embeddings; `params` as in `generate`.
        """
        from cluster.api.pooling.fields import EmbeddingRequest
        from cluster.offline.dispatcher import EMBEDDINGS

        _check_names(fields, EmbeddingRequest.model_fields)
        return self._answer(EMBEDDINGS, "input", _as_prompts(inputs), params, fields)

    def classify(
        self,
        inputs: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        params: Fields | Sequence[Fields] = (),
        **fields: Any,
    ) -> list[Answer]:
        """Classify inputs, given as text or token ids. Returns an answer with `probabilities` for each, in order.

        `fields` are fields of POST /classify; `params` as in `generate`.
        """
        from cluster.api.pooling.fields import ClassifyRequest
        from cluster.offline.dispatcher import CLASSIFY

        _check_names(fields, ClassifyRequest.model_fields)
        return self._answer(CLASSIFY, "input", _as_prompts(inputs), params, fields)

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **fields: Any
    ) -> list[Answer]:
        """Score documents by one query, or by a query each. Returns an answer with a `score` for each document.

        `fields` are fields of POST /score.
        """
        from cluster.api.pooling.fields import ScoreRequest
        from cluster.offline.dispatcher import SCORE

        _check_names(fields, ScoreRequest.model_fields)
        texts = [documents] if isinstance(documents, str) else list(documents)
        firsts = [queries] * len(texts) if isinstance(queries, str) else list(queries)
        if len(firsts) != len(texts):
            raise ValueError(
                f"{len(firsts)} queries for {len(texts)} documents; expected one, or equal numbers"
            )
        return self._answer(SCORE, "text_2", texts, [{"text_1": text} for text in firsts], fields)

    def close(self) -> None:
        """Stop the ranks and Ray. Does nothing the second time."""
        engine, self._engine = self._engine, None
        if engine is not None:
            atexit.unregister(self.close)
            engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _with_adapter(self, fields: dict[str, Any], adapter: str | Path | None) -> dict[str, Any]:
        """Return the fields with an adapter as `model`, which is loaded unless it is there."""
        if adapter is None:
            return fields
        client, name = self._open.client, str(adapter)
        if name not in client.adapters:
            path = str(Path(name).absolute()) if Path(name).is_dir() else name
            self._open.run(client.load_adapter(name, path))
        return {**fields, "model": name}

    @property
    def _open(self) -> "OfflineEngine":
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def _answer(
        self,
        url: str,
        name: str,
        inputs: list[Any],
        params: Fields | Sequence[Fields],
        fields: Fields,
    ) -> list[Answer]:
        engine, each = self._open, _for_each(params, len(inputs))
        bodies = [{**fields, **own, name: value} for own, value in zip(each, inputs, strict=True)]
        return engine.run(
            answer_all(engine.dispatcher, url, bodies, engine.concurrency, self._progress)
        )


async def answer_all(
    dispatcher: "Dispatcher",
    url: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    progress: bool,
) -> list[Answer]:
    """Return the answers to bodies in order, at most `concurrency` at once."""
    from cluster.bench.progress import Progress

    answers = [Answer()] * len(bodies)
    bar = Progress.for_terminal(progress)

    async def work(numbered: tuple[int, dict[str, Any]]) -> None:
        index, body = numbered
        try:
            answers[index] = Answer(json.loads((await dispatcher.answer(url, body)).body))
        except ServingError as error:
            answers[index] = Answer(error=error)
        bar.advance()

    with bar.stage("answers", len(bodies)):
        await run_pool(enumerate(bodies), work, min(concurrency, len(bodies)))
    return answers


def _as_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts; a text, or a list of token ids, is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = [item if isinstance(item, str | int) else list(item) for item in prompts]
    return [prompts] if prompts and all(isinstance(item, int) for item in prompts) else prompts


def _as_conversations(conversations: Any) -> list[Any]:
    """Return a list of conversations; a list of messages is one conversation."""
    found = list(conversations)
    if found and all(isinstance(item, Mapping) for item in found):
        return [found]
    return [list(conversation) for conversation in found]


def _for_each(params: Fields | Sequence[Fields], count: int) -> Sequence[Fields]:
    """Return the fields of each of `count` requests."""
    if isinstance(params, Mapping):
        return [params] * count
    if not params:
        return [{}] * count
    if len(params) != count:
        raise ValueError(f"params has {len(params)} entries for {count} prompts; expected one each")
    return params


def _check_names(fields: Fields, known: Iterable[str]) -> None:
    """Raise TypeError for a field that no request has, because a typo would change nothing silently."""
    from cluster.api.request.unsupported import CHAT, COMPLETION

    names = {*known, *CHAT, *COMPLETION}
    unknown = [name for name in fields if name not in names]
    if unknown:
        raise TypeError(f"unknown field {unknown[0]!r}; docs/api.md lists the fields of requests")
