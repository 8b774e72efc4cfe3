"""The files for Ray clusters, checked by Ray's own schema code."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster.config.load import load_config
from kernels.attention.flashinfer import COMPILED_WITH

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("local", "aws")
KUBERAY = ROOT / "configs" / "kuberay" / "rayservice.yaml"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def launcher(name: str) -> dict[str, Any]:
    return read(ROOT / "configs" / "ray" / f"{name}.yaml")


def service() -> dict[str, Any]:
    return read(KUBERAY)


def serve_files() -> dict[str, dict[str, Any]]:
    return {
        "ray": launcher("serve"),
        "kuberay": yaml.safe_load(service()["spec"]["serveConfigV2"]),
    }


@pytest.mark.parametrize("name", LAUNCHERS)
def test_ray_accepts_the_launcher_file(name: str) -> None:
    config = launcher(name)
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="providr"):
        validate_config(prepare_config({**config, "providr": config["provider"]}))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_ray_of_a_launcher_file_needs_the_token(name: str) -> None:
    config = launcher(name)
    starts = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    started = [command for command in starts if "ray start" in command]
    assert len(started) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in started)
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert "0.0.0.0" not in yaml.safe_dump(config), "nothing listens beyond the machine unasked"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_file_mounts_what_is_there(name: str) -> None:
    local = set(launcher(name)["file_mounts"].values()) - {"~/.ray/auth_token", "dist"}
    assert local and all((ROOT / path).is_file() for path in local)


def test_the_local_cluster_starts_all_its_machines() -> None:
    config = launcher("local")
    workers = len(config["provider"]["worker_ips"])
    assert config["min_workers"] == config["max_workers"] == workers
    args = launcher("serve")["applications"][0]["args"]
    assert args["cluster.nodes"] == workers + 1 and args["cluster.ranks"] % (workers + 1) == 0


@pytest.mark.parametrize("name", ["ray", "kuberay"])
def test_serve_and_phalanx_accept_the_application(name: str) -> None:
    schema = ServeDeploySchema.model_validate(serve_files()[name])
    (application,) = schema.applications
    assert application.import_path == "cluster.app:build"
    overrides = [f"{key}={value}" for key, value in application.args.items()]
    config = load_config(ROOT / "cluster" / "share" / "local.yaml", overrides)
    assert config.cluster.ray_address == "auto" and config.cluster.nodes > 1


def test_the_proxy_of_ssh_machines_listens_on_the_machine_alone() -> None:
    assert ServeDeploySchema.model_validate(launcher("serve")).http_options.host == "127.0.0.1"


def test_the_ray_service() -> None:
    found = service()
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayService")
    cluster = found["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert len(images) == 1
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = pod["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} <= volumes
        assert "/dev/shm" in {mount["mountPath"] for mount in mounts}
    nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    assert serve_files()["kuberay"]["applications"][0]["args"]["cluster.nodes"] == nodes


def test_the_image_compiles_attention_and_takes_the_tested_versions() -> None:
    """Without a compiler a GPU computes attention by sdpa; the build of a GPU image must fail then."""
    text = (ROOT / "configs/kuberay/Dockerfile").read_text()
    (gpu,) = re.findall(r"^#.*--build-arg BASE=(\S+) --build-arg EXTRAS=\[gpu\] \.$", text, re.M)
    assert re.fullmatch(r"nvidia/cuda:13\.0[\w.]*-devel-ubuntu24\.04", gpu), (
        "runtime images lack nvcc"
    )
    (checked,) = re.findall(r'case "\$EXTRAS" in \*gpu\*\) (.*?) ;; esac', text)
    assert re.findall(r"command -v (\S+)", checked) == list(COMPILED_WITH)
    assert "--constraint /tmp/phalanx/constraints.txt" in text
    (copied,) = re.findall(r"^COPY dist/\*\.whl (\S+) /tmp/phalanx/$", text, re.M)
    assert (ROOT / copied).is_file()


def test_one_version_of_ray_everywhere() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.search(r"ray\[serve\]>=(\d+\.\d+)", project)
    assert wanted is not None
    assert service()["spec"]["rayClusterConfig"]["rayVersion"].startswith(wanted[1] + ".")
    places = [
        ROOT / "configs/kuberay/Dockerfile",
        *(ROOT / f"configs/ray/{n}.yaml" for n in LAUNCHERS),
    ]
    for path in places:
        assert f"ray[default]=={wanted[1]}.*" in path.read_text(), path


@pytest.mark.parametrize("name", LAUNCHERS)
def test_commands_on_the_nodes_find_ray_and_show_the_token(name: str) -> None:
    """`ray down` runs `ray stop` in a shell of the user: without Ray in its path the head went on."""
    (line,) = [line for line in launcher(name)["setup_commands"] if ".bashrc" in line]
    assert "PATH=~/phalanx/venv/bin:$PATH" in line and "RAY_AUTH_MODE=token" in line


def test_machines_without_a_route_have_the_address_of_the_launcher_file() -> None:
    """Ray took 127.0.1.1 there, and no other machine could join. Its second autoscaler left one machine out."""
    config = launcher("local")
    starts = (config["head_start_ray_commands"][-1], config["worker_start_ray_commands"][-1])
    for start in starts:
        assert start.endswith(" --node-ip-address=$(echo $SSH_CONNECTION | cut -d' ' -f3)")
    assert "RAY_enable_autoscaler_v2=0 " in starts[0]
