"""Why a request is not answered, and how HTTP and gRPC say so.

GatewayError
├── InvalidRequest            400   the client has to change the request
│   ├── NotFound              404
│   ├── BodyTimeout           408
│   ├── BodyTooLarge          413
│   └── WrongMediaType        415
├── Overloaded                429   back off
├── Unavailable               503   nobody can serve it now
└── Internal                  500   it was tried, and failed
"""

from __future__ import annotations

import math
from typing import Any

import grpc


class GatewayError(Exception):
    """What ends a request without an answer."""

    status = 500
    grpc_code = grpc.StatusCode.INTERNAL
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """param: the field at fault, such as "messages[0].content". code: OpenAI's word for the kind of fault."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    @property
    def text(self) -> str:
        """One line for the client, which names the field: gRPC has no other place for it."""
        return f"{self.param}: {self.message}" if self.param else self.message

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": self.text, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """What tells a client whether and when to try again."""
        return {}


class InvalidRequest(GatewayError):
    """The client has to change the request."""

    status = 400
    grpc_code = grpc.StatusCode.INVALID_ARGUMENT
    type = "invalid_request_error"


class NotFound(InvalidRequest):
    """No such model, or no such path."""

    status = 404
    grpc_code = grpc.StatusCode.NOT_FOUND


class BodyTimeout(InvalidRequest):
    """The body did not come in time."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(InvalidRequest):
    """The body is over the limit."""

    status = 413
    code = "body_too_large"


class WrongMediaType(InvalidRequest):
    """The body is not said to be JSON. Browsers may send such bodies anywhere, unasked."""

    status = 415
    code = "unsupported_media_type"


class _TryLater(GatewayError):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        return {
            "retry-after": str(math.ceil(self.retry_after_s)),
            "retry-after-ms": str(math.ceil(self.retry_after_s * 1000)),
        }


class Overloaded(_TryLater):
    """Every worker that could serve it is full."""

    status = 429
    grpc_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    type = "rate_limit_error"
    code = "overloaded"


class Unavailable(_TryLater):
    """Nobody is there to serve it."""

    status = 503
    grpc_code = grpc.StatusCode.UNAVAILABLE
    code = "unavailable"


class Internal(GatewayError):
    """It was tried and failed. Clients are told not to try again: what broke one worker may break the next."""

    code = "internal_error"

    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}
