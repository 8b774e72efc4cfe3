"""The command line options of `phalanx bench`: their types, bounds and help texts, and nothing else."""

from pathlib import Path
from typing import Annotated, Literal

import typer

LOAD, WORK, SAMPLING, OUT = "Load", "Workload", "Requests", "Output"

Url = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]URL", help="Server to load; repeat to compare several, first = base."
    ),
]
Model = Annotated[str | None, typer.Option(help="Default: each server's first.")]
KeyVariable = Annotated[
    str, typer.Option(metavar="NAME", help="Environment variable that holds the API key, if any.")
]
EndpointKind = Annotated[
    Literal["chat", "completions", "responses", "messages"] | None,
    typer.Option(
        help="Route of the requests. Default: completions; chat for a file with messages."
    ),
]

Requests = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=LOAD,
        help="Requests of one round. Default: 64, or one for each line of the file.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        rich_help_panel=LOAD,
        help="Requests in flight, 8 by default; with --request-rate the most, no limit by default.",
    ),
]
RequestRate = Annotated[
    float | None,
    typer.Option(
        rich_help_panel=LOAD,
        help="Open loop: requests arrive at this rate per second, answered or not. inf = all at once.",
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        rich_help_panel=LOAD,
        help="Shape of the gamma distributed gaps: 1 = Poisson, below burstier, above more even.",
    ),
]
Warmup = Annotated[
    int, typer.Option(min=0, rich_help_panel=LOAD, help="Requests before the first round.")
]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        "--rounds",
        min=1,
        rich_help_panel=LOAD,
        help="Rounds, the servers taking turns; the medians are shown.",
    ),
]
Timeout = Annotated[
    float, typer.Option(min=0.1, rich_help_panel=LOAD, help="Seconds for one answer.")
]
Goodput = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:MS",
        rich_help_panel=LOAD,
        help="Count requests within limits: ttft:200,tpot:50,e2e:5000.",
    ),
]

LENGTH = "N, LOW-HIGH or lognormal:MEDIAN:SIGMA:MAX"
InputLen = Annotated[
    str, typer.Option(metavar="LENGTH", rich_help_panel=WORK, help=f"Prompt tokens: {LENGTH}.")
]
OutputLen = Annotated[
    str,
    typer.Option(
        metavar="LENGTH",
        rich_help_panel=WORK,
        help="Tokens of an answer, likewise; for lines of a file that hold no max_tokens.",
    ),
]
PrefixGroups = Annotated[
    int,
    typer.Option(
        min=0, rich_help_panel=WORK, help="Shared prefixes before the random prompts; new a round."
    ),
]
PrefixTokens = Annotated[
    int, typer.Option(min=0, rich_help_panel=WORK, help="Length of each shared prefix.")
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        rich_help_panel=WORK,
        help='Real prompts: a line is {"prompt": ...} or {"messages": [...]}, and may have max_tokens.',
    ),
]
PromptForm = Annotated[
    Literal["auto", "ids", "text"],
    typer.Option(
        rich_help_panel=WORK,
        help="Of random completions; auto = token ids where all servers take them.",
    ),
]
VocabSize = Annotated[
    int, typer.Option(min=1, rich_help_panel=WORK, help="Random prompt token ids are below this.")
]
Seed = Annotated[
    int, typer.Option(rich_help_panel=WORK, help="Of random prompts, lengths and arrivals.")
]

Temperature = Annotated[float, typer.Option(min=0, rich_help_panel=SAMPLING)]
SamplingSeed = Annotated[
    int | None,
    typer.Option(rich_help_panel=SAMPLING, help='Sent as "seed"; default: none is sent.'),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        rich_help_panel=SAMPLING,
        help="Request answers of full length, if the server has ignore_eos. "
        "Default: for random prompts yes, for a file no.",
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        rich_help_panel=SAMPLING,
        help='More fields of each request: {"top_p": 0.9}.',
    ),
]

Output = Annotated[
    Path | None, typer.Option(rich_help_panel=OUT, help="Also write the figures as JSON.")
]
SaveRequests = Annotated[
    bool, typer.Option("--save-requests", rich_help_panel=OUT, help="A row each request in it.")
]
ShowProgress = Annotated[
    bool, typer.Option("--progress/--no-progress", rich_help_panel=OUT, help="On a terminal.")
]
