"""Attributes: what a span says of its request, by OpenTelemetry's semantic conventions for HTTP
servers and for generative AI, and what of it counts as an error.

No text of a prompt or of an answer, nor stop strings, nor a client's address. Names of our own
begin with `logitd.`. Knows nothing of OpenTelemetry's packages: an attribute is a name and a plain
value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from starlette.types import Scope

from logitd.model.inference.engine.events import FinishReason
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.service.api.requests.body import BODY
from logitd.service.core.auth import CALLER
from logitd.service.core.errors import clip
from logitd.service.core.metrics import endpoint_label
from logitd.service.core.models import SERVED, USAGE, Served
from logitd.service.engine.usage import Usage

Value = str | int | float | bool | tuple[str, ...]

OPERATIONS: Mapping[str, str] = {
    "/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
}
"""The operation of the endpoints that generate. The conventions have none for the others."""
LARGEST_INTEGER = 2**63 - 1
"""That OTLP can carry; a seed may be larger, and is left out then."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request whose reply has ended, well or badly.

    status     of the reply; 0 where none was begun
    seconds    from the request to here
    exception  the name of what was raised after the reply had begun
    whole      the reply was written to its end; else its client went
    """

    scope: Scope
    status: int
    seconds: float
    exception: str | None
    whole: bool

    @property
    def usage(self) -> Usage | None:
        """What the engine was asked for; None where it was not."""
        usage: Usage | None = self.scope["state"].get(USAGE)
        return usage if usage is not None and usage.first is not None else None

    @property
    def endpoint(self) -> str | None:
        """The route, None where there is none of the path."""
        label = endpoint_label(self.scope["path"])
        return None if label == "other" else label


def span_name(ended: Ended) -> str:
    """Of few values, as names of spans are to be: the method and the route."""
    method, endpoint = ended.scope["method"], ended.endpoint
    return method if endpoint is None else f"{method} {endpoint}"


def http_attributes(ended: Ended) -> dict[str, Value]:
    """What is known when the reply has ended."""
    scope = ended.scope
    said: dict[str, Value] = {
        "http.request.method": scope["method"],
        "url.scheme": scope["scheme"],
        "url.path": clip(scope["path"], 200),
        "network.protocol.version": scope["http_version"],
    }
    if ended.status:
        said["http.response.status_code"] = ended.status
    if ended.endpoint is not None:
        said["http.route"] = ended.endpoint
    if scope.get("server") is not None:
        address, port = scope["server"]
        said["server.address"] = address
        if port is not None:
            said["server.port"] = port
    if CALLER in scope:
        said["logitd.key"] = scope[CALLER]
    return said


def computed_attributes(ended: Ended) -> dict[str, Value]:
    """What is known when the engine has told the last of it, which may be later."""
    usage = ended.usage
    if usage is None:
        return {}
    said = _model(ended)
    if isinstance(usage.first, GenerationRequest):
        said |= _generation(usage.first)
        if (operation := OPERATIONS.get(ended.endpoint or "")) is not None:
            said["gen_ai.operation.name"] = operation
        said["gen_ai.response.finish_reasons"] = tuple(
            FinishReason.ABORT if reason is None else reason for reason in usage.reasons.values()
        )
    if usage.sequences:
        said["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        said["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        said["gen_ai.usage.output_tokens"] = usage.completion_tokens
    return said


def _model(ended: Ended) -> dict[str, Value]:
    """Which model was asked for, and which answered."""
    state = ended.scope["state"]
    served: Served = state[SERVED]
    body = state.get(BODY)
    checkpoint = served.checkpoint
    said: dict[str, Value] = {
        "gen_ai.provider.name": "logitd",
        "gen_ai.request.model": clip(getattr(body, "model", None) or checkpoint.name, 200),
        "gen_ai.response.model": checkpoint.name,
        "logitd.weights_sha256": checkpoint.weights_sha256,
    }
    if (stream := getattr(body, "stream", None)) is not None:
        said["gen_ai.request.stream"] = stream
    return said


def _generation(request: GenerationRequest) -> dict[str, Value]:
    """How it was asked to sample, defaults included."""
    params = request.params
    said: dict[str, Value] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
    }
    if params.seed <= LARGEST_INTEGER:
        said["gen_ai.request.seed"] = params.seed
    if request.n != 1:
        said["gen_ai.request.choice.count"] = request.n
    return said


def error_type(ended: Ended) -> str | None:
    """What failed, where it is the server that did: a status of 5xx, what was raised, or how a
    sequence ended. A client that is refused, or goes, is not an error by the conventions."""
    if ended.exception is not None:
        return ended.exception
    if ended.status >= 500 or not ended.status:
        return str(ended.status or 500)
    usage = ended.usage
    if usage is None:
        return None
    if usage.lost:
        return "engine_failed"
    if usage.failed is not None and usage.failed.param is None:
        return str(usage.failed.reason)
    if ended.whole and FinishReason.ABORT in usage.reasons.values():  # by the server's own end
        return str(FinishReason.ABORT)
    return None


def phases(usage: Usage) -> Iterator[tuple[str, float, float]]:
    """Each phase that was reached, with its moments on the engine's clock: from the first arrival
    to the first admission, from there to the first computed prompt, from there to the last end."""
    if not usage.sequences:
        return
    moments = (usage.arrived, usage.admitted, usage.prefilled, usage.finished)
    for name, begin, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
        if begin <= usage.finished:
            yield name, begin, min(end, usage.finished)
