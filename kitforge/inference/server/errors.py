"""What is told to a client whose request is not answered, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The client has left, or takes nothing any more (a status of nginx): counted, and read by nobody.
CLIENT_CLOSED_REQUEST = 499
# The word for each status in `error.type`.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is not answered. `parameter` is the part of it that is wrong, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.parameter = parameter
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


def client_closed_request() -> ApiError:
    """What ends the work on a request whose client has left."""
    return ApiError(CLIENT_CLOSED_REQUEST, "the client has left", code="client_left")


def queue_full(max_requests: int, what: str = "prompts") -> ApiError:
    """What is said while the queue is full."""
    message = f"{max_requests} {what} are being answered already; come again in a second"
    return ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
