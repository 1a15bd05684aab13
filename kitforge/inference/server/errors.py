"""Errors of the HTTP API, in OpenAI's format."""

from collections.abc import Mapping
from typing import Any

from kitforge.foundation.errors import KitforgeError

# nginx's status for a client that has disconnected; it appears in metrics only.
CLIENT_CLOSED_REQUEST = 499
# `error.type` by status.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An HTTP error. `parameter` names the invalid field, `code` identifies the error for programs."""

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
        """The JSON body of the response."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


def refused(parameter: str, problem: str, code: str = "invalid_value", **words: Any) -> ApiError:
    """The 400 of a parameter, in the lines of a `KitforgeError`: `got`, `expected`, `fix`."""
    return ApiError(400, str(KitforgeError(problem, **words)), parameter=parameter, code=code)


def client_closed_request() -> ApiError:
    """The error that cancels a request whose client has disconnected."""
    return ApiError(CLIENT_CLOSED_REQUEST, "the client has disconnected", code="client_left")
