"""A grammar that takes seconds to compile: its client gets an error at the limit, and no other client waits for it."""

import asyncio
import json
from contextlib import suppress

import httpx
import psutil

from cluster.api.request import grammar_check
from cluster.api.work.processes import WorkProcesses
from tests.unit.api_fakes import Api, assert_error
from tests.unit.test_work import templates, until

PATH = "/v1/chat/completions"
# 20,000 optional properties, within serve.limits.max_schema_bytes; llguidance takes 18 s.
WIDE = {"type": "object", "properties": {f"{i:x}": {} for i in range(20_000)}}
SMALL = {"type": "object", "properties": {"p": {"type": "integer"}}}


async def ask(client: httpx.AsyncClient, schema: dict) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "max_tokens": 1,
    }
    # Separators without spaces: the body of the wide schema is prepared in a thread or a process too.
    content = json.dumps(body, separators=(",", ":"))
    return await client.post(PATH, content=content, headers={"content-type": "application/json"})


def test_it_ends_at_the_limit_and_small_ones_do_not_wait(monkeypatch):
    api = Api(grammar_timeout_s=1.0)
    begun, answered, run = asyncio.Event(), asyncio.Event(), WorkProcesses.run

    async def run_behind_the_small_one(self, work, *args, **limits):
        if work is grammar_check._check_in_child:
            begun.set()
            await answered.wait()
        return await run(self, work, *args, **limits)

    monkeypatch.setattr(WorkProcesses, "run", run_behind_the_small_one)

    async def scenario() -> httpx.Response:
        async with api.client() as client, asyncio.timeout(120):
            wide = asyncio.create_task(ask(client, WIDE))
            await begun.wait()
            assert (await ask(client, SMALL)).status_code == 200
            answered.set()
            return await wide

    error = assert_error(asyncio.run(scenario()), 400, "grammar_too_slow")
    assert error["param"] == "response_format.json_schema.schema" and "1 s" in error["message"]


def test_it_ends_with_its_client():
    api = Api(grammar_timeout_s=600)

    async def scenario() -> None:
        left = asyncio.Event()
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> dict:
            message = next(messages, None)
            if message is None:
                await left.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: dict) -> None:
            pass

        before = {template.pid for template in templates()}
        call = asyncio.create_task(api.app(scope, receive, send))
        template: list[psutil.Process] = []

        def compiles() -> bool:
            template[:] = [it for it in templates() if it.pid not in before]
            children = template[0].children() if template else []
            with suppress(psutil.NoSuchProcess):  # the child that prepared the body
                return bool(children) and children[0].cpu_times().user > 1
            return False

        await until(compiles)
        left.set()
        await until(lambda: not template[0].children())
        await call

    body = {
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": WIDE}},
    }
    content = json.dumps(body, separators=(",", ":")).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }
    asyncio.run(scenario())
