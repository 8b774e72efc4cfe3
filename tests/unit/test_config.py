"""The YAML: what is accepted, what it comes to, and that every mistake is told at once and by name."""

import json
import pickle
from pathlib import Path

import pytest

from cluster.config.errors import ConfigError, leaf_schemas
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_rank_config, resolve_threads
from tests.checkpoints.writer import make_checkpoint

REPOSITORY = Path(__file__).parents[2]
MAX_LENGTH = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-model"
    return make_checkpoint(
        folder, num_layers=1, hidden_size=32, max_position_embeddings=MAX_LENGTH, dtype="bfloat16"
    )


@pytest.fixture
def yaml_path(tmp_path: Path, checkpoint: Path) -> Path:
    """A configuration with nothing but a model."""
    return write(tmp_path, f"model:\n  path: {checkpoint}\n")


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """Key to message of everything that is wrong; a key may have several messages, joined."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    found: dict[str, str] = {}
    for problem in caught.value.problems:
        found[problem.key] = "; ".join(filter(None, [found.get(problem.key), problem.message]))
        assert problem.message in str(caught.value)
    return found


def test_defaults(yaml_path: Path, checkpoint: Path) -> None:
    config = load_config(yaml_path)
    assert config.cluster.ranks == 1
    assert config.serve.host == "127.0.0.1", "the server is not open to the network by default"
    assert config.serve.model_name == "tiny-model"
    assert config.model.path == str(checkpoint)


def test_every_key_of_the_interface_exists() -> None:
    keys = dict(leaf_schemas(PhalanxConfig.model_json_schema()))
    expected = [
        "model.path",
        "model.dtype",
        "model.max_model_len",
        "cluster.ranks",
        "cluster.nodes",
        "cluster.device",
        "scheduler.max_num_seqs",
        "scheduler.max_num_batched_tokens",
        "scheduler.chunked_prefill",
        "cache.block_size",
        "cache.num_blocks",
        "kernels.all2all",
        "kernels.grouped_gemm",
        "kernels.attention",
        "kernels.linear_attention",
        "serve.host",
        "serve.port",
        "serve.replicas",
        "serve.model_name",
    ]
    assert not set(expected) - keys.keys()
    assert all(schema.get("description") for schema in keys.values())


def test_overrides_are_yaml(yaml_path: Path) -> None:
    config = load_config(
        yaml_path,
        [
            "cluster.ranks=3",
            "serve.model_name=null",
            "scheduler.chunked_prefill=off",
            "scheduler.max_num_batched_tokens=512",
            "cluster.vote_timeout_s=2",
        ],
    )
    assert config.cluster.ranks == 3
    assert config.scheduler.chunked_prefill is False
    assert config.serve.model_name == "tiny-model"
    assert config.cluster.vote_timeout_s == 2.0


@pytest.mark.parametrize("mode", ["on", "off", "auto"])
def test_bare_words_of_yaml_name_the_mode(tmp_path: Path, checkpoint: Path, mode: str) -> None:
    text = f"model: {{path: {checkpoint}}}\noverlap:\n  mode: {mode}\n"
    path = tmp_path / "bare.yaml"
    path.write_text(text)
    assert load_config(path).overlap.mode == mode
    path.write_text(text.replace(mode, f'"{mode}"'))
    assert load_config(path).overlap.mode == mode


def test_model_path_counts_from_the_yaml(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "near").symlink_to(checkpoint)
    path = write(folder, "model:\n  path: near\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/config.yaml").model.path == str(folder / "near")
    assert load_config(path, ["model.path=configs/near"]).model.path == str(folder / "near")
    assert "not a folder" in problems(path, "model.path=near")["model.path"]


def test_all_problems_at_once(tmp_path: Path, checkpoint: Path) -> None:
    path = write(
        tmp_path,
        f"""model:
  path: {checkpoint}
  max_model_len: 9000
cluster:
  ranks: 3
  nodes: 2
  device: gpu
  ray_address: auto
scheduler:
  max_num_seq: 4
  max_num_seqs: "8"
cache:
  num_blocks: 0
serve: {{port: 70000, replicas: true}}
kernels:
  all2all: local
