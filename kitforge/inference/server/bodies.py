"""Bodies of requests on their way in: how large, how long, and how many bytes of all of them together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, final

from kitforge.inference.server.errors import ApiError, client_closed_request
from kitforge.inference.server.options import HttpOptions


@final
class BodyBuffers:
    """The bodies of all requests that have not been read to their end or not been made anything of.

    Where they become more than `max_inflight_bytes`, the one that has been arriving longest is given up: bodies that
    are held back to fill the memory are the oldest, and those of other clients arrive at once.
    """

    def __init__(self, limits: HttpOptions) -> None:
        self.num_bytes = 0
        self.limits = limits
        self._arriving: dict[BodyBuffer, None] = {}  # the oldest first

    def open(self) -> BodyBuffer:
        """A body that is about to arrive; to be closed once it is needed no more."""
        return BodyBuffer(self)

    def begin(self, body: BodyBuffer) -> None:
        """Its bytes will come from now on."""
        self._arriving[body] = None

    def end(self, body: BodyBuffer) -> None:
        """No more of its bytes will come."""
        self._arriving.pop(body, None)

    def add(self, num_bytes: int) -> None:
        """So many bytes more have arrived, or with a minus fewer are held."""
        self.num_bytes += num_bytes
        while self.num_bytes > self.limits.max_inflight_bytes and self._arriving:
            oldest = next(iter(self._arriving))
            self.end(oldest)
            oldest.evict()


@final
class BodyBuffer(AbstractContextManager["BodyBuffer"]):
    """The body of one request. Leaving it gives back the room of its bytes."""

    def __init__(self, buffers: BodyBuffers) -> None:
        self._buffers = buffers
        self._num_bytes = 0
        self._is_evicted = False
        self._deadline: asyncio.Timeout | None = None

    async def read(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> bytes:
        """All of it, as ASGI gives it. Raises ApiError for one that is too large or too slow, for which there is no
        room, or whose client leaves."""
        limits = self._buffers.limits
        self._buffers.begin(self)
        try:
            async with asyncio.timeout(limits.client_timeout) as self._deadline:
                content = await self._received(receive)
        except TimeoutError:
            if not self._is_evicted:
                words = f"the body did not arrive within {limits.client_timeout:g} s"
                raise ApiError(408, words, code="body_too_slow") from None
        finally:
            self._buffers.end(self)
        if self._is_evicted:
            raise _buffers_full(limits.max_inflight_bytes)
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
        """Make room for others."""
        self._is_evicted = True
        self.close()
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Give back the room of its bytes."""
        freed, self._num_bytes = self._num_bytes, 0
        self._buffers.add(-freed)

    def __exit__(self, *_: object) -> None:
        self.close()


def body_too_large(max_body: int) -> ApiError:
    """What is said to a body that is longer than one may be."""
    return ApiError(413, f"the body is larger than {max_body} bytes", code="body_too_large")


def _buffers_full(max_bytes: int) -> ApiError:
    words = f"the bodies of all requests are more than {max_bytes} bytes; come again in a second"
    return ApiError(503, words, code="server_busy", headers={"Retry-After": "1"})
