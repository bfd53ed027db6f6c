"""Arctic backend: messages between the backend's process and its engine's (imports the errors
only).

Both ends are the same package on one machine, and the socket is a pair that nobody else holds, so
messages are pickled, arrays out of band. A frame is the number of parts and the length of each, in
little-endian 64-bit integers, and then the parts: the pickle, and its buffers.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from remote_rl.errors import describe

_END = object()


class Channel:
    """One end. `receive` is called on the loop with each message; `ended` once there, after the
    last one, with how the other end went; `at_once` in the reading thread, before that, also where
    the loop is busy."""

    def __init__(
        self,
        end: socket.socket,
        loop: asyncio.AbstractEventLoop,
        receive: Callable[[Any], None],
        ended: Callable[[str], None],
        at_once: Callable[[], None] = lambda: None,
    ) -> None:
        self._socket = end
        self._loop = loop
        self._receive = receive
        self._ended = ended
        self._at_once = at_once
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"arctic channel {name}", daemon=True)
            for name, target in (("reader", self._read), ("writer", self._write))
        ]

    def start(self) -> None:
        """From now on messages are read and written."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        """Queues a message; from any thread. What can't be pickled raises here. To an end that is
        gone it is dropped, which `ended` tells."""
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        self._queue.put([memoryview(body), *(buffer.raw() for buffer in buffers)])

    def close(self) -> None:
        """Sends what is queued, and ends this end."""
        self._queue.put(_END)
        self._threads[1].join(timeout=5)
        # the reader wakes with an end of file
        _shut(self._socket)

    def _write(self) -> None:
        while True:
            parts = self._queue.get()
            if parts is _END:
                return
            try:
                sizes = [len(parts), *(part.nbytes for part in parts)]
                self._socket.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
                for part in parts:
                    self._socket.sendall(part)
            except OSError:
                return  # the reader sees the same end, and tells

    def _read(self) -> None:
        try:
            while True:
                (count,) = struct.unpack("<Q", self._exactly(8))
                sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
                parts = [self._exactly(size) for size in sizes]
                # S301: from our own other half, over a socket that nobody else holds
                message = pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301
                self._on_loop(self._receive, message)
        except (EOFError, OSError) as error:
            self._end(describe(error) if isinstance(error, OSError) else "it closed the connection")
        except Exception as error:  # noqa: BLE001 - a pickle can raise anything
            self._end(f"it sent what can't be read ({describe(error)})")
        finally:
            self._socket.close()

    def _end(self, how: str) -> None:
        self._at_once()
        self._on_loop(self._ended, how)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            count = self._socket.recv_into(view[have:])
            if count == 0:
                raise EOFError
            have += count
        return data

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # nobody is left to hear it


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side was faster
