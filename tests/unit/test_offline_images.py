"""Images without HTTP: batches and `LLM.chat` give a dispatcher the same bodies."""

import asyncio
import json
from typing import Any

import pytest

from cluster.api.images.settings import ImageSettings
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError
from cluster.offline.dispatcher import CHAT, Dispatcher
from tests.unit.api_fakes import FakeBackend, says
from tests.unit.image_case import PAD, SMALL, as_file, data_url, image_part, noise, vision_tokenizer

A = as_file(noise(16, 24))


def answer(backend: FakeBackend, url: str, body: dict[str, Any]) -> dict[str, Any]:
    settings = ApiSettings(images=ImageSettings(token_id=PAD, geometry=SMALL))
    dispatcher = Dispatcher(backend, vision_tokenizer(), settings)
    return dict(json.loads(asyncio.run(dispatcher.answer(url, body)).body))


def test_images_of_all_routes() -> None:
    source = {"type": "url", "url": data_url(A)}
    input_image = {"type": "input_image", "image_url": data_url(A)}
    bodies = {
        CHAT: {"max_tokens": 2, "messages": [{"role": "user", "content": [image_part(A)]}]},
        "/v1/responses": {
            "max_output_tokens": 2,
            "input": [{"role": "user", "content": [input_image]}],
        },
        "/v1/messages": {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        },
    }
    backend = FakeBackend(says("yes"))
    for url, body in bodies.items():
        answer(backend, url, body)
    found = [options["images"] for options in backend.options.values()]
    assert len(found) == 3 and found[0] == found[1] == found[2]
    assert found[0][0].num_tokens == 6


def test_a_bad_image_is_an_error_of_its_line() -> None:
    body = {"messages": [{"role": "user", "content": [image_part(A), image_part(A[:90])]}]}
    with pytest.raises(BadRequestError, match="image 1: it "):
        answer(FakeBackend("yes"), CHAT, body)
