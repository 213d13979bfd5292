"""Findings and faults -> HTTP status and OpenAI's error object. The sentence is the finding's
own."""

from dataclasses import dataclass

import msgspec

from vitrail.config.finding import Refused

# A finding's code -> status and OpenAI's error type; any other code is the client's to mend.
_STATUS = {
    "overloaded": (503, "overloaded_error"),
    "engine_dead": (503, "server_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "invalid_api_key": (401, "authentication_error"),
    "body_too_large": (413, "invalid_request_error"),
    "body_too_slow": (408, "invalid_request_error"),
}
RETRY_AFTER_SECONDS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """`body`: {"error": {message, type, param, code}} as JSON bytes."""

    status: int
    body: bytes
    retry_after: int | None = None


def from_refused(refused: Refused) -> HttpError:
    """All findings in the message; status, param and code are the first's."""
    first = refused.findings[0]
    status, kind = _STATUS.get(first.code, (400, "invalid_request_error"))
    message = " ".join(str(f) for f in refused.findings)
    body = error_body(message, kind, first.where, first.code)
    return HttpError(
        status=status, body=body, retry_after=RETRY_AFTER_SECONDS if status == 503 else None
    )


def internal(message: str) -> HttpError:
    """A request's own failure inside the engine."""
    return HttpError(status=500, body=error_body(message, "server_error", None, "engine_error"))


def error_body(message: str, kind: str, param: str | None, code: str) -> bytes:
    """OpenAI's error object."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})
