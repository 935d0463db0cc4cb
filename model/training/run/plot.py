"""Plot: draws the curves of a run from its metrics.

This needs matplotlib, an optional dependency, but no display.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draw losses, bits per byte and learning rate into the image file `path`. Returns False if
    matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    train = [record for record in metrics if record["kind"] == "train"]
    evals = [record for record in metrics if record["kind"] == "eval"]
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, bits, rate = figure.subplots(3, 1, sharex=True, height_ratios=[4, 3, 1])
    loss.plot(*_columns(train, "loss"), color="tab:blue", linewidth=1, label="training loss")
    loss.plot(*_columns(evals, "val_loss"), color="tab:orange", marker=".", label="validation loss")
    loss.set_ylabel("nats per token")
    loss.legend(loc="upper right")
    loss.grid(alpha=0.3)
    loss.set_title(title)
    # Omit the untrained model: its value would flatten the rest of the curve.
    trained = [record for record in evals if record["step"]] or evals
    bits.plot(*_columns(trained, "val_bits_per_byte"), color="tab:green", marker=".")
    if trained:
        best = min(trained, key=lambda record: float(record["val_bits_per_byte"]))
        value = best["val_bits_per_byte"]
        bits.axhline(value, color="tab:green", linestyle=":", label=f"best: {value:.4f}")
        bits.legend(loc="upper right")
    bits.set_ylabel("bits per byte, validation")
    bits.grid(alpha=0.3)
    rate.plot(*_columns(train, "learning_rate"), color="tab:gray")
    rate.set_ylabel("lr / peak")
    rate.set_xlabel("step")
    aside = path.with_name(f".{path.name}.part")
    figure.savefig(aside, dpi=110, format="png")
    aside.replace(path)
    return True


def _columns(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [record["step"] for record in records], [record[name] for record in records]
