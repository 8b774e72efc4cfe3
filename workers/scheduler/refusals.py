"""Why a request can never run on a rank. Pure arithmetic over the limits of the rank."""

from workers.kv_cache.manager import KVCacheManager
from workers.scheduler.image_queue import ImageQueue
from workers.step.adapter_slots import AdapterSlots
from workers.wire.request import EngineRequest


def refusal_of(
    request: EngineRequest,
    cache: KVCacheManager,
    max_model_len: int,
    adapters: AdapterSlots | None,
    images: ImageQueue | None,
) -> str | None:
    """Return the reason, or None. adapters, images: as of Scheduler."""
    length = len(request.prompt_token_ids)
    longest = max_model_len - (request.pooling is None)  # a token follows
    if not 0 < length <= longest:
        return f"prompt of {length} tokens; must be 1 to {longest}"
    total = min(length + request.params.max_tokens, max_model_len)
    need = cache.demand.blocks(total)
    if need > cache.num_blocks:
        return (
            f"prompt of {length} tokens plus up to {total - length} new ones needs {need} KV blocks; "
            f"this rank has {cache.num_blocks} (cache.num_blocks)"
        )
    if request.adapter and not (adapters and adapters.is_loaded(request.adapter)):
        return "the adapter of the request is not loaded on this rank; its log has the reason"
    num_emitted = len(request.emitted_token_ids)
    if num_emitted and num_emitted >= total - length:
        return (
            f"{num_emitted} tokens were emitted of at most {total - length}: the request has ended"
        )
    if not request.images:
        return None
    if images is None:
        return "the model of this server takes no images"
    return images.refusal(request)
