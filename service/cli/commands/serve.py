"""`logitd serve`: starts the service, and prints the banner with its models and addresses.

A run is served with its best checkpoint (`servable.py`); a followed run may not have one yet. For a
model trained elsewhere, the command prints how to import it, or imports it with --import. If one of
several models is missing or cannot be loaded, the others are served.
"""

import importlib
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import disable_created_metrics
from rich.console import Console
from rich.text import Text

from logitd.model.checkpoint.card_and_curve import read_card, sampled_prompt
from logitd.model.checkpoint.checkpoint import CheckpointInfo, is_checkpoint
from logitd.model.device import unproven
from logitd.model.memory import format_bytes
from logitd.model.owner_code.config import CodeConfig
from logitd.model.plural import pluralize
from logitd.model.text.tokenizer import TokenizerError
from logitd.service.application.server import serve
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.commands.health import local_url
from logitd.service.cli.commands.servable import NotFollowed, NotServable, checkpoint_at
from logitd.service.cli.terminal import tell, visible
from logitd.service.cli.variables import places
from logitd.service.models.served import Models, NotLoaded, ServedModel
from logitd.service.settings.model_source import ModelSource
from logitd.service.settings.serve import ServeSettings

ERRORS = (NotFollowed,)
_log = partial(tell, "serve")


def run(settings: ServeSettings) -> int:
    if _has_only_a_clients_key(settings):
        _log(
            "LOGITD_API_KEY is the key of a client, and this server would require none: set "
            "LOGITD_API_KEYS=NAME=KEY, or unset LOGITD_API_KEY"
        )
        return 2
    found = [_servable(source, settings) for source in settings.models]
    if not any(found):
        return 1
    # Keep the missing models in the list: loading them fails, which /info and the metrics then
    # show.
    sources = tuple(there or missing for there, missing in zip(found, settings.models, strict=True))
    if missing := [source.served_name for source in sources if source not in found]:
        _log(
            f"starting without {', '.join(missing)}: requests for a missing model get 503, "
            "requests for the other models are answered"
        )
    disable_created_metrics()  # saves one series per counter and histogram
    settings = settings.model_copy(update={"checkpoint": sources, "served_model_name": None})
    return serve(settings, announce=partial(print_banner, busy=busy_notice()))


def _has_only_a_clients_key(settings: ServeSettings) -> bool:
    """True if the variable of a client is set where the server's may be meant."""
    if settings.api_keys or settings.api_key_file:
        return False
    return any("LOGITD_API_KEY" in map(str.upper, values) for _, values in places())


def _servable(source: ModelSource, settings: ServeSettings) -> ModelSource | None:
    """The model to load. If it cannot be served, prints the reason to stderr and returns None.
    Raises NotFollowed."""
    try:
        checkpoint = checkpoint_at(source.path, settings.follow)
        if checkpoint != source.path:
            _log(f"{source.path} is a run; serving its checkpoint {checkpoint.name}")
        if settings.follow is not None or is_checkpoint(checkpoint):
            for name in ("code", "tokenizer"):
                if getattr(settings, name) is not None:
                    raise NotServable(
                        f"{checkpoint} is a checkpoint, but --{name} applies only to models that "
                        f"must be imported: remove --{name}"
                    )
            return source
        # Most servers do not read models of other programs, so import this only now.
        foreign = importlib.import_module("logitd.service.cli.commands.import_model")
        path: Path = foreign.for_serving(
            checkpoint,
            may_import=settings.import_model or settings.code is not None,
            code=settings.code,
            code_call=settings.code_call,
            tokenizer=settings.tokenizer,
            run_code=settings.run_code,
        )
        return replace(source, path=path)
    except NotServable as problem:
        model = f"model {source.served_name}: " if len(settings.models) > 1 else ""
        _log(f"{model}{problem}{_perhaps_a_path(source)}")
        return None


def _perhaps_a_path(source: ModelSource) -> str:
    """A hint if the argument NAME=PATH as a whole is an existing path; otherwise ""."""
    whole = f"{source.name}={source.path}"
    if source.name is None or not Path(whole).exists():
        return ""
    return f"\nif you mean the path {whole}, write {shlex.quote(f'./{whole}')}"


