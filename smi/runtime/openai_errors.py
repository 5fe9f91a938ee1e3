"""What a client is told instead of an answer, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping

from smi.protocol.stream import ProtocolError


class ApiError(Exception):
    """What the client is told instead of an answer: an HTTP status and OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
        self.body = {
            "error": {
                "message": message,
                "type": kind if status < 500 else "server_error",
                "param": param,
                "code": code,
            }
        }


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, code=code, param=param)


def protocol_refusal(error: ProtocolError) -> ApiError:
    """What the protocol does not allow, as a 400 with its place."""
    return ApiError(400, str(error), code=error.reason, param=error.where or "messages")
