"""Errors of the HTTP API, in OpenAI's format."""

import contextlib
from collections.abc import Iterator, Mapping
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


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name a field as the body of the request does, in which it has another name than where it is read."""
    try:
        yield
    except ApiError as error:
        own = error.parameter or ""
        name = names.get(own, own)
        words = str(error)
        for said in ("{}=", "'{}'", "this {} ") if own else ():
            words = words.replace(said.format(own), said.format(name))
        raise ApiError(error.status, words, parameter=name or None, code=error.code, headers=error.headers) from None


def client_closed_request() -> ApiError:
    """The error that cancels a request whose client has disconnected."""
    return ApiError(CLIENT_CLOSED_REQUEST, "the client has disconnected", code="client_left")