def print_banner(models: Models, port: int, busy: str | None = None) -> None:
    """Print the models, their weights, the addresses, and a command to try. `busy` is the notice
    that the machine is busy. It dates from the start of the command, because loading a model keeps
    the processors busy too."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    first = models.served[0]
    settings = first.settings
    url = local_url(settings.host, port)
    console.print("logitd is ready")
    for name, value in (
        *_models(models),
        ("keys", ", ".join(first.keys.names) or "not required: every client is answered"),
        ("service", url),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
        *([] if busy is None else [("load", busy)]),
    ):
        console.print(Text.assemble((f"{name:<12}", "bold"), visible(value)))
    key = "-H 'Authorization: Bearer KEY' " if first.keys.names else ""
    body: dict[str, Any] = {"model": first.name} if models.several else {}
    body |= _suitable_request(first.checkpoint)
    # Write everything at once, so that a program that reads the banner never sees "try it" without
    # a command.
    console.print(
        f"try it:\n  curl {url}/generate -H 'Content-Type: application/json' {key}"
        f"-d {shlex.quote(json.dumps(body))}",
        markup=False,
    )


def _suitable_request(checkpoint: CheckpointInfo) -> dict[str, Any]:
    """A prompt that suits the model, and the number of tokens to generate. The prompt is the
    held-out text from which the sample in the checkpoint's card was generated. If the card has no
    sample, or its prompt does not fit the model, it is the token that begins a document."""
    tokenizer, context = checkpoint.tokenizer, checkpoint.shape.context_length
    prompt = sampled_prompt(read_card(checkpoint.path))
    if prompt and tokenizer.has_text:
        with suppress(TokenizerError):
            if (room := context - len(tokenizer.encode(prompt))) > 0:
                return {"prompt": prompt, "max_tokens": min(40, room)}
    return {"prompt": [tokenizer.end_of_text or 0], "max_tokens": min(40, context - 1)}


def _models(models: Models) -> Iterator[tuple[str, str]]:
    """Names and values for the banner, first about each model, then about the server."""
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
        if model.history is not None:
            yield "history", _history(list(model.history.steps()), model.settings)
        if isinstance(shape := model.checkpoint.shape, CodeConfig):
            yield "runs code", f"{shape.code}, with your permissions, in a process without network"
        yield "parameters", f"{computed.parameters:,}"
        yield "dtype", f"{computed.placement.dtype_name} ({computed.dtype_why})"
        yield "decoding", _decoding(model)
        if (cost := computed.quantization) is not None:
            yield "quantized", cost.sentence()
        for features in model.autoencoders:
            yield "features", f"{features.count:,} as the stage {features.stage_name}"
        yield "context", f"{model.checkpoint.shape.context_length} tokens"
        yield "slots", _slots(model)
    computed = models.served[0].computation
    turns = "; a step of each model in turn" if models.several else ""
    yield "device", f"{computed.device}, {pluralize(computed.placement.threads, 'thread')}{turns}"
    if (warning := unproven(computed.device)) is not None:
        yield "unproven", warning
    if computed.kernels is not None:
        yield "kernels", computed.kernels


def _checkpoint(served: ServedModel) -> str:
    checkpoint, settings = served.checkpoint, served.settings
    training = checkpoint.training
    loss = "never evaluated" if training.val_loss is None else f"{training.val_loss:.4f} nats/token"
    text = f"{checkpoint.name}, step {training.step:,}, validation loss {loss}"
    if settings.follow is not None:
        text += f"; following {settings.follow} of {settings.source.path}"
    return text


def _history(steps: Sequence[int], settings: ServeSettings) -> str:
    span = (
        f"{pluralize(len(steps), 'step')} from {steps[0]:,} to {steps[-1]:,}" if steps else "empty"
    )
    return f"{span}; {settings.history_steps} in memory at once"


def _decoding(served: ServedModel) -> str:
    computed, settings = served.computation, served.settings
    drafts = "" if settings.speculate == "none" else f", with drafts by {settings.speculate}"
    note = "" if computed.decoding_note is None else f" ({computed.decoding_note})"
    return computed.decoding + drafts + note


def _slots(served: ServedModel) -> str:
    computed = served.computation
    slots = served.engine.admission.slots
    each = computed.kv_cache_bytes // slots
    why = "" if computed.slots_why is None else f" ({computed.slots_why})"
    is_code = isinstance(served.checkpoint.shape, CodeConfig)
    kept = "token ids" if is_code else "keys and values"
    return f"{pluralize(slots, 'sequence')} at once, {format_bytes(each)} of {kept} each{why}"
