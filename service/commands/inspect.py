"""`logitd inspect`: a checkpoint's facts, and the shapes of a forward pass, stage by stage."""

import sys

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from model.checkpoint import CheckpointError, CheckpointInfo, load_checkpoint
from model.device import choose_placement
from model.trace import Stage, trace
from service.settings import InspectSettings


def run(settings: InspectSettings) -> int:
    placement = choose_placement("cpu", "float32")
    try:
        checkpoint, gpt = load_checkpoint(
            settings.checkpoint, device=placement.device, dtype=placement.dtype
        )
    except CheckpointError as error:
        print(f"logitd inspect: {error}", file=sys.stderr)
        return 1
    token_ids = checkpoint.tokenizer.encode(settings.text)
    limit = checkpoint.config.context_length
    if not 1 <= len(token_ids) <= limit:
        print(
            f"logitd inspect: the text has {len(token_ids)} tokens; 1 to {limit} are possible",
            file=sys.stderr,
        )
        return 1
    console = Console(highlight=False)
    console.print(_facts(checkpoint, gpt.parameter_count()))
    pieces = [repr(checkpoint.tokenizer.token_text(i)) for i in token_ids]
    console.print(f"\n{len(token_ids)} tokens: {' '.join(pieces)}\n", markup=False)
    console.print(_shapes(trace(gpt, token_ids)))
    return 0


def _facts(checkpoint: CheckpointInfo, parameters: int) -> Table:
    training = checkpoint.training
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in (
        ("checkpoint", str(checkpoint.path)),
        ("weights sha256", checkpoint.weights_sha256),
        ("parameters", f"{parameters:,}"),
        ("step", f"{training.step:,}"),
        ("tokens seen", f"{training.tokens:,}"),
        ("validation loss", _number(training.val_loss, "nats per token")),
        ("", _number(training.val_bits_per_byte, "bits per byte")),
        ("created", training.created),
        *((f"data: {key}", str(value)) for key, value in training.data.items()),
        *((f"model: {key}", str(value)) for key, value in checkpoint.config.to_dict().items()),
    ):
        table.add_row(Text(name, "bold"), Text(value))
    return table


def _shapes(stages: list[Stage]) -> Table:
    # A narrow terminal folds; it does not cut.
    columns = (Column(name, overflow="fold") for name in ("stage", "shape", "axes", "mean", "std"))
    table = Table(*columns, title="a forward pass")
    for stage in stages:
        shape = " x ".join(map(str, stage.shape))
        table.add_row(stage.name, shape, stage.axes, f"{stage.mean:.4f}", f"{stage.std:.4f}")
    return table


def _number(value: float | None, unit: str) -> str:
    return "never evaluated" if value is None else f"{value:.4f} {unit}"
