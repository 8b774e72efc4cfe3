"""The commands of scripts/ with a python that only takes notes, without network; the modules' --help."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = ("serve", "test", "bench_local", "bench_ingress", "bench_gpu_serving", "chaos")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "scripts").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)
# Parts of other measurements, and no measurement.
NO_RESULTS = ("scripts.bench.engine", "scripts.bench.hosts_rank", "scripts.make_checkpoint")
PYTEST = "python -m pytest -n {} --dist loadfile --no-loadscope-reorder -q -rfE"
TOOLS = ("bash", "basename", "cat", "cksum", "dirname", "env", "flock", "mkdir", "rm", "touch")

# Makes "environments" whose python takes notes too. FAKE_VERSION_OK=1: too old; FAKE_PIP=1: pip fails.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$(basename "$0") $*${PYTHONPATH:+ in $PYTHONPATH}" >>"$NOTES"
case "$*" in
    "-c import sys; sys.exit"*) exit "${FAKE_VERSION_OK:-0}" ;;
    "-m venv "*)
        mkdir -p "$3/bin"
        cat "$0" >"$3/bin/python"
        cat "$0" >"$3/bin/phalanx"
        chmod +x "$3/bin/python" "$3/bin/phalanx" ;;
    "-m pip install "*) exit "${FAKE_PIP:-0}" ;;
esac
"""


class Clone:
    """A copy of the scripts beside a pyproject.toml, and a PATH with the fake python only."""

    def __init__(self, folder: Path):
        self.root = folder / "a clone"
        (self.root / "scripts").mkdir(parents=True)
        for name in (*COMMANDS, "venv.sh"):
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts" / name)
        for name in ("pyproject.toml", "constraints.txt"):
            (self.root / name).write_text("first")
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in (*TOOLS, "chmod"):
            found = shutil.which(tool)
            if found is not None:
                (self.bin / tool).symlink_to(found)
        self.add_python("python3")
        self.notes = folder / "notes"
        self.python = self.root / ".venv" / "bin" / "python"

    def add_python(self, name: str) -> None:
        path = self.bin / name
        path.write_text(FAKE_PYTHON)
        path.chmod(0o755)

    def run(
        self, script: str, *arguments: str, code: int = 0, **variables: str
    ) -> tuple[list[str], str]:
        """Run from another folder: what the pythons were asked, and the output."""
        self.notes.write_text("")
        environment = {"PATH": str(self.bin), "NOTES": str(self.notes), **variables}
        done = subprocess.run(
            [str(self.root / "scripts" / script), *arguments],
            cwd=self.bin,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, done.stdout
        return self.notes.read_text().splitlines(), done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def installs(notes: list[str]) -> list[str]:
    """What pip was asked to install."""
    return [note.rpartition("--editable ")[2] for note in notes if "pip install" in note]


def test_first_run_makes_the_venv_and_installs(clone: Clone) -> None:
    notes, output = clone.run("serve")
    assert f"python3 -m venv {clone.root}/.venv" in notes
    assert installs(notes) == [str(clone.root)]
    assert notes[-1] == "phalanx serve"
    assert "installing Phalanx" in output


def test_installations_take_the_tested_versions(clone: Clone) -> None:
    (note,) = [note for note in clone.run("test")[0] if "pip install" in note]
    assert f"--constraint {clone.root}/constraints.txt --editable" in note


def test_second_run_goes_straight_to_the_server(clone: Clone) -> None:
    clone.run("serve")
    notes, output = clone.run("serve")
    assert installs(notes) == []
    assert not any("venv" in note for note in notes)
    assert output == ""


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_project_is_installed_again(clone: Clone, name: str) -> None:
    clone.run("serve")
    (clone.root / name).write_text("second")
    assert installs(clone.run("serve")[0]) == [str(clone.root)]
    assert installs(clone.run("serve")[0]) == []


def test_moved_folder_is_installed_again(clone: Clone) -> None:
    clone.run("serve")
    clone.root = clone.root.rename(clone.root.with_name("elsewhere"))
    assert installs(clone.run("serve")[0]) == [str(clone.root)]


def test_serve_and_test_have_their_own_stamps(clone: Clone) -> None:
    clone.run("serve")
    notes, _ = clone.run("test", "-k", "one or two")
    assert installs(notes) == [f"{clone.root}[dev]"]
    assert notes[-1] == f"{PYTEST.format(3)} -m not gpu and not exhaustive -k one or two"
    assert installs(clone.run("test")[0]) == []
    assert installs(clone.run("serve")[0]) == []


def test_exhaustive_tests_run_alone(clone: Clone) -> None:
    notes, _ = clone.run("test", "--exhaustive", "-x")
    assert notes[-1] == f"{PYTEST.format(2)} -m not gpu and exhaustive -x"


def test_venv_made_by_hand_is_completed(clone: Clone) -> None:
    clone.python.parent.mkdir(parents=True)
    for name in ("python", "phalanx"):
        shutil.copy(clone.bin / "python3", clone.python.with_name(name))
    notes, output = clone.run("serve")
    assert not any("-m venv" in note for note in notes)
    assert installs(notes) == [str(clone.root)]
    assert "broken" not in output


def test_half_made_venv_is_made_anew(clone: Clone) -> None:
    clone.python.parent.mkdir(parents=True)
    clone.python.symlink_to("/nowhere/python3")
    (clone.root / ".venv" / "rubbish").touch()
    notes, output = clone.run("serve")
    assert "is broken and is made anew" in output
    assert not (clone.root / ".venv" / "rubbish").exists()
    assert notes[-1].startswith("phalanx serve")


def test_failed_installation_is_told_and_tried_again(clone: Clone) -> None:
    _, output = clone.run("serve", code=1, FAKE_PIP="1")
    assert "error: the installation failed" in output
    assert installs(clone.run("serve")[0]) == [str(clone.root)]


def test_no_python_new_enough(clone: Clone) -> None:
    _, output = clone.run("serve", code=1, FAKE_VERSION_OK="1")
    assert "error: Phalanx needs Python 3.11 to 3.14" in output
    assert not (clone.root / ".venv").exists()


def test_newer_python_beside_an_old_one(clone: Clone) -> None:
    (clone.bin / "python3").write_text("#!/usr/bin/env bash\nexit 1\n")
    clone.add_python("python3.12")
    notes, _ = clone.run("serve")
    assert f"python3.12 -m venv {clone.root}/.venv" in notes


@pytest.mark.parametrize(
    ("arguments", "served"),
    [
        (["my.yaml"], "my.yaml"),
        (["my.yaml", "--set", "a.b=c"], "my.yaml --set a.b=c"),
        (["--set", "a.b=c", "my.yaml"], "--set a.b=c my.yaml"),
        (["--set", "a.b=c"], "--set a.b=c"),
    ],
)
def test_serve_passes_its_arguments_on(clone: Clone, arguments: list[str], served: str) -> None:
    notes, _ = clone.run("serve", *arguments)
    assert notes[-1] == f"phalanx serve {served}"


def test_two_at_once_install_once(clone: Clone) -> None:
    clone.notes.write_text("")
    environment = {"PATH": str(clone.bin), "NOTES": str(clone.notes)}
    command = [str(clone.root / "scripts" / "serve")]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in "ab"]
    assert [process.wait(120) for process in both] == [0, 0]
    if shutil.which("flock"):
        assert len(installs(clone.notes.read_text().splitlines())) == 1


