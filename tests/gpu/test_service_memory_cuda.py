"""In service a rank takes no memory that its start left no room for, whatever it is asked for.

All else of the GPU is taken meanwhile. Asked for are too long prompts, too many sequences at once, and in full batches
all that takes memory in sampling.
"""

import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import make_request, rank_config
from tests.distributed.rank_pool import RankPool
from tests.gpu.test_memory_cuda import GIB, MIB, crowded, free_unused
from workers.config import RankConfig
from workers.wire.request import EngineRequest, RequestOutput, merge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Qwen3's: beside the cache it is logits that take memory.
VOCABULARY = 151_936
MAX_NUM_SEQS, MAX_TOKENS, MAX_LEN, BLOCK_SIZE = 32, 512, 768, 16
FEW_BLOCKS = 40  # of the 48 that a request of MAX_LEN needs
# Most that steps may take beside what is held when the rank is ready. Of a vocabulary like this the filters of 32 rows
# take 0.35 GB, logits and what is kept of them 0.1 GB, 256 rows of a prompt's logits 0.4 GB; torch may keep them apart.
GROWTH = GIB
# What a GPU gives beside torch's tensors: kernels that are loaded at their first use, and the ends of torch's segments.
SLACK = 256 * MIB

FILTERS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 1e-4, "seed": 5}
PENALTIES: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.2,
}
BIAS: dict[str, Any] = {"logit_bias": tuple((token, 0.5) for token in range(0, 1024 * 80, 80))}
LOGPROBS: dict[str, Any] = {"logprobs": 20, "prompt_logprobs": 20}
STYLES: tuple[dict[str, Any], ...] = (
    {},
    FILTERS,
    {**FILTERS, "top_k": VOCABULARY - 1},
    PENALTIES,
    BIAS,
    LOGPROBS,
    {**FILTERS, **PENALTIES, **BIAS, **LOGPROBS},
)


@dataclass(frozen=True)
class Result:
    """What one rank's traffic came to.

    room, growth   bytes that were left to it, and what torch took of them at most
    """

    wrong: list[str]
    num_aborted: int
    num_preemptions: int
    room: int
    growth: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_layers": 2, "hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128}
    folder = tmp_path_factory.mktemp("service") / "model"
    return make_checkpoint(folder, **sizes, vocab_size=VOCABULARY, weights=False)


