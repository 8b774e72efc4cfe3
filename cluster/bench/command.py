"""The `phalanx bench` command: reads options, writes a table and JSON."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cluster.bench import options

if TYPE_CHECKING:
    from cluster.bench.session import Session
    from cluster.bench.settings import Load

API_KEY_VARIABLE = "OPENAI_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


def bench(
    url: options.Url = None,
    model: options.Model = None,
    api_key_env: options.KeyVariable = API_KEY_VARIABLE,
    endpoint: options.EndpointKind = None,
    requests: options.Requests = None,
    concurrency: options.Concurrency = None,
    request_rate: options.RequestRate = None,
    burstiness: options.Burstiness = 1.0,
    warmup: options.Warmup = 8,
    repeats: options.Repeats = 1,
    timeout: options.Timeout = 300.0,
    goodput: options.Goodput = None,
    input_len: options.InputLen = "64",
    output_len: options.OutputLen = "64",
    prefix_groups: options.PrefixGroups = 0,
    prefix_tokens: options.PrefixTokens = 0,
    prompts: options.Prompts = None,
    prompt_form: options.PromptForm = "auto",
    vocab_size: options.VocabSize = 256,
    seed: options.Seed = 0,
    temperature: options.Temperature = 0.0,
    sampling_seed: options.SamplingSeed = None,
    ignore_eos: options.IgnoreEos = None,
    extra_body: options.ExtraBody = None,
    output: options.Output = None,
    save_requests: options.SaveRequests = False,
    progress: options.ShowProgress = True,
) -> None:
    """Measure any server of OpenAI's or Anthropic's API with streamed requests, in a closed or an open loop."""
    given = dict(locals())
    from cluster.bench.settings import BenchError

    try:
        load = make_load(given)
        urls = parse_urls(url or [DEFAULT_URL])
        check_output(output, save_requests)
        session = _run(load, urls, model, os.environ.get(api_key_env), progress)
    except BenchError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    _show(load, session, output, save_requests)


def check_output(output: Path | None, save_requests: bool) -> None:
    """Check the options of the JSON file before the load runs."""
    from cluster.bench.settings import BenchError

    if output is not None and not output.absolute().parent.is_dir():
        raise BenchError(f"--output: folder {output.absolute().parent} does not exist")
    if save_requests and output is None:
        raise BenchError("--save-requests adds to the JSON; give --output FILE too")


def make_load(given: dict[str, Any]) -> "Load":
    """Build the load of the command's options, by name. Options that were not given follow from the given ones."""
    from cluster.bench.goodput import parse_limits
    from cluster.bench.prompts_file import read_prompts
    from cluster.bench.settings import DEFAULT_CONCURRENCY, DEFAULT_REQUESTS, Load

    path = given["prompts"]
    records = [] if path is None else read_prompts(str(path))
    chats = any(record.messages for record in records)
    endpoint: Any = given["endpoint"] or ("chat" if chats else "completions")
    ignore_eos = given["ignore_eos"]
    if ignore_eos is None:  # the other endpoints have no such field
        ignore_eos = path is None and endpoint in ("chat", "completions")
    concurrency = given["concurrency"]
    if concurrency is None and given["request_rate"] is None:
        concurrency = DEFAULT_CONCURRENCY
    same = (
        "request_rate burstiness input_len output_len prefix_groups prefix_tokens vocab_size seed"
    )
    same += " temperature sampling_seed warmup"
    return Load(
        **{name: given[name] for name in same.split()},
        endpoint=endpoint,
        requests=given["requests"] or len(records) or DEFAULT_REQUESTS,
        concurrency=concurrency,
        rounds=given["repeats"],
        timeout_s=given["timeout"],
        prompts=given["prompt_form"],
        prompts_file=None if path is None else str(path),
        ignore_eos=ignore_eos,
        extra_body=_extra_body(given["extra_body"]),
        goodput=parse_limits(given["goodput"] or []),
    )


def parse_urls(texts: list[str]) -> dict[str, str]:
    """Return name -> URL of `[NAME=]URL` options; the default name is the URL."""
    from cluster.bench.http import Endpoint
    from cluster.bench.settings import BenchError

    urls: dict[str, str] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals or "/" in name:
            name, url = text, text
        if name in urls:
            raise BenchError(f"--url: two servers are called {name!r}; write NAME=URL")
        try:
            Endpoint.parse(url)
        except ValueError as error:
            raise BenchError(str(error)) from error
        urls[name] = url
    return urls


def _extra_body(text: str | None) -> dict[str, Any]:
    from cluster.bench.settings import BenchError

    try:
        body = json.loads(text or "{}")
    except ValueError as error:
        raise BenchError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BenchError("--extra-body must be a JSON object")
    return body


def _run(
    load: "Load", urls: dict[str, str], model: str | None, api_key: str | None, progress: bool
) -> "Session":
    from cluster.bench.loop import run
    from cluster.bench.progress import Progress
    from cluster.bench.session import run_session

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return run(run_session(load, urls, model, headers, Progress.for_terminal(progress)))


def _show(load: "Load", session: "Session", output: Path | None, save_requests: bool) -> None:
    """Print the table, write the file, and exit with the matching code."""
    from rich.console import Console

    from cluster.bench.report import build_report, render

    if not session.servers:
        typer.echo("interrupted before the first answer", err=True)
        raise typer.Exit(INTERRUPTED)
    report = build_report(load, session, save_requests)
    render(report, Console(highlight=False, markup=False, soft_wrap=True))
    if output is not None:
        # With a row each request, an indented file has a line for every chunk.
        indent = None if save_requests else 2
        text = json.dumps(report, indent=indent, allow_nan=False) + "\n"
        output.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {output}")
    if session.interrupted:
        raise typer.Exit(INTERRUPTED)
    failures = [server.failure for server in session.servers if server.failure]
    for failure in failures:
        typer.echo(f"error: {failure}", err=True)
    if failures:
        raise typer.Exit(1)
