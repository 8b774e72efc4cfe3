"""The `phalanx` command. Each command imports its modules when it runs, so that help is fast.

A user's mistake ends with one message on stderr and exit code 2; a server that fails ends with code 1.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cluster.bench.command import bench
from cluster.bench.options import KeyVariable, ShowProgress
from cluster.config.api_keys import OPERATOR_VARIABLE, VARIABLE
from cluster.config.examples import DEMO
from cluster.experiments.command import experiment, report
from workers.stats.versions import phalanx_version

if TYPE_CHECKING:
    from cluster.commands.check import CheckReport
    from cluster.config.phalanx_config import PhalanxConfig

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve Mixture-of-Experts language models from lockstep ranks on Ray.",
)
app.command()(bench)
app.command()(experiment)
app.command()(report)

ConfigPath = Annotated[
    Path,
    typer.Argument(
        help="YAML, or the name of an example; without one, the demo model.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override one setting; repeatable."),
]


def main() -> None:
    """Entry point of the console command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phalanx {phalanx_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def serve(config: ConfigPath = DEMO, overrides: Overrides = None) -> None:
    """Start the server and serve until Ctrl-C."""
    settings = _load(config, overrides)
    from cluster.commands.serve import run_server
    from cluster.commands.start import ServerError

    with _user_errors(ServerError, code=1), _user_errors(ValueError):
        run_server(settings)


@app.command()
def batch(
    config: ConfigPath = DEMO,
    *,
    input: Annotated[Path, typer.Option(help="Requests in OpenAI's batch format.")],
    output: Annotated[Path, typer.Option(help="Results; a file that exists is resumed.")],
    overrides: Overrides = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in flight; by default enough to keep all ranks full."),
    ] = None,
    progress: ShowProgress = True,
) -> None:
    """Answer the requests of a file without HTTP, on ranks that this command starts."""
    settings = _load(config, overrides)
    from cluster.commands.batch import BatchOptions, run_batch
    from cluster.commands.start import ServerError

    options = BatchOptions(input, output, settings, concurrency, progress)
    with _user_errors(ServerError, code=1), _user_errors(ValueError):
        code = run_batch(options)
    raise typer.Exit(code)


@app.command()
def check(
    config: ConfigPath = DEMO,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    on_cluster: Annotated[
        bool, typer.Option("--cluster", help="Look at all nodes of the Ray cluster, and compare.")
    ] = False,
    all2all: Annotated[
        str | None,
        typer.Option(help="In the place of kernels.all2all; with --run deepep is each mode of it."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Check and time the all-to-all on the ranks.")
    ] = False,
) -> None:
    """Print a configuration's ranks, backends and memory, compare a cluster's nodes, or run its all-to-all.

    Starts no ranks, except processes without a model for --run.
    """
    if all2all is not None:
        overrides = [*(overrides or []), f"kernels.all2all={all2all}"]
    if on_cluster and run:
        raise typer.BadParameter("--cluster and --run are two commands")
    if on_cluster:
        _check_nodes(_load(config, overrides), as_json=as_json)
        return
    if run:
        _check_exchange(_load(config, overrides), as_json=as_json)
        return
    reports = _checked(_load(config, overrides))
    if as_json:
        plain = [found.to_json() for found in reports]
        typer.echo(json.dumps(plain[0] if len(plain) == 1 else {"groups": plain}, indent=2))
        return
    from rich.console import Console

    from cluster.commands.check import render

    for found in reports:
        render(found, Console(highlight=False, markup=False, soft_wrap=True))


Server = Annotated[str, typer.Argument(help="A running server.")]
GroupName = Annotated[
    str | None, typer.Option(help="Name of one group of the pool, as `phalanx status` shows it.")
]
LOCAL = "http://127.0.0.1:8000"


@app.command()
def drain(
    url: Server = LOCAL,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds for open requests; by default serve.drain_timeout_s."),
    ] = None,
    group: GroupName = None,
    api_key_env: KeyVariable = OPERATOR_VARIABLE,
) -> None:
    """Let a running server, or one group of it, finish its open requests, refuse new ones, and end."""
    _operate(url, "drain", {"timeout_s": timeout}, group, api_key_env)


@app.command()
def scale(
    ranks: Annotated[int, typer.Argument(min=1, help="Number of ranks.", show_default=False)],
    url: Server = LOCAL,
    group: GroupName = None,
    api_key_env: KeyVariable = OPERATOR_VARIABLE,
) -> None:
    """Change the number of ranks of a running server. Open requests pause, then go on."""
    _operate(url, "scale", {"ranks": ranks}, group, api_key_env)


@app.command()
def restart(
    url: Server = LOCAL,
    overrides: Overrides = None,
    group: GroupName = None,
    api_key_env: KeyVariable = OPERATOR_VARIABLE,
) -> None:
    """Replace the rank processes of a running server, with new settings. Open requests pause, then go on."""
    _operate(url, "restart", {"set": overrides or []}, group, api_key_env)


@app.command()
def role(
    role: Annotated[
        Literal["generate", "prefill", "decode"],
        typer.Argument(help="As in the section pool of the YAML.", show_default=False),
    ],
    url: Server = LOCAL,
    group: GroupName = None,
    api_key_env: KeyVariable = OPERATOR_VARIABLE,
) -> None:
    """Let a group of a running server compute prompts for other groups, or answer. Open requests go on."""
    _operate(url, "role", {"role": role}, group, api_key_env)


