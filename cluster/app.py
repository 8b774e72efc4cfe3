"""`serve run cluster.app:build config=configs/local.yaml`: the application without `phalanx serve`."""

from ray.serve import Application

from cluster.config.api_keys import load_digests
from cluster.config.examples import DEMO
from cluster.config.load import load_config
from cluster.ingress.ingress import deploy


def build(args: dict[str, str]) -> Application:
    """The Serve application of a YAML. `args` holds `config`, by default the demo, and any `key.path=value` overrides.

    Keys come from this process's environment and from serve.api_keys_file. Raises ConfigError for a
    wrong configuration, ApiKeyError for wrong keys.
    """
    options = dict(args)
    path = options.pop("config", DEMO)
    config = load_config(path, [f"{key}={value}" for key, value in options.items()])
    return deploy(config, listen=False, keys=load_digests(config.serve.api_keys_file))
