"""Figures that are settings: made from the code where one line does it, else allowed with a reason."""

import json
from collections.abc import Iterator

import torch

from cluster.api.images.geometry import Geometry
from cluster.api.request import uploads
from cluster.api.settings import ApiSettings
from cluster.bench.report import LATE_MS
from cluster.client import group_streams, refusals, router, stream_watch
from cluster.commands import check_cluster, reaper, start
from cluster.config.images_section import ImagesConfig
from cluster.config.phalanx_config import ClusterConfig
from cluster.config.serve_section import LimitsConfig, ResponsesStoreConfig
from cluster.config.videos_section import VideosConfig
from cluster.ingress import http_protocol
from cluster.offline import engine
from cluster.supervisor import (
    group,
    heartbeat,
    launcher,
    leases,
    relocation,
    slow_ranks,
    supervisor,
)
from kernels.all2all import deepep_limits
from kernels.attention import base, shared_prefixes
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import SdpaAttention
from tests.claims import ROOT, row
from tests.published_configs import PUBLISHED
from workers.adapters import pools
from workers.adapters.layout import AdapterLayout
from workers.engine import datagram_vote
from workers.images import step_share
from workers.kv_cache import transfers
from workers.kv_transfer import keeper, kv_pull, row_copies
from workers.lora_config import LoraConfig
from workers.models.registry import parse_model_config
from workers.overlap import policy
from workers.rank import actor, expert_staging
from workers.sampling import grammar_compiler
from workers.scheduler import prefill_cap
from workers.stats import pace, stats_line
from workers.step import step_sync
from workers.weights import reader
from workers.weights.tensors import DTYPE_BYTES
from workers.wire import secure_socket

VERSIONS = "names of versions"
WORDS = "counts of things, no measurement"
ALLOWED: dict[str, dict[str, str]] = {
    "README.md": {
        "on one GPU of 80 GB": "the size of the GPU",
        "GLM-4.5 to 4.7": VERSIONS,
        "| compute capability 9.0 (Hopper)": VERSIONS,
        "| compute capability 8.0 or newer": VERSIONS,
        "below 9.0 no DeepGEMM": VERSIONS,
        "FP8 prompts (128 / 4,096 / 8)": "the load",
    },
    "docs/backends.md": {
        "that have begun end after 100 s": "a constant of DeepEP's kernels",
    },
    "docs/api.md": {
        "a context of 32,768 tokens or more": "advice for coding agents with long instructions",
    },
    "docs/bench.md": {
        "0.5 burstier": "an argument",
        "ran 20 s of each profile": "the command below it has the time",
    },
    "docs/cluster.md": {
        "pulls a cable for 2 s, for 9 s and for ever": "what scripts/test_cluster does",
    },
    "docs/experiments.md": {"runs every cell several times": WORDS},
    "docs/models.md": {
        "two prompts of 4,096 tokens": "the load",
        "powers of two | 32 |": "the group of MXFP4's definition",
    },
    "docs/operations.md": {"| 400 |": "a status of HTTP"},
    "docs/offline.md": {
        "no line runs twice": WORDS,
        **{f"| {code} |": "an exit code" for code in (0, 1, 2, 3, 130)},
    },
    "docs/troubleshooting.md": {"| 429 |": "a status of HTTP"},
}


def api() -> Iterator[str]:
    """docs/api.md: limits of kept responses, the demo's context, versions of clients that files of tests pin."""
    yield f"every rank has generated a token within the last {ApiSettings.probe_fresh_s:.0f} s"
    store = ResponsesStoreConfig()
    yield f"`max_responses`, {store.max_responses}; 0 keeps none"
    yield f"`max_bytes`, {store.max_bytes / 2**20:.0f} MiB"
    demo = json.loads((ROOT / "configs/models/demo/config.json").read_text())
    yield f"The demo model, with {demo['max_position_embeddings']:,} tokens"
    clients = ROOT / "tests" / "clients"
    agents, node = (
        json.loads((clients / name / "package.json").read_text())["dependencies"]
        for name in ("agents", "node")
    )
    yield row("Claude Code", agents["@anthropic-ai/claude-code"]) + " the"
    yield row("Codex", agents["@openai/codex"]) + " the"
    yield row("`openai` (Node)", node["openai"])
    yield row("`@anthropic-ai/sdk` (Node)", node["@anthropic-ai/sdk"])
    pinned = (clients / "libraries" / "requirements.txt").read_text().split()
    for name in ("openai-agents", "langchain-openai", "instructor", "litellm"):
        (version,) = (line.partition("==")[2] for line in pinned if line.startswith(f"{name}=="))
        yield row(f"`{name}`", version)