@pytest.mark.parametrize(
    ("name", "extras"), [("local", "dev"), ("ingress", "bench"), ("gpu_serving", "bench,gpu")]
)
def test_measurements_find_the_repository_from_anywhere(
    clone: Clone, name: str, extras: str
) -> None:
    notes, _ = clone.run(f"bench_{name}", "--set", "a.b=c d")
    assert installs(notes) == [f"{clone.root}[{extras}]"]
    assert notes[-1] == f"python -m scripts.bench.{name} --set a.b=c d in {clone.root}"


def test_modules_of_the_commands_are_there() -> None:
    named = {f"scripts.bench.{name}" for name in ("local", "ingress", "gpu_serving")}
    assert named < set(MODULES)


def test_the_readme_names_every_measurement() -> None:
    page = (ROOT / "scripts" / "README.md").read_text()
    named = {f"scripts.bench.{name}" for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)}
    of_commands = {f"scripts.bench.{name}" for name in ("local", "ingress", "gpu_serving", "chaos")}
    elsewhere = {"scripts.bench.gpu_families", "scripts.bench.hosts_rank"}
    wanted = {module for module in MODULES if module.startswith("scripts.bench.")}
    assert named == wanted - of_commands - elsewhere


@pytest.mark.parametrize("module", MODULES)
def test_help_needs_no_gpu(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # it runs anew
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code in (0, None)
    assert "--out" in capsys.readouterr().out or module in NO_RESULTS


def test_ci_runs_the_suite() -> None:
    assert "scripts/test" in (ROOT / ".ci" / "run").read_text()
    for script in (".ci/run", *(f"scripts/{name}" for name in COMMANDS)):
        assert os.access(ROOT / script, os.X_OK), script
