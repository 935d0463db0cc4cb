"""What every reply of OpenAI's shape says besides its choices: who answers, and the usage."""

from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.service.http.envelope import envelope
from logitd.service.openai.schemas import StreamOptions


def head(kind: str, form: str, model: str, checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The beginning of a reply: `kind` begins its id, `form` is its `object`."""
    own = envelope(kind, model, checkpoint)
    return {
        "id": own["id"],
        "object": form,
        "created": own["created"],
        "model": own["model"],
        "system_fingerprint": fingerprint(checkpoint),
    }


def fingerprint(checkpoint: CheckpointInfo) -> str:
    """The weights in one word: a reply with another fingerprint comes from others."""
    return f"step-{checkpoint.training.step}-{checkpoint.weights_sha256[:12]}"


def usage(counts: dict[str, int]) -> dict[str, Any]:
    """OpenAI's `usage` from the native one, or from the counts so far, which do not know yet
    what was cached."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    told: dict[str, Any] = {name: counts[name] for name in names}
    if (cached := counts.get("cached_tokens")) is not None:
        told["prompt_tokens_details"] = {"cached_tokens": cached}
    return told


def named_seed(given: int | None, used: int) -> int:
    """The seed of a choice as its request writes it, so that it gives the same again."""
    return used if given in (None, -1) else given


def usage_member(options: StreamOptions | None, counts: dict[str, Any]) -> dict[str, Any]:
    """What a chunk with choices says of the usage, under these options."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": counts}
    if options is not None and options.include_usage:
        return {"usage": None}
    return {}
