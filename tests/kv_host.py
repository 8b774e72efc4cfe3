"""An engine of one rank on a host of its own, which a test drives by lines of JSON. argv: checkpoint, address, folder.

A read of KV from another node waits in the middle where the test wants it, see held_reads.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.distributed.engine_harness import make_request, rank_config
from tests.distributed.test_hand_over import Side
from workers.kv_transfer import nixl_fetcher
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous

PROGRAM = (
    "import sys; sys.path.insert(0, {{root!r}}); from tests.held_reads import hold_reads; "
    "hold_reads({folder!r}); from workers.kv_transfer.nixl_process import main; main({{fd}})"
)


def main(checkpoint: str, address: str, folder: str) -> None:
    """Answer requests [name, prompt, max_tokens, emitted tokens, source] with [tokens, source, gauges]."""
    nixl_fetcher._PROGRAM = PROGRAM.format(folder=folder)
    memory = {"block_size": 8, "host_memory_gib": 0.02, "transfer": "nixl"}
    config = rank_config(Path(checkpoint), 1, model={"max_model_len": 320}, cache=memory)
    with ExitStack() as stack:
        process = RankProcess(0, config)
        stack.callback(process.close)
        epoch = Epoch(process, Rendezvous(address, 0, folder, store=folder), 30)
        epoch.load()
        side = Side(epoch)
        assert process.kv_places.wait_ready(60)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            name, prompt, max_tokens, emitted, source = json.loads(line)
            request = make_request(name, prompt, max_tokens=max_tokens)
            request = replace(
                request,
                emitted_token_ids=emitted,
                kv_source=source,
                hands_over=not emitted and max_tokens == 1,
            )
            outputs = side.run(request)
            tokens = [token for output in outputs for token in output.token_ids]
            epoch.engine.scheduler.check_integrity()
            gauges = epoch.engine.scheduler.cache.gauges()
            print(json.dumps([tokens, outputs[-1].kv_source, gauges]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
