"""Settings and tokenizer of the HTTP layer and of offline requests, from the configuration and the checkpoint."""

from cluster.api.admission import KeyLimits
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer, load_default_sampling, load_tokenizer
from cluster.config.api_keys import KeyDigests
from cluster.config.chat_template import read_chat_template
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import max_num_seqs
from cluster.config.serve_section import AccessConfig, open_choices_limit
from cluster.ingress.image_settings import image_settings
from cluster.supervisor.placement import num_gpus
from workers import hub
from workers.models.registry import configured_model


def num_running(config: PhalanxConfig) -> int:
    """Return the number of sequences that all ranks run at once. Needs a running Ray, which counts the GPUs."""
    return config.cluster.ranks * max_num_seqs(config, num_gpus())


def api_settings(config: PhalanxConfig, keys: KeyDigests | None = None) -> ApiSettings:
    """Return the settings of one ingress. Needs a running Ray."""
    serve = config.serve
    keys = keys or KeyDigests()
    several = len(keys.clients) > 1
    access, model = serve.access, configured_model(config.model)
    return ApiSettings(
        **serve.limits.model_dump(exclude={"keep_alive_s", "rebuild_wait_s", "max_connections"}),
        max_open_choices=open_choices_limit(serve, num_running(config)),
        keys=keys,
        stats_fresh_s=serve.stats_fresh_s,
        client_routing=not several if access.client_routing == "auto" else access.client_routing,
        separate_prefixes=several
        if access.separate_prefixes == "auto"
        else access.separate_prefixes,
        cors_origins=tuple(serve.cors_origins),
        num_replicas=serve.replicas,
        max_stored_responses=serve.responses_store.max_responses,
        max_stored_bytes=serve.responses_store.max_bytes,
        tool_parser=serve.tool_parser,
        reasoning_parser=serve.reasoning_parser,
        images=image_settings(config, model),
        pooling=model.pooling,
        default_sampling=load_default_sampling(config.model.folder),
    )


def key_limits(access: AccessConfig) -> KeyLimits:
    """Return the limits of one key in one ingress."""
    return KeyLimits(access.max_requests, access.max_tokens)


def serving_tokenizer(config: PhalanxConfig) -> ServingTokenizer:
    """Return the tokenizer of the checkpoint with the configured chat template. Takes a second or more.

    Fetches the files of a model of the Hub before, if this node lacks them.
    """
    model = config.model
    if model.revision is not None:
        hub.fetch_description(model.path, model.revision)
    return load_tokenizer(model.folder, read_chat_template(config.serve.chat_template))
