"""`logitd serve`: the service, and the banner that says what is served where.

Of a run the best checkpoint is served (`servable.py`). A model of somebody else's in place of a
checkpoint is answered with the command that imports it, or, with --import, imported first.
"""

import importlib
import sys

from prometheus_client import disable_created_metrics
from rich.console import Console
from rich.text import Text

from model.checkpoint.checkpoint import is_checkpoint
from service.app.server import serve
from service.commands.servable import NotServable, checkpoint_at
from service.core.state import Served
from service.settings.serve import ServeSettings


def run(settings: ServeSettings) -> int:
    try:
        checkpoint = checkpoint_at(settings.checkpoint, settings.follow)
    except NotServable as problem:
        print(f"logitd serve: {problem}", file=sys.stderr)
        return 1
    if checkpoint != settings.checkpoint:
        print(
            f"logitd serve: of the run {settings.checkpoint}, the checkpoint {checkpoint.name}",
            file=sys.stderr,
        )
    if not is_checkpoint(checkpoint):
        # Imported by name: a server has no use for what reads other people's models.
        foreign = importlib.import_module("service.commands.import_model")
        imported = foreign.for_serving(checkpoint, may_import=settings.import_model)
        if imported is None:
            return 1
        settings = settings.model_copy(update={"checkpoint": imported})
    disable_created_metrics()  # one series less for every counter and histogram
    return serve(settings, announce=print_banner)


def print_banner(served: Served, port: int) -> None:
    """What is served, with which weights, where, and a line to try."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    checkpoint, settings = served.checkpoint, served.settings
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"http://{host}:{port}"
    training = checkpoint.training
    loss = "never evaluated" if training.val_loss is None else f"{training.val_loss:.4f} nats/token"
    drafts = "" if settings.speculate == "none" else f", with drafts by {settings.speculate}"
    computed = served.computation
    cost = computed.quantization
    note = "" if computed.decoding_note is None else f" ({computed.decoding_note})"
    process = ", in a process of its own" if settings.engine == "process" else ""
    follows = (
        "" if settings.follow is None else f"; following {settings.follow} of {settings.checkpoint}"
    )
    console.print("logitd is ready")
    for name, value in (
        ("checkpoint", f"{checkpoint.name}, step {training.step:,}, validation loss {loss}"
                       f"{follows}"),
        ("parameters", f"{computed.parameters:,}"),
        ("device", f"{computed.device}, {computed.placement.threads} threads{process}"),
        ("dtype", f"{computed.placement.dtype_name} ({computed.dtype_why})"),
        ("decoding", computed.decoding + drafts + note),
        *([] if cost is None else [("quantized", cost.sentence())]),
        ("context", f"{served.context_length} tokens"),
        ("slots", f"{served.slots} sequences at once, "
                  f"{computed.kv_cache_bytes / 2**20:,.0f} MiB of keys and values"),
        ("keys", ", ".join(served.key_names) or "none: whoever can connect is answered"),
        ("service", url),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
    ):  # fmt: skip
        console.print(Text.assemble((f"{name:<12}", "bold"), value))
    key = "-H 'Authorization: Bearer KEY' " if served.key_names else ""
    console.print("try it:")
    console.print(
        f"  curl {url}/generate -H 'Content-Type: application/json' {key}"
        """-d '{"prompt": "def main():", "max_tokens": 40}'""",
        markup=False,
    )
