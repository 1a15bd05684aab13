"""Receives request bodies, with limits on size, time and the bytes of all bodies together."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kitforge.inference.server.errors import ApiError, client_closed_request
from kitforge.inference.server.options import HttpOptions


class BodyBuffers:
    """The bodies of all requests that are being received or parsed.

    Where they exceed `max_inflight_bytes`, the body that has been arriving longest is evicted: an attack with slow
    bodies holds the oldest ones, while honest bodies arrive at once.
    """

    def __init__(self, limits: HttpOptions) -> None:
        self.num_bytes = 0
        self.limits = limits
        self.arriving: dict[BodyBuffer, None] = {}  # the oldest first

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, or with a negative number bytes that were released."""
        self.num_bytes += num_bytes
        while self.num_bytes > self.limits.max_inflight_bytes and self.arriving:
            oldest = next(iter(self.arriving))
            del self.arriving[oldest]
            oldest.evict()


class BodyBuffer:
    """The body of one request. Closing it releases its bytes."""

    def __init__(self, buffers: BodyBuffers) -> None:
        self._buffers = buffers
        self._num_bytes = 0
        self._is_evicted = False
        self._deadline: asyncio.Timeout | None = None

    async def read(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> bytes:
        """The whole body from ASGI's `receive`. Raises ApiError for one that is too large or too slow, for full
        buffers, and for a client that disconnects."""
        limits = self._buffers.limits
        self._buffers.arriving[self] = None
        try:
            async with asyncio.timeout(limits.client_timeout) as self._deadline:
                content = await self._received(receive)
        except TimeoutError:
            if not self._is_evicted:
                words = f"the body did not arrive within {limits.client_timeout:g} s"
                raise ApiError(408, words, code="body_too_slow") from None
        finally:
            self._buffers.arriving.pop(self, None)
        if self._is_evicted:
            message = f"the bodies of all requests exceed {limits.max_inflight_bytes} bytes; retry in a second"
            raise ApiError(503, message, code="server_busy", headers={"Retry-After": "1"})
        return content

    async def _received(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> bytes:
        content, max_body, has_more = bytearray(), self._buffers.limits.max_body_bytes, True
        while has_more and not self._is_evicted:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise client_closed_request()
            chunk, has_more = message.get("body", b""), message.get("more_body", False)
            content += chunk
            if len(content) > max_body:
                raise body_too_large(max_body)
            self._num_bytes += len(chunk)
            self._buffers.add(len(chunk))
        return bytes(content)

    def evict(self) -> None:
        """Release the bytes and end `read`, to make room for other bodies."""
        self._is_evicted = True
        self.close()
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Release the bytes."""
        freed, self._num_bytes = self._num_bytes, 0
        self._buffers.add(-freed)


def body_too_large(max_body: int) -> ApiError:
    """The error of a body that is too large."""
    return ApiError(413, f"the body is larger than {max_body} bytes", code="body_too_large")
