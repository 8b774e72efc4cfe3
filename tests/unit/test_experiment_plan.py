"""Experiment files: cells, order of runs, errors with line and cell, and the printed plan."""

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config.errors import ConfigError
from cluster.experiments import plan
from cluster.experiments.experiment import load_experiment
from cluster.experiments.sweep import short_names
from tests.unit.experiment_case import make_base, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("experiments"))


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_experiment(path, overrides)
    return str(caught.value)


def test_grid_pairs_and_lists_are_combined(folder: Path) -> None:
    sweep = {
        "grid": {"cluster.ranks": [1, 2]},
        "paired": [{"scheduler.max_num_seqs": [4, 8], "workload.concurrency": [1, 2]}],
        "list": [{"workload.input_len": 8}, {"workload.input_len": 9, "overlap.mode": "off"}],
    }
    found = load_experiment(write(folder, sweep=sweep))
    assert len(found.cells) == 2 * 2 * 2
    assert found.cells[0].name == "ranks=1, max_num_seqs=4, concurrency=1, input_len=8"
    assert found.cells[-1].name.endswith("concurrency=2, input_len=9, mode=off")
    assert found.cells[-1].config.cluster.ranks == 2
    assert found.cells[-1].workload.input_len == 9


def test_an_axis_is_overridden_by_its_key(folder: Path) -> None:
    path = write(folder, sweep={"grid": {"cluster.ranks": [1, 2], "workload.input_len": [8, 16]}})
    found = load_experiment(path, ["sweep.grid.cluster.ranks=[2]", "config.overlap.mode=off"])
    assert [cell.name for cell in found.cells] == [
        "ranks=2, input_len=8",
        "ranks=2, input_len=16",
    ]
    assert found.cells[0].config.overlap.mode == "off"


def test_engines_are_shared_by_cells_of_equal_configuration(folder: Path) -> None:
    grid = {
        "workload.input_len": [8, 16],
        "cluster.ranks": [1, 2],
        "serve.log_level": ["info", "debug"],
    }
    found = load_experiment(write(folder, sweep={"grid": grid}, repeats=2))
    assert len({cell.engine for cell in found.cells}) == 2, "serve.* starts no other engine"
    runs = plan.ordered_runs(found)
    assert len(runs) == 16 and plan.num_starts(runs) == 2
    served = load_experiment(write(folder, sweep={"grid": grid}, kind="http"))
    assert len({cell.engine for cell in served.cells}) == 4


@pytest.mark.parametrize("order", ["grid", "paired", "random"])
def test_ranks_change_settings_of_an_epoch_without_a_start(folder: Path, order: str) -> None:
    grid = {
        "overlap.mode": ["on", "off"],
        "cluster.ranks": [1, 2],
        "kernels.all2all": ["auto", "torch_dist"],
        "model.routing.kind": ["uniform", "balanced"],
    }
    path = write(folder, sweep={"grid": grid}, repeats=1, order=order)
    found = load_experiment(path)
    runs = plan.ordered_runs(found)
    assert (plan.num_starts(runs), plan.num_changes(runs)) == (2, 14)
    assert "2 start(s) of an engine, 14 change(s) of its settings" in "\n".join(
        plan.describe(found, runs, [])
    )
    served = plan.ordered_runs(load_experiment(path, ["kind=http"]))
    assert (plan.num_starts(served), plan.num_changes(served)) == (16, 0)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("grid", [(1, 1), (1, 2), (2, 1), (2, 2)]),
        ("paired", [(1, 1), (2, 1), (1, 2), (2, 2)]),
    ],
)
def test_order(folder: Path, order: str, expected: list[tuple[int, int]]) -> None:
    sweep = {"grid": {"overlap.mode": ["on", "off"]}}
    found = load_experiment(write(folder, sweep=sweep, order=order, repeats=2))
    assert [run.key for run in plan.ordered_runs(found)] == expected


def test_random_order_depends_on_the_seed_alone(folder: Path) -> None:
    sweep = {"grid": {"workload.input_len": list(range(1, 9))}}

    def keys(seed: int) -> list[tuple[int, int]]:
        path = write(folder, sweep=sweep, order="random", seed=seed)
        return [run.key for run in plan.ordered_runs(load_experiment(path))]

    assert keys(1) == keys(1) != keys(2)
    assert sorted(keys(1)) == sorted(keys(2))


