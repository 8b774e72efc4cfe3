"""Runs a generation on the engine. Knows nothing of HTTP, parsing, and the format of answers.

The early end of a choice closes its generator, which aborts the request in its rank.
"""

import asyncio
from collections.abc import Awaitable, Callable

from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.writer import AnswerWriter
from cluster.api.backend import EngineBackend
from cluster.api.record import RequestRecord
from cluster.errors import BadRequestError, EngineDeadError, ServingError
from workers.sampling.no_token import LOGITS_FAILED, NO_TOKEN_ALLOWED
from workers.step.grammar import GRAMMAR_FAILED
from workers.wire.request import RequestOutput

# Sends the next text of a choice; returns an awaitable if the send is not complete.
Emit = Callable[[Choice, str], Awaitable[None] | None]


class GenerationRun:
    """Runs the choices of one generation; used once."""

    def __init__(
        self, generation: Generation, backend: EngineBackend, record: RequestRecord
    ) -> None:
        self._generation = generation
        self._backend = backend
        self._record = record

    async def stream(self, emit: Emit) -> None:
        """Run all choices and pass the text of each output to `emit`. Raises the first error of a choice."""
        choices = self._generation.choices
        if len(choices) == 1:
            await self._run(choices[0], emit)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(self._run(choice, emit))
                    await asyncio.sleep(
                        0
                    )  # the start of a thousand takes long; other streams go on between
        except BaseExceptionGroup as errors:  # the error of one cancels all; raise the first
            raise errors.exceptions[0] from None

    async def body(self, writer: AnswerWriter) -> bytes:
        """Run all choices and return the whole answer as `writer` builds it."""
        texts = [choice.echo for choice in self._generation.choices]

        def emit(choice: Choice, text: str) -> None:
            texts[choice.index] += text

        await self.stream(emit)
        if (
            self._generation.has_details
        ):  # logprobs of a long prompt, or vectors, take up to a second to write
            return await asyncio.to_thread(writer.body, texts)
        return writer.body(texts)

    async def _run(self, choice: Choice, emit: Emit) -> None:
        """Run one choice to its end; its text is sent by `emit`."""
        record = self._record.choice(choice)
        text, report, thought = choice.text, choice.report, choice.thought
        options = self._generation.routing
        if choice.pooling is not None:
            options = options | {"pooling": choice.pooling}
        outputs = self._backend.generate(
            choice.request_id, choice.prompt_token_ids, choice.params, **options
        )
        try:
            async for output in outputs:
                if output.finish_reason in ("error", "abort"):
                    raise _failure(self._generation, output)
                if not record.first_token_s:
                    choice.num_cached_tokens = output.num_cached_tokens
                if output.drafts is not None:
                    choice.count_drafts(*output.drafts)
                if report is None:
                    piece = text.push(output)
                else:
                    num_before = text.num_tokens
                    piece = text.push(output)
                    report.add(output, text.num_tokens - num_before)
                if thought is not None and not thought.push(piece, text.num_tokens):
                    thought = None
                sending = emit(choice, piece)
                if sending is not None:
                    await sending
                record.piece(output)
                if text.finish_reason is not None:
                    break
            else:
                raise EngineDeadError("the engine ended this request without an answer")
            record.reason = text.finish_reason
        except Exception as error:
            record.failed(error)
            raise
        finally:
            await outputs.aclose()  # aborts the request unless it is complete
            record.end()


def _failure(generation: Generation, output: RequestOutput) -> ServingError:
    """Return the error for a request that its rank ended."""
    message = output.error or "the engine ended this request"
    if generation.grammar_param is not None and message.startswith(GRAMMAR_FAILED):
        return BadRequestError(message, param=generation.grammar_param, code="invalid_grammar")
    if message.startswith(NO_TOKEN_ALLOWED):
        fields = _forbidding_fields(generation)
        message += f" by {' and '.join(fields)}"
        return BadRequestError(message, param=fields[0], code="no_token_allowed")
    if message.startswith(LOGITS_FAILED):
        return ServingError(message, code="invalid_logits")
    return EngineDeadError(message)


def _forbidding_fields(generation: Generation) -> list[str]:
    """Return the fields of a request that forbid tokens."""
    params = generation.choices[0].params
    given = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_ids),
        generation.grammar_param or "": generation.grammar_param is not None,
    }
    return [name for name, present in given.items() if present]