def _operate(
    url: str, operation: str, body: dict[str, Any], group: str | None, api_key_env: str
) -> None:
    from cluster.commands.operate import OperationError, post

    if group is not None:
        body["group"] = group
    with _user_errors(OperationError, code=1), _user_errors(ValueError):
        answer = post(url, operation, body, api_key_env)
    typer.echo(answer["status"])


@app.command()
def status(
    url: Server = LOCAL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the body of /ready.")] = False,
    watch: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Print again at this interval, to Ctrl-C."),
    ] = None,
) -> None:
    """Print the state of a running server's groups. Exit code 0: it serves; 1: it does not; 2: not a URL."""
    from cluster.commands.server_url import UnreachableError
    from cluster.commands.status import show

    with _user_errors(ValueError), _user_errors(UnreachableError, code=1):
        ready = show(url, as_json=as_json, watch_s=watch)
    raise typer.Exit(0 if ready else 1)


@app.command()
def experts(
    url: Server = LOCAL,
    png: Annotated[
        Path | None, typer.Option(help="Draw the load of each expert in each layer here.")
    ] = None,
    save_map: Annotated[
        Path | None, typer.Option(help="Save map and loads here, for experts.map.")
    ] = None,
    balanced: Annotated[
        bool, typer.Option(help="Save the map that balancing would make of the loads.")
    ] = False,
    api_key_env: KeyVariable = VARIABLE,
) -> None:
    """Print the load of a running server's experts, and what balancing would gain."""
    from cluster.commands.experts import show
    from cluster.commands.server_url import UnreachableError

    with _user_errors(UnreachableError, code=1), _user_errors(ValueError, OSError):
        show(url, api_key_env, png=png, save_map=save_map, balanced=balanced)


@app.command()
def trace(
    config: ConfigPath = DEMO,
    overrides: Overrides = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the step on each rank.")
    ] = None,
    mode: Annotated[
        Literal["prefill", "decode"], typer.Option(help="Prompts, or one token of each sequence.")
    ] = "prefill",
    out: Annotated[Path, typer.Option(help="Begin of the names of the files.")] = Path("trace"),
) -> None:
    """Profile a step on the configured ranks, whole and in ubatches, for ui.perfetto.dev."""
    settings = _load(config, overrides)
    from cluster.commands.start import ServerError
    from cluster.commands.trace import trace as run
    from cluster.config.errors import ConfigError

    with _user_errors(ServerError, code=1), _user_errors(ConfigError, ValueError):
        run(settings, mode, tokens, out, typer.echo)


@app.command("compile")
def compile_(
    config: ConfigPath = DEMO,
    overrides: Overrides = None,
    *,
    out: Annotated[Path, typer.Option(help="New folder for the compiled kernels.")],
) -> None:
    """Compile the kernels of a configuration into a folder, for kernels.cache. On GPUs its ranks start, and end."""
    settings = _load(config, overrides)
    from rich.console import Console

    from cluster.commands.compile import compile_kernels
    from cluster.commands.start import ServerError

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with _user_errors(ServerError, code=1), _user_errors(ValueError, OSError):
        compile_kernels(settings, out, console, typer.echo)


@app.command()
def schema() -> None:
    """Print the JSON schema of the YAML."""
    from cluster.config.phalanx_config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


def _load(path: Path, overrides: list[str] | None) -> "PhalanxConfig":
    from cluster.config.errors import ConfigError
    from cluster.config.load import load_config

    with _user_errors(ConfigError):
        return load_config(path, overrides or [])


def _check_nodes(config: "PhalanxConfig", *, as_json: bool) -> None:
    """Print the cluster's nodes; exit code 1 if anything is wrong."""
    from rich.console import Console

    from cluster.commands.check_cluster import check_cluster
    from cluster.commands.cluster_table import render_cluster
    from cluster.commands.start import ServerError

    with _user_errors(ServerError, code=1):
        found = check_cluster(config)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
    else:
        render_cluster(found, Console(highlight=False, markup=False))
    if found.errors:
        raise typer.Exit(1)


def _check_exchange(config: "PhalanxConfig", *, as_json: bool) -> None:
    """Print what the all-to-all does on the ranks; exit code 1 if anything is wrong."""
    from rich.console import Console

    from cluster.commands.check_exchange import check_exchange, render_exchange
    from cluster.commands.start import ServerError

    with _user_errors(ServerError, code=1), _user_errors(ValueError):
        found = check_exchange(config)
    if as_json:
        typer.echo(json.dumps([report.to_json() for report in found], indent=2))
    else:
        render_exchange(found, Console(highlight=False, markup=False))
    if any(report.errors for report in found):
        raise typer.Exit(1)


def _checked(config: "PhalanxConfig") -> "list[CheckReport]":
    from cluster.commands.check import check_groups
    from cluster.config.api_keys import ApiKeyError
    from cluster.config.errors import ConfigError
    from kernels.backends.select import BackendChoiceError
    from workers.runner.graph_sizes import GraphsUnavailableError

    with _user_errors(ApiKeyError, ConfigError, BackendChoiceError, GraphsUnavailableError):
        return check_groups(config)


@contextmanager
def _user_errors(*kinds: type[Exception], code: int = 2) -> Iterator[None]:
    """Turn errors of these kinds into their message and an exit code."""
    try:
        yield
    except kinds as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(code) from error


if __name__ == "__main__":
    main()
