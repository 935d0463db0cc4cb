"""The replies of Ollama's endpoints, from those of /generate: whole ones, and a line a piece."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from logitd.service.api.responses import sse
from logitd.service.core.errors import ApiError
from logitd.service.core.models import Served

MEDIA_TYPE = "application/x-ndjson"


def line(data: Any) -> bytes:
    """One JSON object on a line of its own."""
    return orjson.dumps(data) + b"\n"


def error_line(error: ApiError) -> dict[str, Any]:
    """An error after the first byte, as Ollama's clients read it."""
    return {"error": error.message}


LINES = sse.Wire(MEDIA_TYPE, line, b"", b"", error_line)
"""Lines of JSON. Their clients read each as JSON, so that nothing says in between that it lives."""


class OllamaFormat:
    """One request's replies; `kind` is what a text stands in."""

    def __init__(self, model: str, kind: Literal["response", "message"]) -> None:
        self._model = model
        self._kind = kind
        self._reason = "stop"

    def reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        (native,) = reply["choices"]
        self._reason = native["finish_reason"]
        return self._piece(native["text"], **self._end(reply))

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterator[dict[str, Any]]:
        """A line for each new piece of text, and one for the end."""
        for native in chunk["choices"]:
            if native["finish_reason"] is not None:
                self._reason = native["finish_reason"]
            if native["text"]:
                yield self._piece(native["text"], done=False)
        if "usage" in chunk:
            yield self._piece("", **self._end(chunk))

    def loaded(self) -> dict[str, Any]:
        """What a request without a prompt is answered."""
        return self._piece("", done=True, done_reason="load")

    def _piece(self, text: str, **rest: Any) -> dict[str, Any]:
        told = text if self._kind == "response" else {"role": "assistant", "content": text}
        return {"model": self._model, "created_at": now(), self._kind: told, **rest}

    def _end(self, reply: dict[str, Any]) -> dict[str, Any]:
        spent = {
            phase: round(reply["timings"][f"{phase}_ms"] * 1e6)
            for phase in ("queue", "prefill", "decode")
        }
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": sum(spent.values()),
            "load_duration": 0,
            "prompt_eval_count": reply["usage"]["prompt_tokens"],
            "prompt_eval_duration": spent["prefill"],
            "eval_count": reply["usage"]["completion_tokens"],
            "eval_duration": spent["decode"],
        }


def now() -> str:
    return datetime.now(UTC).isoformat()


def described(served: Served) -> dict[str, Any]:
    """The model served, as /api/tags lists it. Looks at the files."""
    checkpoint = served.checkpoint
    files = checkpoint.path.iterdir() if checkpoint.path.is_dir() else ()
    return {
        "name": checkpoint.name,
        "model": checkpoint.name,
        "modified_at": modified(checkpoint.training.created),
        "size": sum(file.stat().st_size for file in files),
        "digest": checkpoint.weights_sha256,
        "details": details(served),
        "context_length": served.context_length,
    }


def details(served: Served) -> dict[str, Any]:
    """What it is, in Ollama's words."""
    computation = served.computation
    cost = computation.quantization
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "gpt",
        "families": ["gpt"],
        "parameter_size": _rounded(computation.parameters),
        "quantization_level": computation.placement.dtype_name if cost is None else cost.kind,
    }


def modified(created: str) -> str:
    """When a checkpoint was saved, as Ollama's clients read it; 1970 where it does not say."""
    try:
        time = datetime.fromisoformat(created)
    except ValueError:
        time = datetime.fromtimestamp(0, UTC)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).isoformat()


def _rounded(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}"
    return str(parameters)
