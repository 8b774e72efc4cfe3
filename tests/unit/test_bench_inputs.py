"""Command lines of measurements that cannot run end with a line that names the option, and not with a traceback."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from scripts.bench import ROOT, inputs, results

LOCAL = f"--config {ROOT / 'configs' / 'local.yaml'}"
NO_GPU = "needs .* found 0"
WRONG = [
    ("attention", "", NO_GPU),
    ("experts", "", NO_GPU),
    ("few", "", NO_GPU),
    ("few", f"{LOCAL} --profiled all", "'all' is none of none, up to"),
    ("few", f"{LOCAL} --set cluster.rank=2", "cluster.rank: "),
    (
        "few",
        f"{LOCAL} --set cluster.device=cpu --set model.max_model_len=64",
        "max_model_len is 64",
    ),
    ("few", "--config nowhere.yaml", "nowhere.yaml"),
    ("few", "--redraw", "x.json is missing"),
    ("fp8", "", NO_GPU),
    ("gpu_serving", "--ranks 2", NO_GPU),
    ("gpu_serving", "--ranks 2 --loads 0,9", "'9' is none of 0, 1"),
    ("gpu_speculation", "--out x --ranks 2", NO_GPU),
    (
        "gpu_speculation",
        "--out x --ranks 2 --accept-lengths 0.8,2",
        "'0.8,2' is not a list of prob",
    ),
    ("linear_attention", "", NO_GPU),
    ("linear_attention", "--device cpu --prompts 8", "'8' is not sequences x tokens"),
    ("loading", "", NO_GPU),
    ("overlap", "", "two ranks or more, found 0 GPUs"),
    ("overlap", "--ranks 2 --all2alls symm,nccl", "'nccl' is none of local, "),
    ("overlap", "--ranks 2 --gemms cutlass", "'cutlass' is none of auto, "),
    ("overlap", "--ranks 2 --prefill 8,many", "'8,many' is not a list of numbers"),
    ("overlap", "--ranks 2 --prefill=", "nothing to measure"),
    ("overlap", "--ranks 2 --rounds 0", "--rounds is 0"),
    ("overlap", "--ranks 2 --model nowhere", "nowhere has no config.json"),
    ("start_up", "", NO_GPU),
    ("step_rows", "--out x", NO_GPU),
    ("start_up", "--starts cold,hot", "'hot' is none of cold, "),
    ("start_up", "--config nowhere.yaml", "nowhere.yaml"),
    ("timeline", "", NO_GPU),
    ("timeline", "--config nowhere.yaml", "nowhere.yaml"),
]


@pytest.mark.parametrize(("module", "options", "message"), WRONG)
def test_a_wrong_command_line_is_named(
    module: str,
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(results.cuda_environment, "prepare", lambda environment: None)
    monkeypatch.chdir(tmp_path)
    out = "x.json" if module == "fp8" else "x"
    monkeypatch.setattr("sys.argv", [module, *options.split(), "--out", out])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"scripts.bench.{module}").main()
    said = end.value.code if isinstance(end.value.code, str) else capsys.readouterr().err
    assert re.search(message, said), said
    assert not list(tmp_path.iterdir())


def test_as_many_gpus_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    path = ROOT / "configs" / "gpu-bench.yaml"
    assert inputs.rank_config(path, ["cluster.ranks=2"]).num_ranks == 2
    with pytest.raises(SystemExit, match="needs 4 GPUs, found 2; --ranks"):
        inputs.server_config(path, [])


def test_a_copy_of_a_model_has_fewer_layers_and_fp8(tmp_path: Path) -> None:
    model = inputs.model_copy(
        ROOT / "configs" / "models" / "qwen3-30b-a3b", tmp_path / "copy", layers=2, fp8=True
    )
    text = (model / "config.json").read_text()
    assert '"num_hidden_layers": 2' in text and '"weight_block_size": [128, 128]' in text