# As many blocks as there is room for, which no traffic fills; and so few that those who run take them from each other.
@pytest.mark.parametrize("num_blocks", ["auto", FEW_BLOCKS])
def test_no_traffic_takes_memory_that_is_not_there(model: Path, num_blocks: int | str) -> None:
    config = rank_config(
        model,
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": MAX_LEN, "weights": "dummy"},
        scheduler={"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_TOKENS},
        cache={"block_size": BLOCK_SIZE, "num_blocks": num_blocks, "memory_fraction": 0.2},
    )
    pool = RankPool(1)
    try:
        (found,) = pool.run(_serve, 1, config, with_group=False, timeout_s=280)
    finally:
        pool.close()
    print(f"torch took {found.growth / MIB:.0f} MiB of {found.room / MIB:.0f} MiB")
    assert found.wrong == []
    assert found.num_aborted > 0
    assert (found.num_preemptions > 0) == (num_blocks == FEW_BLOCKS)
    assert found.room > SLACK, "it has taken more than memory_fraction already"
    assert found.growth <= min(found.room, GROWTH)


def _serve(rank_index: int, num_ranks: int, info: Any, config: RankConfig) -> Result:
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess
    from workers.rank.rank_info import Rendezvous, start_stages

    epoch = Epoch(RankProcess(rank_index, config), Rendezvous("", 0, "service"), 30)
    try:
        for stage in start_stages("cuda"):
            epoch.run_stage(stage, lambda done, total: None)
        client = Client()
        epoch.start_engine(client.publish, lambda step: None)
        client.engine = epoch.engine
        room = _room(config)
        with crowded(room):
            before = torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            _send_traffic(client, epoch.engine.scheduler.cache.num_blocks)
            torch.cuda.synchronize()
            growth = torch.cuda.max_memory_reserved() - before
        pool = epoch.engine.scheduler.cache.pool
        if pool.num_free < pool.num_blocks:
            client.wrong.append(f"{pool.num_blocks - pool.num_free} KV blocks are still held")
        num_preemptions = epoch.engine.scheduler.num_preemptions
        return Result(client.wrong, len(client.aborted), num_preemptions, room, growth)
    finally:
        epoch.process.close()


def _room(config: RankConfig) -> int:
    """What a ready rank may still take: where it found its number of blocks, what that left of memory_fraction."""
    if config.cache.num_blocks != "auto":
        return GROWTH + SLACK
    free_unused()
    free, total = torch.cuda.mem_get_info()
    return int(config.cache.memory_fraction * total) - (total - free) + SLACK


class Client:
    """Sends requests to an engine, and says what is wrong with the answers."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.aborted: set[str] = set()
        self.wrong: list[str] = []
        self._sent: dict[str, EngineRequest] = {}
        self._refusals: dict[str, str] = {}
        self._got: defaultdict[str, list[RequestOutput]] = defaultdict(list)

    def publish(self, ingress_id: str, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._got[output.request_id].append(output)

    def send(
        self, prompt: list[int], max_tokens: int, style: int, refusal: str | None = None
    ) -> str:
        """A new request's name. refusal: words of the error that it must end with."""
        name = f"{len(self._sent)}: {len(prompt)} tokens and {max_tokens}, style {style}"
        params = {"max_tokens": max_tokens, **STYLES[style]}
        self._sent[name] = make_request(name, prompt, **params)
        if refusal is not None:
            self._refusals[name] = refusal
        self.engine.submit(self._sent[name])
        return name

    def abort(self, name: str) -> None:
        """From now on it may lack tokens, but may not end with an error."""
        self.aborted.add(name)
        self.engine.abort(name)

    def finish(self) -> None:
        """Let the engine come to the end of everything, and look at the answers."""
        while self.engine.step().run:
            pass
        for name, request in self._sent.items():
            whole = merge(self._got.pop(name, [RequestOutput(name, [])]))
            problem = self._problem(request, whole)
            if problem is not None:
                self.wrong.append(f"{name}: {problem}")
        self.wrong += [f"{name}: not asked for any more" for name in self._got]
        self._sent, self._refusals = {}, {}
        self._got.clear()

    def _problem(self, request: EngineRequest, whole: RequestOutput) -> str | None:
        refusal = self._refusals.get(request.request_id)
        if refusal is not None:
            refused = whole.finish_reason == "error" and refusal in str(whole.error)
            return None if refused else f"refused with {whole.error!r}"
        if whole.error is not None:
            return whole.error
        if request.request_id in self.aborted:
            return None
        num_prompt, num_tokens = len(request.prompt_token_ids), len(whole.token_ids)
        expected = min(request.params.max_tokens, MAX_LEN - num_prompt)
        if (num_tokens, whole.finish_reason) != (expected, "length"):
            return f"{num_tokens} tokens, {whole.finish_reason}"
        told = len(whole.logprobs or ()), len(whole.prompt_logprobs or ())
        asked = (
            expected if request.params.logprobs is not None else 0,
            num_prompt if request.params.prompt_logprobs is not None else 0,
        )
        return None if told == asked else f"{told} log-probabilities"


def _send_traffic(client: Client, num_blocks: int) -> None:
    """Full batches of each style; far more long requests than run at once, some refused and some aborted; one more."""
    source = random.Random(0)
    longest = min(MAX_LEN, num_blocks * BLOCK_SIZE)

    def prompt(length: int) -> list[int]:
        return [source.randrange(VOCABULARY) for _ in range(length)]

    for style in range(len(STYLES)):
        client.send(prompt(longest - 1), 1, style)
        client.finish()
        for _ in range(MAX_NUM_SEQS):
            client.send(prompt(source.randint(1, 8)), source.randint(2, 8), style)
        client.finish()
    # Where blocks are few, hardly more than one runs at a time.
    for index in range(3 * MAX_NUM_SEQS if longest == MAX_LEN else MAX_NUM_SEQS):
        num_new = int(longest ** source.random())
        total = source.randint(num_new + 1, longest) if index % 3 else longest
        client.send(prompt(total - num_new), num_new, index % len(STYLES))
        if index % MAX_NUM_SEQS == 0:
            _send_what_is_refused(client, num_blocks)
    while client.engine.step().run:
        if len(client.aborted) < MAX_NUM_SEQS // 4 and source.random() < 0.05:
            _abort_one(client, source)
    client.finish()
    client.send(prompt(longest // 2), 16, 0)
    client.finish()


def _abort_one(client: Client, source: random.Random) -> None:
    """Of those who run or of those who wait."""
    scheduler = client.engine.scheduler
    queues = [queue for queue in (scheduler.running, scheduler.waiting) if queue]
    if queues:
        client.abort(source.choice(source.choice(queues)).request.request_id)


def _send_what_is_refused(client: Client, num_blocks: int) -> None:
    """Prompts without room for a token, and those that alone would need more than the whole KV cache."""
    heaviest, cached = len(STYLES) - 1, num_blocks * BLOCK_SIZE
    allowed = f"must be 1 to {MAX_LEN - 1}"
    for length in (0, MAX_LEN, MAX_LEN + 1, 100 * MAX_LEN, max(MAX_LEN, cached + 1)):
        client.send([1] * length, 16, heaviest, refusal=allowed)
    if cached < MAX_LEN:
        of_cache = f"this rank has {num_blocks} (cache.num_blocks)"
        client.send([1] * (cached + 1), 1, heaviest, refusal=of_cache)
        client.send([1] * cached, 1, heaviest, refusal=of_cache)
        client.send([1], MAX_LEN, heaviest, refusal=of_cache)
