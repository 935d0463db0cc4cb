"""Envelope: members of OpenAI's replies other than the choices, such as the model and the usage."""

from collections.abc import Iterator
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.operations.operation import envelope
from logitd.service.openai.schemas import StreamOptions


def head(kind: str, form: str, model: str, checkpoint: CheckpointInfo) -> dict[str, Any]:
    """The first members of a reply. Its `id` begins with `kind`; its `object` is `form`."""
    own = envelope(kind, model, checkpoint)
    return {
        "id": own["id"],
        "object": form,
        "created": own["created"],
        "model": own["model"],
        # Different weights have a different fingerprint.
        "system_fingerprint": f"step-{checkpoint.training.step}-{checkpoint.weights_sha256[:12]}",
    }


def usage(counts: dict[str, int]) -> dict[str, Any]:
    """OpenAI's `usage`, from the native `usage`, or from the counts of a stream so far, which do
    not include cached tokens."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    members: dict[str, Any] = {name: counts[name] for name in names}
    if (cached := counts.get("cached_tokens")) is not None:
        members["prompt_tokens_details"] = {"cached_tokens": cached}
    return members


def named_seed(given: int | None, used: int) -> int:
    """The seed to report in a choice: `given` if the client chose a seed, otherwise `used`. The
    same request with this seed repeats the choice."""
    return used if given in (None, -1) else given


def usage_member(options: StreamOptions | None, counts: dict[str, int]) -> dict[str, Any]:
    """The member `usage` of a chunk with choices: the usage so far with `continuous_usage_stats`,
    null with only `include_usage`, otherwise absent."""
    if options is not None and options.continuous_usage_stats:
        return {"usage": usage(counts)}
    if options is not None and options.include_usage:
        return {"usage": None}
    return {}


def last_chunk(
    chunk_head: dict[str, Any], options: StreamOptions | None, native: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The chunk with the usage, if `native` is the last chunk and the options include the usage."""
    if "usage" in native and options is not None and options.include_usage:
        yield {**chunk_head, "choices": [], "usage": usage(native["usage"])}
