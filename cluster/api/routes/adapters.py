"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in the shapes of vLLM, for operators.

Each answers when the change is made: then requests may name the adapter as `model`, or get a 404 for it.
"""

from collections.abc import Callable

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from cluster.api.backend import EngineBackend
from cluster.api.routes.admin import OperatorBodies
from cluster.errors import UnsupportedParameterError


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter. `lora_path`: a folder that all ranks can read, or a name on the Hub.

    `load_inplace` is in the bodies of some clients of vLLM; true, which replaces a loaded adapter, is refused.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1, max_length=512)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter. `lora_int_id` is ignored, as in vLLM."""

    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1, max_length=512)
    lora_int_id: int | None = None


def add_adapter_routes(
    app: FastAPI, backend_provider: Callable[[], EngineBackend], bodies: OperatorBodies
) -> None:
    """Add the routes; they are no part of the API's document, which clients read."""

    @app.post("/v1/load_lora_adapter", include_in_schema=False)
    async def load_lora_adapter(request: Request) -> Response:
        """Load an adapter into all ranks."""
        wanted = await bodies.parse(request, LoadAdapterRequest)
        if wanted.load_inplace:
            raise UnsupportedParameterError(
                "load_inplace = true is not supported; unload the adapter, then load it",
                param="load_inplace",
            )
        await backend_provider().load_adapter(wanted.lora_name, wanted.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", include_in_schema=False)
    async def unload_lora_adapter(request: Request) -> Response:
        """Take no more requests for an adapter; open ones end."""
        wanted = await bodies.parse(request, UnloadAdapterRequest)
        await backend_provider().unload_adapter(wanted.lora_name)
        return PlainTextResponse(
            f"Success: LoRA adapter '{wanted.lora_name}' removed successfully."
        )
