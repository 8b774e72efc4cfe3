"""The `phalanx bench` command: options in, table and JSON out."""

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from cluster.bench.load import Load

API_KEY_VARIABLE = "OPENAI_API_KEY"


def bench(
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL", help="Server to load; repeat to compare several, first = base."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: each server's first.")] = None,
    endpoint: Annotated[Literal["chat", "completions"], typer.Option()] = "completions",
    requests: Annotated[int, typer.Option(min=1, help="Requests of one round.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the first round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, the servers taking turns.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for full-length answers, where the server knows how.")
    ] = True,
    prompts: Annotated[
        Literal["auto", "ids", "text"],
        typer.Option(help="Of completions; auto = token ids where all servers take them."),
    ] = "auto",
    vocab_size: Annotated[
        int, typer.Option(min=1, help="Random prompt token ids are below this.")
    ] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.")] = 300.0,
    output: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
) -> None:
    """Measure any OpenAI server with streamed requests in a closed loop."""
    from cluster.bench.load import BenchError, Load

    load = Load(
        endpoint=endpoint,
        requests=requests,
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        warmup=warmup,
        rounds=rounds,
        seed=seed,
        temperature=temperature,
        ignore_eos=ignore_eos,
        prompts=prompts,
        vocab_size=vocab_size,
        timeout_s=timeout,
    )
    try:
        urls = parse_urls(url or ["http://127.0.0.1:8000"])
        if output is not None and not output.absolute().parent.is_dir():
            raise BenchError(f"--output: folder {output.absolute().parent} does not exist")
        report = asyncio.run(measure(load, urls, model))
    except ValueError as error:
        if not isinstance(error, BenchError) and "--url" not in str(error):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    _show(report, output)


def parse_urls(texts: list[str]) -> dict[str, str]:
    """Name to URL of `[NAME=]URL` options; the URL is the name where there is none."""
    from cluster.bench.http import Endpoint
    from cluster.bench.load import BenchError

    urls: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = text, text
        if name in urls:
            raise BenchError(f"--url: two servers are called {name!r}; write NAME=URL")
        Endpoint.parse(url)
        urls[name] = url
    return urls


async def measure(load: "Load", urls: dict[str, str], model: str | None) -> dict[str, Any]:
    """Run all rounds; the servers take turns, so that a slow spell of the machine meets all of them."""
    from cluster.bench.load import Driver
    from cluster.bench.report import build_report

    api_key = os.environ.get(API_KEY_VARIABLE)
    driver = Driver(load, {"Authorization": f"Bearer {api_key}"} if api_key else {})
    targets = await driver.prepare(urls, model)
    for target in targets:
        if load.warmup:
            await driver.run_round(target, -1, load.warmup)
    rounds: dict[str, list[Any]] = {target.name: [] for target in targets}
    for index in range(load.rounds):
        for target in targets:
            rounds[target.name].append(await driver.run_round(target, index, load.requests))
    return build_report(load, targets, rounds)


def _show(report: dict[str, Any], output: Path | None) -> None:
    from rich.console import Console

    from cluster.bench.report import render

    render(report, Console(highlight=False, markup=False, soft_wrap=True))
    if output is not None:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        typer.echo(f"wrote {output}")
    if not all(server["median"]["completed"] for server in report["servers"]):
        typer.echo("error: a server completed no request", err=True)
        raise typer.Exit(1)
