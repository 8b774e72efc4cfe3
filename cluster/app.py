"""`serve run cluster.app:build config=configs/local.yaml`: the same application without our launcher."""

from ray.serve import Application

from cluster.config import load_config
from cluster.ingress import Ingress


def build(args: dict[str, str]) -> Application:
    """The Serve application of a YAML. `args` holds `config` and any `key.path=value` overrides.

    Raises ConfigError when the configuration is wrong.
    """
    options = dict(args)
    path = options.pop("config", "configs/local.yaml")
    config = load_config(path, [f"{key}={value}" for key, value in options.items()])
    return Ingress.options(num_replicas=config.serve.replicas).bind(config, listen=False)