def test_errors_name_key_line_and_cell(folder: Path) -> None:
    grid = {"kernels.all2al": ["shm"], "cluster.ranks": [1, 0], "workload.input_len": [8, "abc"]}
    message = error_of(write(folder, sweep={"grid": grid}))
    lines = {line.split(":")[0].strip(): line for line in message.splitlines()[1:]}
    assert "did you mean kernels.all2all" in lines["kernels.all2al"]
    assert "cell 3 " in lines["cluster.ranks"] and "ranks=0" in lines["cluster.ranks"]
    assert (
        "is not a length" in lines["workload.input_len"] and "(line " in lines["workload.input_len"]
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kind": "engin"}, "Input should be 'engine', 'http' or 'step'"),
        ({"repeat": 3}, "did you mean repeats?"),
        ({"sweep": {"grid": {"cluster.ranks": []}}}, "has no values"),
        ({"sweep": {}}, "sweep: has no axes"),
        ({"sweep": {"grid": {}, "list": []}}, "sweep: has no axes"),
        ({"sweep": {"grid": {"cluster.ranks": [1, 1]}}}, "has a value twice"),
        ({"sweep": {"paired": [{"a.b": [1], "c.d": [1, 2]}]}}, "a.b has 1, c.d has 2"),
        ({"sweep": {"list": [{}]}}, "a cell without keys"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: no such file"),
        ({"workload": {"output_len": 100_000}}, "the configuration allows 4096"),
        ({"workload": {"tokens": 8}}, "unknown key"),
        ({"workload": {"prefix_groups": 2}}, "go together"),
        ({"workload": {"trace": "none.jsonl"}}, "none.jsonl does not exist"),
        ({"report": {"baseline": {"cluster.ranks": 1}}}, "is not swept; the axes are none"),
        ({"config": {"experts": {"rebalance": "auto"}}}, "use kind http"),
        ({"config": {"cluster": {"nodes": 2, "ranks": 2, "ray_address": "auto"}}}, "one machine"),
        ({"workload": {"vocab_size": 5000}}, "random prompts of 5000 token ids; the model has"),
        (
            {"report": {"metrics": ["ttft_ms.p5"]}},
            "no run has ttft_ms.p5; did you mean ttft_ms.p50?",
        ),
        (
            {"report": {"metrics": ["decode_tokens_per_s"]}},
            "no run has decode_tokens_per_s; it needs workload.phase: decode",
        ),
        ({"kind": "http", "workload": {"endpoint": "chat"}}, "which only completions takes"),
    ],
)
def test_wrong_files_are_refused(folder: Path, keys: dict, expected: str) -> None:
    assert expected in error_of(write(folder, **keys))


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("trace", '{"at": 0}\n{"at": "soon"}', 'line 2: "at" must be a number of seconds'),
        ("trace", '{"at": 0, "input_len": 4090}', "requests of up to 4154 tokens"),
        ("trace", '{"at": 0, "prompt": [1, 2], "max_tokens": 5000}', "requests of up to 5002"),
        ("prompts", '{"prompt": "a"}\n{"prompt"}', "line 2, column 10: not JSON"),
        ("prompts", '{"prompt": "a", "max_tokens": 5000}', "requests of up to 5001 tokens"),
    ],
)
def test_files_of_a_workload_are_read_before_the_start(
    folder: Path, key: str, text: str, expected: str
) -> None:
    (folder / "requests.jsonl").write_text(text)
    message = error_of(write(folder, workload={key: "requests.jsonl"}))
    assert expected in message and f"workload.{key}" in message


def test_chats_need_the_endpoint_for_chats(folder: Path) -> None:
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}')
    workload = {"prompts": "chats.jsonl"}
    assert "messages need" in error_of(write(folder, kind="http", workload=workload))
    chats = write(folder, kind="http", workload={**workload, "endpoint": "chat"})
    assert load_experiment(chats).cells and load_experiment(write(folder, workload=workload)).cells


def test_overrides_and_nested_configuration(folder: Path) -> None:
    path = write(folder, config={"cluster": {"ranks": 2}, "overlap.mode": "off"})
    found = load_experiment(path, ["repeats=5", "workload.requests=3"])
    assert found.sections.repeats == 5
    (cell,) = found.cells
    assert (cell.config.cluster.ranks, cell.config.overlap.mode) == (2, "off")
    assert cell.workload.requests == 3
    assert "--set" in error_of(path, "repeats=0")


def test_paths_of_the_file_start_at_its_folder(folder: Path) -> None:
    text = "{{ messages[0].content }}"
    (folder / "own.jinja").write_text(text)
    config = {"model": {"path": "tiny"}, "serve": {"chat_template": "own.jinja"}}
    (cell,) = load_experiment(write(folder, config=config)).cells
    assert cell.config.model.path == str(folder / "tiny")
    assert cell.config.serve.chat_template == str(folder / "own.jinja")


