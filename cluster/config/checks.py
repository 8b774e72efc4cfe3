"""Finds combinations of settings that cannot work, though each setting alone is valid.

Reads the checkpoint's config.json, the API keys' file, the certificate and the chat template; has no other effect.
Checks yield problems, none raises.
"""

import os
import ssl
from collections.abc import Iterator

from cluster.config.api_keys import ApiKeyError, read_keys_file
from cluster.config.chat_template import ChatTemplateError, read_chat_template
from cluster.config.check_experts import check_experts
from cluster.config.check_images import check_images
from cluster.config.check_lora import check_lora
from cluster.config.check_pool import check_pool
from cluster.config.check_speculation import check_speculation
from cluster.config.errors import Problem
from cluster.config.phalanx_config import PhalanxConfig, SchedulerSection
from cluster.config.serve_section import ServeConfig
from workers.models.config_reader import ModelConfigError
from workers.models.registry import configured_model
from workers.specs.model import ModelConfig


def check_together(config: PhalanxConfig) -> list[Problem]:
    """All problems, in the order of the sections."""
    problems: list[Problem] = []
    try:
        model = configured_model(config.model)
    except ModelConfigError as error:
        model = None
        problems.append(Problem("model.path", str(error), ("model.revision",)))
    problems += _check_cluster(config)
    problems += _check_scheduler(config)
    problems += _check_lengths(config, model)
    problems += _check_cache_dtype(config, model)
    problems += _check_host_memory(config)
    problems += check_speculation(config, model)
    problems += check_experts(config, model)
    problems += check_lora(config)
    problems += check_images(config, model)
    problems += check_pool(config, model)
    problems += _check_serve(config)
    return problems


def _check_host_memory(config: PhalanxConfig) -> Iterator[Problem]:
    cache = config.cache
    if cache.disk_path is not None and not cache.host_memory_gib:
        message = "needs cache.host_memory_gib, which is 0: files keep what leaves host memory"
        yield Problem("cache.disk_path", message, ("cache.host_memory_gib",))
    if cache.disk_path is not None and os.path.isfile(cache.disk_path):
        # Each node makes a folder that is missing.
        yield Problem("cache.disk_path", f"{cache.disk_path!r} is a file; expected a folder")
    if cache.host_memory_gib and not cache.prefix_caching:
        message = "needs cache.prefix_caching, which is false: KV is found by its prefix"
        yield Problem("cache.host_memory_gib", message, ("cache.prefix_caching",))
    if cache.transfer != "off" and not cache.host_memory_gib:
        message = f"{cache.transfer} needs cache.host_memory_gib, which is 0: it moves KV between host memories"
        yield Problem("cache.transfer", message, ("cache.host_memory_gib",))


def _check_cluster(config: PhalanxConfig) -> Iterator[Problem]:
    ranks, nodes = config.cluster.ranks, config.cluster.nodes
    involves = ("cluster.ranks",)
    if nodes > ranks:
        yield Problem(
            "cluster.nodes",
            f"{nodes} nodes for {ranks} rank(s); expected at most one node a rank (cluster.ranks)",
            involves,
        )
    elif ranks % nodes and not config.pool:
        yield Problem(
            "cluster.nodes",
            f"{ranks} ranks (cluster.ranks) do not divide evenly over {nodes} nodes",
            involves,
        )
    yield from _check_slow_ranks(config)
    if nodes > 1 and config.cluster.ray_address is None:
        yield Problem(
            "cluster.nodes",
            f"{nodes} nodes need a running Ray cluster; "
            "set cluster.ray_address to auto or host:port",
            ("cluster.ray_address",),
        )


