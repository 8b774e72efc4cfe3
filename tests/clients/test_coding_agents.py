"""Claude Code and Codex, from npm, without a terminal: a scripted model calls their tools and reads the results.

Both have a home folder of their own, none of this environment's variables, and no network but the server's.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.installed import node_modules
from tests.clients.scripted import replies, scripted
from tests.unit.api_fakes import MODEL

FILES = Path(__file__).parent / "agents"
NOTE = "The word is basalt."
ANSWER = "I have read it: basalt."
QUESTION = "Which word is in note.txt?"
# The fields with which docs/api.md connects Codex, and no tool of OpenAI's own service.
CODEX = """\
model = "{model}"
model_provider = "phalanx"
web_search = "disabled"
agents.enabled = false
[model_providers.phalanx]
name = "Phalanx"
base_url = "{url}/v1"
wire_api = "responses"
"""
# The first run installs two native programs of 240 and 360 MB.
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def modules() -> Path:
    return node_modules(FILES)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder to work in, with a note, beside the agent's home."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "note.txt").write_text(NOTE)
    return tmp_path


def run(folder: Path, command: list[str], environment: dict[str, str]) -> str:
    """What the agent prints; it must succeed."""
    variables = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **environment}
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def claude(modules: Path, folder: Path, url: str, prompt: str) -> dict:
    """Claude Code's report of one prompt, with the variables with which docs/api.md connects it."""
    command = ["node", str(modules / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs")]
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "unused",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    options = ["-p", "--output-format=json", "--no-session-persistence", prompt]
    return json.loads(run(folder, [*command, *options], environment))


def codex(modules: Path, folder: Path, url: str, prompt: str) -> list[dict]:
    """The items of the agent's JSON lines."""
    home = folder / "home"
    (home / "config.toml").write_text(CODEX.format(model=MODEL, url=url))
    command = ["node", str(modules / "@openai" / "codex" / "bin" / "codex.js"), "exec"]
    command += ["--json", "--skip-git-repo-check", "--ephemeral", "-s", "danger-full-access"]
    lines = run(folder, [*command, prompt], {"CODEX_HOME": str(home)}).splitlines()
    events = [json.loads(line) for line in lines]
    assert events[-1]["type"] == "turn.completed", events
    assert events[-1]["usage"]["output_tokens"] > 0
    return [event["item"] for event in events if event["type"] == "item.completed"]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_claude_code_reads_a_file(modules, folder):
    reading = "I will look. " + call("Read", file_path=str(folder / "work" / "note.txt"))
    with scripted(replies(("", reading), (NOTE, ANSWER))) as url:
        report = claude(modules, folder, url, QUESTION)
    assert not report["is_error"] and report["result"] == ANSWER, report
    assert report["num_turns"] == 2 and report["stop_reason"] == "end_turn"
    assert report["usage"]["output_tokens"] > len(ANSWER)


def test_codex_reads_a_file(modules, folder):
    reading = "I will look. " + call("exec_command", cmd="cat note.txt")
    with scripted(replies(("", reading), (NOTE, ANSWER))) as url:
        items = codex(modules, folder, url, QUESTION)
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [command["aggregated_output"] for command in commands] == [NOTE]
    assert commands[0]["exit_code"] == 0
    assert items[-1]["type"] == "agent_message" and items[-1]["text"] == ANSWER, items
