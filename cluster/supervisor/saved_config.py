"""The configuration of a server after changes in service, kept in Ray's GCS for a supervisor that is restarted."""

import asyncio
import pickle

from ray.experimental import internal_kv

from cluster.config.phalanx_config import PhalanxConfig

NAMESPACE = b"phalanx"


class SavedConfig:
    """That of one supervisor, of all its processes. `owner`: the id of its actor."""

    def __init__(self, owner: str):
        self._key = f"config:{owner}".encode()

    async def load(self) -> PhalanxConfig | None:
        """Return what was saved last; None if nothing was."""
        data = await asyncio.to_thread(internal_kv._internal_kv_get, self._key, namespace=NAMESPACE)
        if data is None:
            return None
        config: PhalanxConfig = pickle.loads(data)
        return config

    async def save(self, config: PhalanxConfig) -> None:
        """Keep `config` until `delete`."""
        data = pickle.dumps(config)
        put = internal_kv._internal_kv_put
        await asyncio.to_thread(put, self._key, data, namespace=NAMESPACE)

    async def delete(self) -> None:
        """Forget it, because the server ends."""
        await asyncio.to_thread(internal_kv._internal_kv_del, self._key, namespace=NAMESPACE)
