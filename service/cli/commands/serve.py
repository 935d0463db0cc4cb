"""`logitd serve`: the service, and the banner that says what is served where.

Of a run the best checkpoint is served (`servable.py`); a run that is followed may have saved none
yet. A model of somebody else's in place of a checkpoint is answered with the command that imports
it, or, with --import, imported first. Of several models one that is not there leaves the others
alone, as one that cannot be loaded does.
"""

import importlib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import disable_created_metrics
from rich.console import Console
from rich.text import Text

from logitd.model.checkpoint.beside import read_card, sampled_prompt
from logitd.model.checkpoint.checkpoint import CheckpointInfo, is_checkpoint
from logitd.model.device import unproven
from logitd.model.memory import format_bytes
from logitd.service.application.server import serve
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.commands.servable import NotFollowed, NotServable, checkpoint_at
from logitd.service.cli.terminal import say, visible
from logitd.service.models.served import Models, NotLoaded, ServedModel
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

ERRORS = (NotFollowed,)


def run(settings: ServeSettings) -> int:
    found = [_servable(source, settings) for source in settings.models]
    if not any(found):
        return 1
    # What is not there is still named: loading fails, for /info and the metrics to say.
    sources = tuple(there or named for there, named in zip(found, settings.models, strict=True))
    disable_created_metrics()  # one series less for every counter and histogram
    settings = settings.model_copy(update={"checkpoint": sources, "served_model_name": None})
    return serve(settings, announce=partial(print_banner, busy=busy_notice()))


def _servable(source: ModelSource, settings: ServeSettings) -> ModelSource | None:
    """What can be loaded for a model; None where there is nothing, and stderr has the reason.
    Raises NotFollowed."""
    try:
        checkpoint = checkpoint_at(source.path, settings.follow)
    except NotFollowed:
        raise
    except NotServable as problem:
        say(f"logitd serve: {problem}{_perhaps_a_path(source)}", file=sys.stderr)
        return None
    if checkpoint != source.path:
        say(
            f"logitd serve: of the run {source.path}, the checkpoint {checkpoint.name}",
            file=sys.stderr,
        )
    if settings.follow is not None or is_checkpoint(checkpoint):
        return source
    # Imported by name: a server has no use for what reads other people's models.
    foreign = importlib.import_module("logitd.service.cli.commands.import_model")
    imported: Path | None = foreign.for_serving(checkpoint, may_import=settings.import_model)
    return None if imported is None else replace(source, path=imported)


def _perhaps_a_path(source: ModelSource) -> str:
    """A hint where NAME=PATH is the path of something."""
    whole = f"{source.name}={source.path}"
    return (
        f"\n{whole} is written {shlex.quote(f'./{whole}')}"
        if source.name and Path(whole).exists()
        else ""
    )


def print_banner(models: Models, port: int, busy: str | None = None) -> None:
    """Print what is served, with which weights, where, and a line to try. `busy` is a notice of
    when the command began: loading takes the processors too."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    first = models.served[0]
    settings = first.settings
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"http://{host}:{port}"
    console.print("logitd is ready")
    for name, value in (
        *_models(models),
        ("keys", ", ".join(first.key_names) or "none: every client is answered"),
        ("service", url),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
        *([] if busy is None else [("load", busy)]),
    ):
        console.print(Text.assemble((f"{name:<12}", "bold"), visible(value)))
    key = "-H 'Authorization: Bearer KEY' " if first.key_names else ""
    body: dict[str, Any] = {"model": first.name} if models.several else {}
    body |= {"prompt": _suitable_prompt(first.checkpoint), "max_tokens": 40}
    # In one write: a reader of "try it" has the line to try.
    console.print(
        f"try it:\n  curl {url}/generate -H 'Content-Type: application/json' {key}"
        f"-d {shlex.quote(json.dumps(body))}",
        markup=False,
    )


def _suitable_prompt(checkpoint: CheckpointInfo) -> str | list[int]:
    """A prompt that every vocabulary takes: that of the checkpoint's own sample, which is from its
    training's held-out text, or else the token that begins a document."""
    prompt = sampled_prompt(read_card(checkpoint.path))
    if prompt and checkpoint.tokenizer.has_text:
        return prompt
    return [checkpoint.tokenizer.end_of_text or 0]


def _models(models: Models) -> Iterator[tuple[str, str]]:
    """The lines of each model, then those that all share."""
    for number, model in enumerate(models.every):
        if models.several:
            yield "model", model.name + (" (default)" if number == 0 else "")
        if isinstance(model, NotLoaded):
            yield "not served", model.reason
            continue
        if not models.several and model.name != model.checkpoint.name:
            yield "model", model.name
        computed = model.computation
        yield "checkpoint", _checkpoint(model)
        yield "parameters", f"{computed.parameters:,}"
        yield "dtype", f"{computed.placement.dtype_name} ({computed.dtype_why})"
        yield "decoding", _decoding(model)
        if (cost := computed.quantization) is not None:
            yield "quantized", cost.sentence()
        yield "context", f"{model.context_length} tokens"
        yield "slots", _slots(model)
    computed = models.served[0].computation
    turns = "; a step of each model in turn" if models.several else ""
    yield "device", f"{computed.device}, {computed.placement.threads} threads{turns}"
    if (warning := unproven(computed.device)) is not None:
        yield "unproven", warning
    if computed.kernels is not None:
        yield "kernels", computed.kernels


def _checkpoint(served: ServedModel) -> str:
    checkpoint, settings = served.checkpoint, served.settings
    training = checkpoint.training
    loss = "never evaluated" if training.val_loss is None else f"{training.val_loss:.4f} nats/token"
    follows = (
        ""
        if settings.follow is None
        else f"; following {settings.follow} of {settings.source.path}"
    )
    return f"{checkpoint.name}, step {training.step:,}, validation loss {loss}{follows}"


def _decoding(served: ServedModel) -> str:
    computed, settings = served.computation, served.settings
    drafts = "" if settings.speculate == "none" else f", with drafts by {settings.speculate}"
    note = "" if computed.decoding_note is None else f" ({computed.decoding_note})"
    return computed.decoding + drafts + note


def _slots(served: ServedModel) -> str:
    computed = served.computation
    each = computed.kv_cache_bytes // served.slots
    why = "" if computed.slots_why is None else f" ({computed.slots_why})"
    return f"{served.slots} sequences at once, {format_bytes(each)} of keys and values each{why}"
