"""What a client is told when a request cannot be served."""

from __future__ import annotations

from dataclasses import dataclass, field

from amem.errors import (
    AgentLocked,
    AmemError,
    Cancelled,
    ContextOverflow,
    EngineClosed,
    InputError,
    MemoryBudgetError,
    StoreError,
)

_LONGEST = 500  # characters of a message; it may quote what the client sent


@dataclass
class HttpError(Exception):
    """A refusal, in terms that both kinds of clients know."""

    status: int
    message: str
    kind: str = "invalid_request_error"  #: "type" in the body
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def openai(self) -> dict[str, object]:
        """The body as clients of OpenAI expect it."""
        param = None if self.param is None else _short(self.param)
        return {"error": {"message": _short(self.message), "type": self.kind, "param": param, "code": self.code}}

    def anthropic(self) -> dict[str, object]:
        """The body as clients of Anthropic expect it."""
        kind = _ANTHROPIC.get(self.status, self.kind)
        return {"type": "error", "error": {"type": kind, "message": _short(self.message)}}

    def told(self, path: str) -> dict[str, object]:
        """The body as the clients of a path expect it."""
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def http_error(error: Exception) -> HttpError | None:
    """The refusal that tells of an error; None if it is none that a client could do anything about."""
    if isinstance(error, HttpError):
        return error
    if not isinstance(error, AmemError):
        return None
    message = " ".join(str(error).split())
    if isinstance(error, ContextOverflow):
        return HttpError(400, message, code="context_length_exceeded", param="messages")
    if isinstance(error, InputError):
        return HttpError(400, message)
    if isinstance(error, MemoryBudgetError):
        return HttpError(400, message, code="memory_budget_exceeded")
    if isinstance(error, AgentLocked):
        return HttpError(409, message, kind="conflict_error", code="agent_locked")
    if isinstance(error, StoreError):
        return HttpError(
            503,
            "the store cannot be read or written now: the server's log says why.",
            kind="server_error",
            code="store_error",
            headers={"Retry-After": "5"},
        )
    if isinstance(error, Cancelled):
        return HttpError(409, message, kind="conflict_error", code="cancelled")
    if isinstance(error, EngineClosed):
        return HttpError(503, message, kind="server_error", code="closed", headers={"Retry-After": "1"})
    return None