""",
    )
    found = problems(path)
    assert found["cluster.device"].startswith('"gpu" is not allowed: ')
    assert "'auto', 'cpu' or 'cuda'" in found["cluster.device"]
    assert found["scheduler.max_num_seq"].endswith("did you mean scheduler.max_num_seqs?")
    assert "Input should be a valid integer" in found["scheduler.max_num_seqs"]
    assert "'auto'" in found["cache.num_blocks"]
    assert "greater than or equal to 1" in found["cache.num_blocks"]
    assert found["serve.port"].startswith("70000 is not allowed: ")
    assert "less than or equal to 65535" in found["serve.port"]
    assert "true is not allowed" in found["serve.replicas"]
    assert f"at most {MAX_LENGTH}" in found["model.max_model_len"]
    assert "do not divide evenly" in found["cluster.nodes"]
    assert len(found) == 8


def test_message_has_a_line_each_with_its_place(tmp_path: Path, checkpoint: Path) -> None:
    path = write(tmp_path, f"model:\n  path: {checkpoint}\nserve:\n  port: 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["cluster.rank=2", "no-equals-sign", "cache.num_blocks=[1"])
    head, *lines = str(caught.value).splitlines()
    assert head == f"{path}: 4 problems"
    assert len(lines) == 4
    assert any(line.startswith("  serve.port: 0 ") and line.endswith("(line 4)") for line in lines)
    assert any("cluster.rank:" in line and line.endswith("(--set)") for line in lines)
    assert any('--set "no-equals-sign"' in line for line in lines)
    broken = next(line for line in lines if "cache.num_blocks: not valid YAML" in line)
    assert broken.endswith("(--set)")


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("cluster.rank=2", "cluster.rank", "cluster.ranks"),
        ("scheduler.block_size=8", "scheduler.block_size", "cache.block_size"),
        ("schedular.max_num_seqs=8", "schedular", "scheduler"),
        ("max_num_seqs=8", "max_num_seqs", "scheduler.max_num_seqs"),
        ("prot=1", "prot", "serve.port"),
        ("kernels.all_to_all=shm", "kernels.all_to_all", "kernels.all2all"),
    ],
)
def test_nearest_name(yaml_path: Path, override: str, key: str, nearest: str) -> None:
    assert problems(yaml_path, override)[key].endswith(f"did you mean {nearest}?")


def test_unknown_key_resembling_nothing_lists_the_section(yaml_path: Path) -> None:
    assert (
        "kernels has all2all, grouped_gemm, attention"
        in problems(yaml_path, "kernels.zzz=1")["kernels.zzz"]
    )
    elsewhere = problems(yaml_path, "kernels.moe=triton")["kernels.moe"]
    assert "kernels has all2all, grouped_gemm, attention" in elsewhere
    assert elsewhere.endswith("; or did you mean overlap.mode?")
    assert (
        "the sections are cache, cluster, experts, kernels" in problems(yaml_path, "zzz=1")["zzz"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: [1, 2", "line 1"),
        ("model:\n  path: a\n bad: b\n", "line 3"),
        ("- a\n- b\n", "expected sections"),
        ("5", "expected sections"),
        ("model: !!python/object:os.system {}\n", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_text_that_is_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    assert words in problems(write(tmp_path, text))[""]


def test_missing_file_and_missing_model(tmp_path: Path) -> None:
    assert "no such file" in problems(tmp_path / "absent.yaml")[""]
    assert problems(write(tmp_path, "# nothing\n")).keys() == {"model"}
    assert "is missing" in problems(write(tmp_path, "model:\n  dtype: auto\n"))["model.path"]


def test_duplicate_key(tmp_path: Path, checkpoint: Path) -> None:
    path = write(
        tmp_path,
        f"model:\n  path: {checkpoint}\ncluster:\n  ranks: 1\n  ranks: 2\nserve:\nserve:\n",
    )
    found = problems(path)
    assert found == {
        "cluster.ranks": "stands twice, in lines 4 and 5; keep one of them",
        "serve": "stands twice, in lines 6 and 7; keep one of them",
    }


def test_empty_section_means_defaults(tmp_path: Path, checkpoint: Path) -> None:
    path = write(tmp_path, f"model:\n  path: {checkpoint}\ncache:\n  # block_size: 8\nserve:\n")
    assert load_config(path).cache.block_size == 16


def test_keys_that_are_not_text(tmp_path: Path, checkpoint: Path) -> None:
    path = write(tmp_path, f"model: {{path: {checkpoint}, 3: 4}}\n5: 6\n")
    assert problems(path).keys() == {"model.3", "5"}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["model.path=/nowhere"], "model.path", "not a folder"),
        (["model.max_model_len=513"], "model.max_model_len", "at most 512"),
        (
            ["scheduler.chunked_prefill=false", "scheduler.max_num_batched_tokens=511"],
            "scheduler.chunked_prefill",
            "model.max_model_len = 512",
        ),
        (
            ["scheduler.max_num_seqs=9", "scheduler.max_num_batched_tokens=8"],
            "scheduler.max_num_seqs",
            "9 sequences",
        ),
        (
            ["scheduler.cuda_graph_sizes=[1,9]", "scheduler.max_num_batched_tokens=8"],
            "scheduler.cuda_graph_sizes",
            "no step has 9 tokens",
        ),
        (
            ["scheduler.cuda_graph_sizes=[1]", "scheduler.cuda_graphs=false"],
            "scheduler.cuda_graph_sizes",
            "captures no graphs",
        ),
        (["cache.num_blocks=31"], "cache.num_blocks", "at least 32"),
        (["cluster.nodes=2", "cluster.ray_address=auto"], "cluster.nodes", "2 nodes for 1 rank"),
        (["cluster.ranks=2", "cluster.nodes=2"], "cluster.nodes", "cluster.ray_address"),
        (
            ["cluster.replace_slow_rank=true", "cluster.slow_rank_factor=null"],
            "cluster.replace_slow_rank",
            "cluster.slow_rank_factor",
        ),
        (
            ["cluster.replace_slow_rank=true", "cluster.rebuild_attempts=0"],
            "cluster.replace_slow_rank",
            "would end the group",
        ),
    ],
)
def test_impossible_combination(
    yaml_path: Path, overrides: list[str], key: str, words: str
) -> None:
    found = problems(yaml_path, *overrides)
    assert found.keys() == {key}
    assert words in found[key]


def test_possible_neighbours_of_the_impossible(yaml_path: Path) -> None:
    load_config(
        yaml_path,
        [
            "scheduler.chunked_prefill=false",
            "scheduler.max_num_batched_tokens=512",
            "model.max_model_len=512",
            "cache.num_blocks=32",
            "scheduler.max_num_seqs=512",
            "scheduler.cuda_graph_sizes=[512,1]",
            "cluster.ranks=4",
            "kernels.all2all=allgather",
        ],
    )


def test_complaint_that_rests_on_a_wrong_key_is_left_out(yaml_path: Path) -> None:
    found = problems(yaml_path, "cluster.ranks=none", "cluster.nodes=2", "kernels.all2all=shm")
    assert found.keys() == {"cluster.ranks", "cluster.nodes"}
    assert "ray_address" in found["cluster.nodes"]
    assert problems(yaml_path, "model=3").keys() == {"model"}


def test_broken_checkpoint_names_its_field(tmp_path: Path, checkpoint: Path) -> None:
    raw = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "hidden_act": "relu"}))
    path = write(tmp_path, "model:\n  path: .\n")
    assert "hidden_act" in problems(path)["model.path"]


def test_the_cache_has_the_precision_of_the_model_or_fp8(yaml_path: Path) -> None:
    for dtype in ("auto", "bfloat16", "fp8"):
        assert load_config(yaml_path, [f"cache.dtype={dtype}"]).cache.dtype == dtype
    load_config(yaml_path, ["cache.dtype=float32", "model.dtype=float32"])
    found = problems(yaml_path, "cache.dtype=float16")
    assert found == {
        "cache.dtype": "float16 differs from model.dtype = bfloat16; expected auto, bfloat16 or fp8"
    }


def test_error_survives_pickling(yaml_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(yaml_path, ["serve.port=0"])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems


def test_resolve_fills_every_auto(yaml_path: Path, checkpoint: Path) -> None:
    config = load_config(yaml_path, ["cluster.device=cpu", "cache.cpu_memory_gib=0.5"])
    rank_config = resolve_rank_config(config)
    assert rank_config.model.dtype == "bfloat16"
    assert rank_config.model.max_model_len == MAX_LENGTH
    bytes_per_block = 2 * 1 * 16 * 2 * 64 * 2  # K and V, layers, tokens, heads, head_dim, bfloat16
    assert rank_config.cache.num_blocks == 2**29 // bytes_per_block
    assert rank_config.device == "cpu"
    assert rank_config.threads >= 1
    fp8 = load_config(
        yaml_path, ["cluster.device=cpu", "cache.cpu_memory_gib=0.5", "cache.dtype=fp8"]
    )
    bytes_per_block = 2 * 1 * 16 * 2 * (64 + 1)  # and a byte for each scale
    assert resolve_rank_config(fp8).cache.num_blocks == 2**29 // bytes_per_block
    fixed = load_config(
        yaml_path,
        [
            "cluster.device=cpu",
            "model.dtype=float32",
            "model.max_model_len=100",
            "cache.num_blocks=7",
            "cluster.threads_per_rank=5",
        ],
    )
    resolved = resolve_rank_config(fixed)
    assert (resolved.model.dtype, resolved.model.max_model_len) == ("float32", 100)
    assert (resolved.cache.num_blocks, resolved.threads) == (7, 5)


def test_resolve_refuses_a_cache_below_one_request(yaml_path: Path) -> None:
    config = load_config(yaml_path, ["cluster.device=cpu", "cache.cpu_memory_gib=0.0001"])
    with pytest.raises(ConfigError, match=r"cache\.cpu_memory_gib: 0\.0001 GiB cannot hold"):
        resolve_rank_config(config)


@pytest.mark.parametrize(("num_gpus", "device"), [(0, "cpu"), (1, "cpu"), (2, "cuda")])
def test_device_auto_wants_a_gpu_for_every_rank(
    yaml_path: Path, num_gpus: int, device: str
) -> None:
    config = load_config(yaml_path, ["cluster.ranks=2"])
    assert resolve_rank_config(config, num_gpus=num_gpus).device == device


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(2, 1, 1), (2, 4, 1), (9, 2, 4), (64, 2, 8)]
)
def test_threads_auto_share_all_cores_but_one(
    yaml_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr("cluster.config.resolve.available_cores", lambda: cores)
    assert resolve_threads(load_config(yaml_path, [f"cluster.ranks={ranks}"])) == threads
