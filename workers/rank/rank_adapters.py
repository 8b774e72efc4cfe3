"""The slots of LoRA adapters of a rank process: reserved once for the experts of which the rank holds adapters."""

from typing import Any

from workers.adapters.layout import AdapterLayout, adapter_experts
from workers.adapters.pools import AdapterPools
from workers.adapters.store import AdapterStore, Gather
from workers.rank.device_memory import memory_for


def load_adapters(process: Any, gather: Gather | None) -> AdapterStore:
    """Reserve the slots of a RankProcess once, and hold the adapters of its configuration; return its store.

    The model has the place of the rank's experts in the present map.
    """
    assert process.model is not None, "the slots belong to the products of the model"
    lora = process.config.lora
    store: AdapterStore | None = process.adapters
    experts = tuple(adapter_experts(process.model_config, process.config, process.rank))
    if store is None or store.pools.layout.experts.experts != experts:
        process.adapters = store = None  # its slots have other experts
        layout = AdapterLayout.of(process.model_config, lora, experts)
        with memory_for("the slots of LoRA adapters", process.adapter_bytes):
            pools = AdapterPools(layout, lora.max_loras, device=process.device, dtype=process.dtype)
        store = AdapterStore(pools)
    store.pools.attach(process.model)
    if gather is not None:  # ranks with more experts have larger adapters
        store.pools.num_pieces = max(gather(store.pools.least_pieces))
    store.agree(process.config.adapters, gather)
    return store
