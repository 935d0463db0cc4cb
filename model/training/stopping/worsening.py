"""Worsening: notices of a run whose validation loss rises, from its metrics.

A text that is passed too often is learned by heart: the loss of training keeps falling and that of
validation rises. Only time is lost, because the best checkpoint stays. Reports it once in a row of
worse evaluations, and at the end. Does not end a run: `patience` does, and is left to the user,
because the fall of the learning rate at the end often brings a new best after a while without.
"""

from collections.abc import Mapping, Sequence
from typing import Any

EVALUATIONS = 2
"""Evaluations in a row without a new best, after which it is reported."""
Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


def worsening(metrics: Sequence[Record], patience: int | None) -> str | None:
    """The notice that is due after the last evaluation of a run with this `patience`, or None."""
    evaluations = _evaluations(metrics)
    best = _best(evaluations)
    if len(evaluations) - 1 - best != EVALUATIONS or evaluations[best]["step"] == 0:
        return None
    rising = ", ".join(f"{e['val_bits_per_byte']:.4f} at step {e['step']:,}"
                       for e in evaluations[best:])  # fmt: skip
    before, now = (_training_loss(metrics, evaluations[at]["step"]) for at in (best, -1))
    meanwhile = ""
    if before is not None and now is not None and now < before:
        meanwhile = (
            f", while the loss of training fell from {before:.3f} to {now:.3f} nats per token: the "
            "text is being learned by heart"
        )
    advice = f"; --patience {EVALUATIONS} would end such a run" if patience is None else ""
    return (
        f"validation gets worse: {rising} bits per byte{meanwhile}. Step "
        f"{evaluations[best]['step']:,} stays as `best`, which is what is served{advice}"
    )


def ended_worse(metrics: Sequence[Record]) -> str | None:
    """The notice at the end of a run whose last evaluation is not its best, or None."""
    evaluations = _evaluations(metrics)
    if not evaluations or (at := _best(evaluations)) == len(evaluations) - 1:
        return None
    best, last = evaluations[at], evaluations[-1]
    return (
        f"the best evaluation is that of step {best['step']:,}, "
        f"{best['val_bits_per_byte']:.4f} bits per byte; the {last['step'] - best['step']:,} steps "
        f"after it made that {last['val_bits_per_byte']:.4f}. `best` is the former, and is what "
        "is served"
    )


def _evaluations(metrics: Sequence[Record]) -> list[Record]:
    return [record for record in metrics if record["kind"] == "eval"]


def _best(evaluations: Sequence[Record]) -> int:
    """The index of the first with the lowest loss."""
    losses = [record["val_loss"] for record in evaluations]
    return losses.index(min(losses))


def _training_loss(metrics: Sequence[Record], step: int) -> float | None:
    """The smoothed loss of the last report up to a step."""
    reported = [r for r in metrics if r["kind"] == "train" and r["step"] <= step]
    return reported[-1]["smoothed_loss"] if reported else None