def _check_slow_ranks(config: PhalanxConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if not cluster.replace_slow_rank:
        return
    if cluster.slow_rank_factor is None:
        message = "true needs cluster.slow_rank_factor, which is null: no rank is slow then"
        yield Problem("cluster.replace_slow_rank", message, ("cluster.slow_rank_factor",))
    if not cluster.rebuild_attempts:
        message = "true needs cluster.rebuild_attempts, which is 0: the first slow rank would end the group"
        yield Problem("cluster.replace_slow_rank", message, ("cluster.rebuild_attempts",))


def _check_scheduler(config: PhalanxConfig) -> Iterator[Problem]:
    if (
        config.scheduler.max_prefill_tokens_with_decodes != "auto"
        and not config.scheduler.chunked_prefill
    ):
        yield Problem(
            "scheduler.max_prefill_tokens_with_decodes",
            "a limit needs scheduler.chunked_prefill = true, because it splits prompts; expected auto",
            ("scheduler.chunked_prefill",),
        )
    if config.scheduler.target_itl_ms is not None:
        if config.scheduler.max_prefill_tokens_with_decodes != "auto":
            yield Problem(
                "scheduler.target_itl_ms",
                "a target adapts scheduler.max_prefill_tokens_with_decodes = auto, which is a number here",
                ("scheduler.max_prefill_tokens_with_decodes",),
            )
        if not config.scheduler.chunked_prefill:
            yield Problem(
                "scheduler.target_itl_ms",
                "a target needs scheduler.chunked_prefill = true, because it splits prompts",
                ("scheduler.chunked_prefill",),
            )
    yield from _check_graph_sizes(config.scheduler)
    seqs, tokens = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    if seqs == "auto" or tokens == "auto":
        return  # an auto limit is chosen to fit the other limit
    if seqs > tokens:
        yield Problem(
            "scheduler.max_num_seqs",
            f"{seqs} sequences cannot take a token each within "
            f"scheduler.max_num_batched_tokens = {tokens}; "
            "lower the first or raise the second",
            ("scheduler.max_num_batched_tokens",),
        )


def _check_graph_sizes(scheduler: SchedulerSection) -> Iterator[Problem]:
    sizes, tokens = scheduler.cuda_graph_sizes, scheduler.max_num_batched_tokens
    if sizes == "auto":
        return
    if scheduler.cuda_graphs is False:
        yield Problem(
            "scheduler.cuda_graph_sizes",
            "scheduler.cuda_graphs = false captures no graphs; expected auto",
            ("scheduler.cuda_graphs",),
        )
    if tokens != "auto" and max(sizes) > tokens:
        yield Problem(
            "scheduler.cuda_graph_sizes",
            f"no step has {max(sizes)} tokens; expected at most scheduler.max_num_batched_tokens = {tokens}",
            ("scheduler.max_num_batched_tokens",),
        )


def _check_lengths(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """Limits that depend on the longest request: checkpoint, step budget, cache."""
    length = config.model.max_model_len
    if model is not None:
        trained = model.max_position_embeddings
        if length == "auto":
            length = trained
        elif length > trained:
            yield Problem(
                "model.max_model_len",
                f"{length} is more than the checkpoint's max_position_embeddings; "
                f"expected at most {trained}, or auto",
                ("model.path",),
            )
            return
    if length == "auto":
        return
    scheduler, involves = config.scheduler, ("model.max_model_len", "model.path")
    budget = scheduler.max_num_batched_tokens
    if not scheduler.chunked_prefill and budget != "auto" and budget < length:
        yield Problem(
            "scheduler.chunked_prefill",
            f"false needs scheduler.max_num_batched_tokens >= model.max_model_len = {length}, "
            f"it is {budget}; raise it, shorten the length, or set it to true",
            ("scheduler.max_num_batched_tokens", *involves),
        )
    cache = config.cache
    needed = -(-length // cache.block_size)
    if cache.num_blocks != "auto" and cache.num_blocks < needed:
        yield Problem(
            "cache.num_blocks",
            f"{cache.num_blocks} blocks of {cache.block_size} tokens cannot hold one request of "
            f"model.max_model_len = {length}; expected at least {needed}, or auto",
            ("cache.block_size", *involves),
        )


def _check_cache_dtype(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """A precision of the KV cache that the model's attention cannot read."""
    wanted = config.cache.dtype
    if model is None or wanted in ("auto", "fp8"):
        return
    dtype = model.dtype if config.model.dtype == "auto" else config.model.dtype
    if wanted != dtype:
        yield Problem(
            "cache.dtype",
            f"{wanted} differs from model.dtype = {dtype}; expected auto, {dtype} or fp8",
            ("model.dtype", "model.path"),
        )


def _check_serve(config: PhalanxConfig) -> Iterator[Problem]:
    file = config.serve.api_keys_file
    if file is not None:
        try:
            read_keys_file(file)
        except ApiKeyError as error:
            yield Problem("serve.api_keys_file", str(error))
    limits = config.serve.limits
    if limits.max_upload_bytes < limits.max_body_bytes:
        yield Problem(
            "serve.limits.max_upload_bytes",
            f"{limits.max_upload_bytes} bytes of all bodies hold no body of serve.limits.max_body_bytes = "
            f"{limits.max_body_bytes}; raise the first or lower the second",
            ("serve.limits.max_body_bytes",),
        )
    yield from _check_tls(config.serve)
    try:
        read_chat_template(config.serve.chat_template)
    except ChatTemplateError as error:
        yield Problem("serve.chat_template", str(error))


def _check_tls(serve: ServeConfig) -> Iterator[Problem]:
    if (serve.tls_cert_file is None) != (serve.tls_key_file is None):
        yield Problem(
            "serve.tls_cert_file",
            "HTTPS needs a certificate and its key; give both serve.tls_cert_file and serve.tls_key_file, or neither",
            ("serve.tls_key_file",),
        )
    elif serve.tls_cert_file is not None:
        try:
            # An empty password, because OpenSSL would read one from the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                serve.tls_cert_file, serve.tls_key_file, password=""
            )
        except OSError as error:  # ssl.SSLError too
            yield Problem(
                "serve.tls_cert_file",
                f"cannot be used with serve.tls_key_file: {error.strerror or error}",
                ("serve.tls_key_file",),
            )
