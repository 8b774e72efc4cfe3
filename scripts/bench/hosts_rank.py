"""One rank of `scripts.bench.hosts`: a round for each line of stdin, answered by a line of JSON.

"votes" is a round of votes; "load" one of requests, "load 500" one of 500 requests.

argv: the configuration and its settings, the rank, address and port of the store ("0": this rank opens it), requests,
requests in flight, and tokens in and out of each, as one JSON object.
"""

import argparse
import json
import os
import sys
import time

from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from scripts.bench.engine import Loop
from workers.rank.epoch import Epoch
from workers.rank.network import address_towards, bind_to_address
from workers.rank.process import RankProcess
from workers.rank.process_group import host_store
from workers.rank.rank_info import Rendezvous
from workers.step.vote import Vote

VOTES = 1000


def vote_us(epoch: Epoch) -> float:
    """Mean time of a vote of ranks that do nothing else."""
    row = Vote(epoch=0, step=0).row()
    transport = epoch.engine._vote_transport
    transport.all_gather(row)
    started = time.perf_counter()
    for _ in range(VOTES):
        transport.all_gather(row)
    return 1e6 * (time.perf_counter() - started) / VOTES


def main() -> None:
    """Serve rounds until the end of stdin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("given", type=json.loads, help="settings and sizes, as JSON")
    given = parser.parse_args().given
    bind_to_address(os.environ, address_towards(given["store"][0]))
    config = resolve_rank_config(load_config(given["config"], given["settings"]))
    address, port = given["store"]
    store = host_store(address) if port == 0 else None
    if store is not None:
        port = store.port
        print(json.dumps(port), flush=True)
    process = RankProcess(given["rank"], config)
    secret = bytes.fromhex(given["secret"])
    rendezvous = Rendezvous(address, port, f"bench-{port}", secret=secret)
    epoch = Epoch(process, rendezvous, timeout_s=60)
    epoch.load()
    loop = Loop(epoch, given["input_len"], given["output_len"], seed=given["rank"])
    loop.run(given["concurrency"], given["concurrency"])  # warm-up
    print(json.dumps([process.selection.all2all.name, epoch.ubatches.policy.lines()]), flush=True)
    for line in sys.stdin:
        what, *count = line.split()
        requests = int(count[0]) if count else given["requests"]
        answer = vote_us(epoch) if what == "votes" else loop.run(requests, given["concurrency"])
        print(json.dumps(answer), flush=True)
    process.close()


if __name__ == "__main__":
    main()