def adapters() -> Iterator[str]:
    """docs/adapters.md."""
    yield f"in pieces of at most {pools.PIECE_BYTES >> 20} MiB a step"
    model = parse_model_config(PUBLISHED["qwen3_moe"], {}, "config.json")
    pieces = []
    for targets in (["attention"], ["attention", "experts"]):
        lora = LoraConfig(max_loras=1, max_rank=16, targets=targets)
        layout = AdapterLayout.of(model, lora, range(model.num_experts))
        one = pools.AdapterPools(layout, 1, device=torch.device("meta"), dtype=torch.bfloat16)
        pieces.append(one.least_pieces)
    assert pieces[0] == 1
    yield (
        "Of Qwen3-30B-A3B an adapter of rank 16 on attention is 1 piece, one on attention and all experts "
        f"{pieces[1]} pieces"
    )


def kv_cache() -> Iterator[str]:
    """docs/kv-cache.md."""
    yield f"If {transfers.MIN_GAIN} tokens or more are there"
    yield f"{keeper.KEEP_S:.0f} s after the last rank of a server"
    yield f"two buffers of {row_copies.BUFFER_BYTES >> 20} MiB, or of the size of a state"
    assert transfers.HELD_SHARE == 4
    yield "Up to a quarter of the KV blocks are held while they are copied"
    limits = kv_pull.FetchLimits()
    assert 8 < limits.wait_s <= 9
    yield "A request waits at most 9 s"
    yield f"up to {limits.answer_s:g} s for the source's answer"
    yield f"no new part of {kv_pull.PART_BYTES >> 20} MiB after {limits.fetch_s:g} s"
    yield f"and {limits.part_s:g} s for each part"
    yield f"The lease ends with the fetch, or {limits.lease_s:g} s after the reader's"


def backends() -> Iterator[str]:
    """docs/backends.md."""
    yield f"on at most {deepep_limits.MAX_SMS} SMs"
    yield f"up to {deepep_limits.MAX_TOKENS_LOW_LATENCY:,} tokens a step"
    yield f"rows of a rank, {deepep_limits.MAX_TOKENS_LOW_LATENCY:,} at most"
    on_cpu = [it.sharing_cost.saved_tokens for it in (NativeAttention, SdpaAttention)]
    yield f"at least {shared_prefixes.FLASHINFER_MIB} MiB of reads in a layer with `flashinfer`"
    yield f"{shared_prefixes.TRITON_MIB} MiB with `triton`"
    yield f"{shared_prefixes.TRITON_FP8_MIB} MiB with an FP8 cache"
    yield f"{shared_prefixes.LATENTS_MIB} MiB with `flashinfer_mla`"
    yield f"{on_cpu[0]:,} tokens with `native` or {on_cpu[1]:,} tokens with `sdpa`"
    yield f"of {base.LEAST_SHARED_DECODES} decodes or more"
    yield f"prompts of up to {base.MOST_SHARED_MIXED:,} rows"


def bench() -> Iterator[str]:
    """docs/bench.md."""
    yield f"a p99 above {LATE_MS:.0f} ms is printed"


def cluster() -> Iterator[str]:
    """docs/cluster.md."""
    yield f"a clock that is more than {check_cluster.MAX_SKEW_S:.0f} s off"


def experiments() -> Iterator[str]:
    """docs/experiments.md."""
    yield f"the mean of samples, one in {step_sync.LOAD_STEPS} steps"


def experts() -> Iterator[str]:
    """docs/experts.md."""
    gpu, cpu = (expert_staging.COMMIT_BYTES[device] >> 20 for device in ("cuda", "cpu"))
    yield f"up to {gpu} MiB on a GPU and {cpu} MiB on a CPU"
    of_cpu, of_gpu = (expert_staging.PACE[device] for device in ("cpu", "cuda"))
    yield f"on a CPU the thread runs {of_cpu.share:.0%} of the time, on a GPU"
    yield f"where it only launches copies, {of_gpu.share:.0%}"
    yield f"end after {of_cpu.longest_s:.0f} s on a CPU and {1e3 * of_gpu.longest_s:.0f} ms on a GPU"


def models() -> Iterator[str]:
    """docs/models.md."""
    model = parse_model_config(PUBLISHED["qwen3_5_moe_text"], {}, "config.json")
    slot = model.linear_specs[0].slot_bytes(DTYPE_BYTES["bfloat16"])
    yield f"({slot / 1e6:.1f} MB in Qwen3.6-35B-A3B, half"
    yield f"each of up to {reader.MAX_THREADS} threads holds {reader.PIECE >> 20} MiB"
    yield f"{step_share.DECODE_SHARE} of the time that a step takes that only decodes"
    yield f"and {step_share.PROMPT_SHARE} of the time that prompts add"


def offline() -> Iterator[str]:
    """docs/offline.md."""
    assert engine.QUEUED == 2
    yield "Twice as many requests as the ranks run at once are in flight"


