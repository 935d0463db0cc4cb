"""`logitd serve`: the service, and the banner that says what is served where."""

import sys

from prometheus_client import disable_created_metrics
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.server import serve
from service.settings import ServeSettings
from service.state import Served


def run(settings: ServeSettings) -> int:
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
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("checkpoint", f"{checkpoint.name}, step {training.step:,}, validation loss {loss}"),
        ("parameters", f"{served.parameters:,}"),
        ("device", f"{served.device}, {served.placement.dtype_name}, "
                   f"{served.placement.threads} threads"),
        ("decoding", served.decode_path.name),
        ("context", f"{served.context_length} tokens"),
        ("slots", f"{settings.slots} sequences at once, "
                  f"{served.kv_cache_bytes / 2**20:,.0f} MiB of keys and values"),
        ("keys", ", ".join(served.key_names) or "none: whoever can connect is answered"),
        ("service", url),
        ("docs", f"{url}/docs"),
        ("metrics", f"{url}/metrics"),
    ):  # fmt: skip
        table.add_row(Text(name, "bold"), Text(value))
    console.print("logitd is ready")
    console.print(table)
    key = "-H 'Authorization: Bearer KEY' " if served.key_names else ""
    console.print("try it:")
    console.print(
        f"  curl {url}/generate -H 'Content-Type: application/json' {key}"
        """-d '{"prompt": "def main():", "max_tokens": 40}'""",
        markup=False,
    )
