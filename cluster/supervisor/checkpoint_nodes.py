"""Brings the checkpoint to every node of the ranks: from the Hub, or from one node that has it.

With cluster.fetch_weights the supervisor's own node counts, so a checkpoint beside the command suffices. Where all
nodes have the files, as in a shared folder, nothing is copied.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cluster.supervisor.placement import RankLocation
from cluster.supervisor.ray_calls import result_future
from workers.config import ModelSection, RankConfig
from workers.rank.actor import node_address
from workers.rank.checkpoint_holder import CheckpointHolder
from workers.weights.checkpoint_copy import CopyAddress
from workers.weights.checkpoint_files import CheckpointError, CheckpointFiles

logger = logging.getLogger(__name__)

MAX_NAMED = 3
CallRank = Callable[..., Awaitable[Any]]
"""call(method, *arguments) of one rank's actor."""
END_S = 5.0  # for the end of the source's server


class CheckpointNodesError(CheckpointError):
    """No node has the whole checkpoint, or two nodes have different files of it."""


async def fetch_checkpoint(
    config: RankConfig, ranks: Sequence[CallRank], locations: Sequence[RankLocation]
) -> None:
    """Let the first rank of every node fetch the model to its node, from another node or from the Hub.

    ranks   calls each rank
    """
    first = slice(None, None, config.dims.ranks_per_node)
    if config.fetch_weights:
        nodes = [location.address for location in locations[first]]
        await spread(config.model, dict(zip(nodes, ranks[first], strict=True)), node_address())
    else:
        await asyncio.gather(*map(_fetch, ranks[first]))


async def spread(model: ModelSection, ranks: Mapping[str, CallRank], own: str) -> None:
    """Copy the checkpoint to nodes that lack files of it.

    A model of the Hub that no node has is fetched from there by one node first. Raises CheckpointNodesError, CopyError
    and HubError.

    ranks   calls the first rank of each node, by the node's address
    own     the address of this process's node
    """
    answers = [call("checkpoint_files") for call in ranks.values()]
    known = dict(zip(ranks, await asyncio.gather(*answers), strict=True))
    found = {node: files for node, files in known.items() if files is not None}
    if not found:
        return  # every process has read its weights
    holder = CheckpointHolder(model, own)
    if own not in found:
        found[own] = await asyncio.to_thread(holder.files)
    if _source(found, own) is None and model.revision is not None:
        first = next(node for node in found if node in ranks)
        await _fetch(ranks[first])
        found[first] = await ranks[first]("checkpoint_files")
    source = _source(found, own)
    if source is None:
        raise CheckpointNodesError(_nowhere(model, found))
    _check_equal(model, found, source)
    files = found[source].files
    lacking = [node for node in found if node in ranks and set(files) - set(found[node].files)]
    if not lacking:
        return
    logger.info("copying the checkpoint from %s to %s", source, ", ".join(lacking))
    call = ranks.get(source)
    address: CopyAddress = await (
        asyncio.to_thread(holder.share) if call is None else call("share_checkpoint")
    )
    try:
        await asyncio.gather(*(ranks[node]("copy_checkpoint", address, files) for node in lacking))
    finally:
        if call is None:
            await asyncio.to_thread(holder.close)
        else:
            # A stopped rank does not answer, and the copies from it have failed; later stages notice a dead one.
            await asyncio.wait([result_future(call("end_sharing"))], timeout=END_S)


async def _fetch(call: CallRank) -> None:
    """Let a rank fetch the model of the Hub, with the token of this process."""
    await call("fetch_checkpoint", os.environ.get("HF_TOKEN"))


def _source(found: Mapping[str, CheckpointFiles], own: str) -> str | None:
    """The node to copy from: this process's if it has all files, else the first that has."""
    complete = [node for node, files in found.items() if not files.missing]
    return own if own in complete else next(iter(complete), None)


def _check_equal(model: ModelSection, found: Mapping[str, CheckpointFiles], source: str) -> None:
    """Raise CheckpointNodesError if a node has a file that differs from the source's."""
    wanted = found[source].files
    lines = []
    for node, files in found.items():
        differing = [
            name for name, facts in sorted(files.files.items()) if wanted.get(name, facts) != facts
        ]
        if differing:
            lines.append(f"  {node}: {_some(differing)}")
    if lines:
        raise CheckpointNodesError(
            f"cluster.fetch_weights: files of {model.folder} differ from those of {source}; remove them there, or "
            "copy the model by hand and set cluster.fetch_weights to false\n" + "\n".join(lines)
        )


def _nowhere(model: ModelSection, found: Mapping[str, CheckpointFiles]) -> str:
    lines = [f"  {node}: {_some(files.missing)}" for node, files in found.items()]
    return (
        f"cluster.fetch_weights: no node has all files of {model.folder} (model.path); these are missing\n"
        + "\n".join(lines)
    )


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