def operations() -> Iterator[str]:
    """docs/operations.md."""
    period = int(
        start.RAY_ENVIRONMENT["RAY_raylet_check_for_unexpected_worker_disconnect_interval_ms"]
    )
    assert period == 100
    yield (
        "Ray looks for dead processes ten times a second in the Ray of `phalanx serve`, and once a "
        "second in a cluster"
    )
    assert (pace.FACTOR, heartbeat.STAGE_FACTOR, launcher.SPARE_DELAY_S) == (8, 4, 1.0)
    yield "a rank may be silent four times as long"
    yield f"and have {heartbeat.CAPTURE_FACTOR} times `cluster.hang_timeout_s` for it"
    yield f"{heartbeat.CHECKS} times within `cluster.hang_timeout_s` the supervisor reads"
    yield "another one starts a second after the ranks serve again"
    factor = ClusterConfig.model_fields["slow_rank_factor"].default
    yield f"is `cluster.slow_rank_factor` times ({factor:g} by default) the median of the other ranks"
    assert (slow_ranks.SLICE_S, slow_ranks.MIN_OWN_SHARE) == (1, 0.5)
    yield f"was slow in each of {slow_ranks.SLICES} seconds with steps is named within 10 s"
    yield f"stays slow for {slow_ranks.REPLACE_SLICES} s gets a new"
    yield f"at most once in {slow_ranks.REPLACE_AGAIN_S / 60:.0f} minutes"
    yield f"or served for less than {group.STABLE_S:.0f} s, the group fails"
    yield f"The group looks for room every {relocation.GROW_S:.0f} s"
    yield f"they leave the ranks after {leases.LEASE_S:.0f} s"
    yield f"the server ends {supervisor.LAUNCHER_LEASE_S:.0f} s after the last heartbeat"
    yield f"the remaining processes of its Ray within {2 * reaper.POLL_S + reaper.GRACE_S:.0f} s"
    again_ms = 1000 * datagram_vote._ASK_S
    yield f"A rank that misses a vote requests it after {again_ms:.0f} ms"
    yield f"so a lost datagram costs about {again_ms:.0f} ms"
    yield f"are refused for {refusals.REFUSE_S / 60:.0f} minutes with the same 500"
    assert LimitsConfig().request_timeout_s == 3600
    yield "`serve.limits.request_timeout_s`, an hour by default"
    assert secure_socket.PING_MS + secure_socket.ANSWER_MS < 10_000 and stream_watch.SILENCE_S < 10
    yield "is noticed within 10 s"
    assert ApiSettings.stats_timeout_s > group_streams.STATS_S
    yield f"A rank that does not answer within {group_streams.STATS_S} s"
    assert actor.LOST_CHECKS * actor.FOLLOW_S == 60
    yield "give back their places a minute after Ray has reported it"
    yield f"each of its ranks has sent a token within the last {ApiSettings.probe_fresh_s:.0f} s"
    yield f"one line per busy rank every {stats_line.INTERVAL_S:.0f} s"
    yield f"at which ubatches win by more than {100 * policy.MARGIN:.0f} % there"
    assert (prefill_cap.DECODE_SHARE, router.PREFILL_WEIGHT) == (2, 2)
    yield "The limit begins at its lower bound, doubles until prompts take half of the time"
    yield "gaps may be twice as long as such a step"
    yield f"The limit is at least {prefill_cap.FLOOR_TOKENS} tokens or one KV block"
    yield "tokens of prompts without a first token count three times"


def images() -> Iterator[str]:
    """docs/images.md."""
    limits = {name: field.default for name, field in ImagesConfig.model_fields.items()}
    yield f"| `max_images` | {limits['max_images']} of a request |"
    yield f"| `max_image_bytes` | {limits['max_image_bytes'] >> 20} MiB of a file |"
    yield f"| `max_source_pixels` | {limits['max_source_pixels']:,}, width times height"
    yield f"| `max_body_bytes` | {limits['max_body_bytes'] >> 20} MiB of a body"
    yield f"| `max_open_bytes` | {limits['max_open_bytes'] >> 30} GiB of pixels"
    yield f"| `fetch_timeout_s` | {limits['fetch_timeout_s']:.0f} s |"
    videos = {name: field.default for name, field in VideosConfig.model_fields.items()}
    yield f"| `max_videos` | {videos['max_videos']} of a request |"
    yield f"| `max_video_bytes` | {videos['max_video_bytes'] >> 20} MiB of a file"
    yield f"| `max_frames` | {videos['max_frames']} of a video |"
    yield f"A body has {ApiSettings.body_cpu_s:.0f} s of processor time"
    yield f"a token of Qwen3.6 has {Geometry().bytes_of_token >> 10} KiB"


def security() -> Iterator[str]:
    """docs/security.md."""
    most = ImagesConfig.model_fields["max_body_bytes"].default >> 20
    yield f"bodies of `serve.images.max_body_bytes` ({most} MiB)"
    yield f"A head has {http_protocol.MAX_HEAD_BYTES >> 10} KiB"
    yield f"beyond it the oldest upload of over {uploads._SLOW_S:.0f} s ends"
    inline, thread = ApiSettings.inline_body_bytes >> 10, ApiSettings.thread_body_bytes >> 10
    yield f"Bodies of up to {inline} KiB are prepared in the event loop, up to {thread} KiB in a thread"
    yield f"one of over {grammar_compiler.SMALL_CHARS >> 10} KiB compiles in a process"
