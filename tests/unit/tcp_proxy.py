"""A TCP proxy on loopback that stalls, resets, drops and corrupts connections."""

import asyncio
import contextlib
import socket
import struct

from workers.wire.secure_socket import StreamAddress

FORWARD, BACK = 0, 1  # from the side that connects, and to it


class Proxy:
    """`address` leads to the listener through the proxy, with the listener's key."""

    def __init__(self, target: StreamAddress):
        host, _, port = target.endpoint.removeprefix("tcp://").rpartition(":")
        self._target, self._key = (host, int(port)), target.key
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._flows = True
        self._dropped: set[asyncio.StreamWriter] = set()
        self._corrupted: int | None = None
        self.num_connections = 0
        self.num_held = [0, 0]
        """Bytes of each direction that the proxy holds."""

    async def start(self) -> StreamAddress:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return StreamAddress(f"tcp://127.0.0.1:{port}", self._key)

    def stall(self) -> None:
        """Pass nothing on, until `flow`. What the proxy holds then is lost by a `reset`."""
        self._flows = False

    def flow(self) -> None:
        """Pass on with the next bytes what the proxy holds."""
        self._flows = True

    def reset(self) -> None:
        """End all connections by RST."""
        self._writers, writers = [], self._writers
        for writer in writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def drop(self) -> None:
        """Forget the present connections as a firewall does: their bytes vanish, neither side gets an end."""
        self._dropped.update(self._writers)

    def corrupt(self, direction: int) -> None:
        """Change one bit in the next bytes of a direction."""
        self._corrupted = direction

    @property
    def corrupted(self) -> bool:
        """Whether the bit has been changed."""
        return self._corrupted is None

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self.num_connections += 1
        self._writers += writer, far_writer
        pumps = self._pump(reader, far_writer, FORWARD), self._pump(far_reader, writer, BACK)
        self._pumps.update(map(asyncio.create_task, pumps))

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: int
    ) -> None:
        held = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                held += data
                self.num_held[direction] = len(held)
                if not self._flows:
                    continue
                if self._corrupted == direction:
                    held[-1] ^= 1
                    self._corrupted = None
                if writer not in self._dropped:
                    writer.write(bytes(held))
                    await writer.drain()
                held.clear()
                self.num_held[direction] = 0
        writer.close()
