"""Attributes of a request's span, named according to OpenTelemetry's conventions for HTTP and
generative AI.

Names that the conventions do not define begin with `logitd.`. Attributes never contain text of a
prompt or an answer, stop strings or a client's address. This module does not need OpenTelemetry's
packages.
"""

from dataclasses import dataclass

from starlette.types import Scope

from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.operations.body import PromptBody
from logitd.model.operations.prompts import clip
from logitd.service.access.auth import CALLER
from logitd.service.engine.usage import Usage
from logitd.service.http.body import BODY
from logitd.service.metrics.metrics import endpoint_label
from logitd.service.models.context import CONTEXT, RequestContext

Value = str | int | float | bool | tuple[str, ...]
SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling parameters that have the same names in requests and in the conventions."""
LARGEST_INTEGER = 2**63 - 1
"""Largest integer that OTLP can carry. Larger seeds are omitted."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request whose reply has ended.

    status     status of the reply; 0 if no reply began
    seconds    time from the request to the end of the reply
    exception  name of the exception that ended the reply, if one did
    whole      True if the whole reply was written, False if the client left before the end
    """

    scope: Scope
    status: int
    seconds: float
    exception: str | None
    whole: bool

    @property
    def usage(self) -> Usage | None:
        """The engine's work for the request; None if the engine did no work for it."""
        context: RequestContext | None = self.scope["state"].get(CONTEXT)
        return (
            None
            if context is None or context.session.usage.first is None
            else context.session.usage
        )

    @property
    def endpoint(self) -> str | None:
        """The route that matches the request's path; None if no route does."""
        label = endpoint_label(self.scope["path"])
        return None if label == "other" else label


def attributes(ended: Ended) -> dict[str, Value]:
    """All attributes. Call this after the engine has reported the end of every sequence."""
    scope, usage = ended.scope, ended.usage
    address, port = scope.get("server") or (None, None)
    found: dict[str, Value | None] = {
        "http.request.method": scope["method"],
        "http.response.status_code": ended.status or None,
        "http.route": ended.endpoint,
        "url.scheme": scope["scheme"],
        "url.path": clip(scope["path"], 200),
        "network.protocol.version": scope["http_version"],
        "server.address": address,
        "server.port": port,
        "error.type": _error_type(ended),
        "logitd.key": scope.get(CALLER),
    }
    if usage is not None:
        found |= _computed(ended, usage)
    return {name: value for name, value in found.items() if value is not None}


def _computed(ended: Ended, usage: Usage) -> dict[str, Value | None]:
    """Attributes for the model, the sampling parameters (including defaults) and the token
    counts."""
    state, request = ended.scope["state"], usage.first
    body, context = state.get(BODY), state[CONTEXT]
    found: dict[str, Value | None] = {
        "gen_ai.provider.name": "logitd",
        "gen_ai.request.model": clip(getattr(body, "model", None) or context.model.name, 200),
        "gen_ai.request.stream": getattr(body, "stream", None),
        "gen_ai.response.model": context.model.name,
        "logitd.weights_sha256": context.checkpoint.weights_sha256,
    }
    if isinstance(request, GenerationRequest):
        params, chat = request.params, ended.endpoint == "/v1/chat/completions"
        found |= {f"gen_ai.request.{name}": getattr(params, name) for name in SAMPLING} | {
            "gen_ai.operation.name": "chat" if chat else "text_completion",
            "gen_ai.request.seed": None if _has_several_seeds(body) else _carried(params.seed),
            "gen_ai.request.choice.count": request.n if request.n != 1 else None,
            "gen_ai.response.finish_reasons": tuple(
                reason or FinishReason.ABORT for reason in usage.reasons.values()
            ),
        }
    if usage.sequences:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
        }
    return found


def _has_several_seeds(body: object) -> bool:
    """True if the request has several prompts but sets no seed, so that each prompt has its own."""
    return (
        isinstance(body, PromptBody)
        and len(body.prompts) > 1
        and getattr(body, "seed", None) in (None, -1)
    )


def _carried(seed: int) -> int | None:
    return seed if seed <= LARGEST_INTEGER else None


def _error_type(ended: Ended) -> str | None:
    """The server's failure, if any: an exception, a 5xx status, or a failed sequence. According
    to the conventions, neither a refused request nor a client that leaves is an error of the
    server."""
    if ended.exception is not None:
        return ended.exception
    if ended.status >= 500 or not ended.status:
        return str(ended.status or 500)
    if (usage := ended.usage) is None:
        return None
    if usage.lost:
        return "engine_failed"
    if usage.failed is not None and usage.failed.param is None:
        return str(usage.failed.reason)
    if ended.whole and FinishReason.ABORT in usage.reasons.values():  # the server shuts down
        return str(FinishReason.ABORT)
    return None