def test_identity_ignores_what_does_not_change_a_figure(folder: Path) -> None:
    sweep = {"grid": {"workload.input_len": [8, 9]}}
    first = load_experiment(write(folder, sweep=sweep)).identity
    same = {"repeats": 9, "order": "paired", "title": "Other", "limits": {"run_s": 5}}
    assert load_experiment(write(folder, sweep=sweep, **same)).identity == first
    assert load_experiment(write(folder, sweep=sweep, seed=1)).identity != first
    assert load_experiment(write(folder, sweep=sweep, workload={"requests": 9})).identity != first


def test_a_changed_file_of_a_workload_is_another_experiment(folder: Path) -> None:
    trace = folder / "trace.jsonl"
    trace.write_text('{"at": 0}\n')
    path = write(folder, workload={"trace": "trace.jsonl"})
    first = load_experiment(path).identity
    assert load_experiment(path).identity == first
    trace.write_text('{"at": 0}\n{"at": 1}\n')
    assert load_experiment(path).identity != first


def test_a_thousand_cells_are_planned_in_two_seconds(folder: Path) -> None:
    grid = {
        "cluster.ranks": list(range(1, 11)),
        "scheduler.max_num_seqs": list(range(1, 11)),
        "workload.requests": list(range(1, 11)),
    }
    started = time.thread_time()
    found = load_experiment(write(folder, sweep={"grid": grid}))
    lines = plan.describe(found, plan.ordered_runs(found), set())
    assert time.thread_time() - started < 2
    assert len(found.cells) == 1000 and any("more cells" in line for line in lines)


def test_short_names() -> None:
    names = short_names(["cluster.ranks", "overlap.mode", "workload.mode"])
    assert list(names.values()) == ["ranks", "overlap.mode", "workload.mode"]


def test_dry_run_prints_the_plan_and_checks_backends(folder: Path) -> None:
    path = write(folder, sweep={"grid": {"workload.input_len": [8, 16]}})
    result = CliRunner().invoke(app, ["experiment", str(path), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "2, 1 engine configuration(s)" in result.output
    path = write(folder, sweep={"grid": {"kernels.all2all": ["auto", "symm"]}})
    result = CliRunner().invoke(app, ["experiment", str(path), "--dry-run"])
    assert result.exit_code == 2
    assert "cell 2 (all2all=symm)" in result.output


def test_an_example_has_a_name_and_the_demo_is_the_base_of_a_file_without_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["experiment", "skew-cpu", "--dry-run"])
    assert result.exit_code == 0 and "Skewed routing, on CPU" in result.output
    result = CliRunner().invoke(app, ["experiment", "skew-gpu"])
    assert result.exit_code == 2 and "the examples are all2all," in result.output
    (cell,) = load_experiment(write(folder, base=None)).cells
    assert cell.config.serve.model_name == "demo"


def test_steps_that_do_not_fit_are_refused(folder: Path) -> None:
    limits = {"scheduler": {"max_num_batched_tokens": 256, "max_num_seqs": 8}}
    sizes = {"workload.tokens": [8, 300], "workload.phase": ["prefill", "decode"]}
    path = write(folder, kind="step", config=limits, sweep={"paired": [sizes]})
    result = CliRunner().invoke(app, ["experiment", str(path), "--dry-run"])
    assert result.exit_code == 2
    assert "cell 2 (tokens=300, phase=decode): 300 tokens" in result.output
    assert "a decode step has at most 8 (scheduler.max_num_seqs)" in result.output
    assert "cell 1 " not in result.output
    path = write(folder, kind="step", config=limits, workload={"tokens": 257})
    result = CliRunner().invoke(app, ["experiment", str(path), "--dry-run"])
    assert "prefill step has at most 256 (scheduler.max_num_batched_tokens)" in result.output


EXAMPLES = sorted((Path(__file__).parents[2] / "configs" / "experiments").glob("*.yaml"))


def test_every_question_has_an_example_for_a_cpu() -> None:
    names = {path.stem for path in EXAMPLES}
    on_cpu = {name.removesuffix("-cpu") for name in names if name.endswith("-cpu")}
    on_gpus = {name for name in names if not name.endswith("-cpu")}
    assert on_gpus - on_cpu == {"ubatches"} and on_cpu < on_gpus and len(on_cpu) == 7


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_can_be_planned(path: Path) -> None:
    found = load_experiment(path)
    assert found.sections.question.endswith("?")
    assert plan.ordered_runs(found)


def test_pairs_may_repeat_a_value_but_not_a_pair(folder: Path) -> None:
    group = {"workload.input_len": [8, 16], "workload.output_len": [4, 4]}
    assert len(load_experiment(write(folder, sweep={"paired": [group]})).cells) == 2
    twice = {"workload.input_len": [8, 8], "workload.output_len": [4, 4]}
    assert "equal values twice" in error_of(write(folder, sweep={"paired": [twice]}))
