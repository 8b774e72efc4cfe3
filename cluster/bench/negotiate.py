"""Queries a server before the measurement: its model, and whether it accepts token ids and ignore_eos.

Knows nothing of rounds and figures.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus

from cluster.bench.bodies import Target, request_body
from cluster.bench.http import Connection, Endpoint, HttpError, Response
from cluster.bench.prompts import Prompt, TextLength, prompt_source, random_ids, random_text
from cluster.bench.settings import BenchError, Load
from cluster.bench.stream import Answer, EventReader, shown
from cluster.bench.workload import PlannedRequest

PROBE_LETTERS = (60, 240)
PROBE_TOKENS = 8
ANY_TEXT = TextLength(0.0, 1.0)


async def negotiate(
    load: Load, headers: Mapping[str, str], urls: Mapping[str, str], model: str | None
) -> list[Target]:
    """Query each server (name -> URL) for its model and the request form with the most fields that it accepts.

    All servers get prompts of one form: text if one server refuses token ids.
    """
    forms: dict[str, tuple[TextLength | None, ...]] = {
        "auto": (None, ANY_TEXT),
        "ids": (None,),
        "text": (ANY_TEXT,),
    }
    only_text = load.endpoint != "completions" or load.prompts_file is not None
    wanted = "text" if only_text else load.prompts

    async def ask_all(form: str) -> list[Target]:
        targets = []
        for name, url in urls.items():
            connection = Connection(Endpoint.parse(url), dict(headers))
            try:
                prober = Prober(load, connection, name)
                targets.append(await prober.find(url, model, forms[form]))
            finally:
                connection.close()
        return targets

    targets = await ask_all(wanted)
    if wanted == "auto" and any(target.text_length for target in targets):
        targets = await ask_all("text")
    return targets


class Prober:
    """Sends short requests to one server over one connection."""

    def __init__(self, load: Load, connection: Connection, name: str):
        self._load = load
        self._connection = connection
        self._name = name

    async def find(
        self, url: str, model: str | None, forms: tuple[TextLength | None, ...]
    ) -> Target:
        """Return the request form with the most fields that the server accepts; None in `forms` means token ids."""
        model = model or await self._first_model()
        source = prompt_source(self._load.seed, -1, 0)
        refusal = ""
        for text_length in forms:
            for ignore_eos in (True, False) if self._load.ignore_eos else (False,):
                target = Target(
                    name=self._name,
                    url=url,
                    model=model,
                    ignore_eos=ignore_eos,
                    text_length=text_length,
                )
                prompt: Prompt = random_text(PROBE_LETTERS[0], source)
                if text_length is None:
                    prompt = random_ids(PROBE_TOKENS, self._load.vocab_size, source)
                answer, refusal = await self._probe(target, prompt)
                if answer is not None:
                    needs_fit = text_length is not None and self._load.prompts_file is None
                    return await self._fit_text(target) if needs_fit else target
        raise BenchError(f"{self._name} ({url}) refuses {self._load.path}: {refusal}")

    async def _first_model(self) -> str:
        response = await self._ask("GET", "/v1/models", b"")
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise BenchError(
                f"{self._name}: HTTP 401: put the right API key into the environment variable "
                "OPENAI_API_KEY, or into the one that --api-key-env names"
            )
        try:
            return str(json.loads(response.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise BenchError(
                f"{self._name}: /v1/models answered HTTP {response.status} without a model; "
                "give --model"
            ) from None

    async def _ask(self, method: str, path: str, body: bytes) -> Response:
        timeout_s = self._load.timeout_s
        try:
            return await self._connection.request(method, path, body, timeout_s=timeout_s)
        except TimeoutError:
            raise BenchError(f"{self._name}: no answer within {timeout_s:g} s") from None
        except HttpError as error:
            raise BenchError(f"{self._name}: {error}") from error

    async def _probe(self, target: Target, prompt: Prompt) -> tuple[Answer | None, str]:
        """Request a few tokens; return the reason if the server refuses this form of request."""
        body = request_body(self._load, target, PlannedRequest(prompt, 2))
        response = await self._ask("POST", self._load.path, body)
        answer = Answer(0.0)
        EventReader(answer, self._load.stream_format).feed(response.body, 0.0)
        if response.status == 200 and answer.error is None:
            return answer, ""
        reason = answer.error or shown(response.body)
        if response.status not in (200, 400, 422):
            raise BenchError(f"{self._name}: HTTP {response.status}: {reason}")
        return None, f"HTTP {response.status}: {reason}"

    async def _fit_text(self, target: Target) -> Target:
        """Measure how many tokens the server makes of a text, by its usage."""
        samples = []
        for letters in PROBE_LETTERS:
            prompt = random_text(letters, prompt_source(self._load.seed, -2, letters))
            answer, refusal = await self._probe(target, prompt)
            if answer is None:
                raise BenchError(f"{self._name}: {refusal}")
            if answer.prompt_tokens is None:
                return replace(target, text_length=TextLength(0.0, 0.25))
            samples.append((letters, answer.prompt_tokens))
        return replace(target, text_length=TextLength.fit(samples))
