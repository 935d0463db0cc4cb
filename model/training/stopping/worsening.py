"""Worsening: notices about a rising validation loss, from the metrics of a run.

A model that sees a text too often overfits: the training loss keeps falling, but the validation
loss rises. The best checkpoint is kept, so only time is lost. The run reports this once per series
of worse evaluations, and at the end. `patience` ends such a run. It is off by default, because the
decay of the learning rate at the end often leads to a new best.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from logitd.model.plural import pluralize

EVALUATIONS = 2
"""Number of consecutive evaluations without a new best after which a notice is given."""
Record = Mapping[str, Any]
"""A line of metrics.jsonl."""


def worsening(metrics: Sequence[Record], patience: int | None) -> str | None:
    """The notice that is due after the latest evaluation; None if none is due."""
    since_best = _since_best(metrics)
    if len(since_best) != 1 + EVALUATIONS or since_best[0]["step"] == 0:
        return None
    rising = ", ".join(f"{e['val_bits_per_byte']:.4f} at step {e['step']:,}" for e in since_best)
    before, now = (_training_loss(metrics, since_best[at]["step"]) for at in (0, -1))
    meanwhile = ""
    if before is not None and now is not None and now < before:
        meanwhile = (
            f", while the training loss fell from {before:.3f} to {now:.3f} nats per token: the "
            "model is overfitting"
        )
    advice = f"; --patience {EVALUATIONS} would end such a run" if patience is None else ""
    return (
        f"the validation loss rises: {rising} bits per byte{meanwhile}. `best`, which is served, "
        f"stays at step {since_best[0]['step']:,}{advice}"
    )


def ended_worse(metrics: Sequence[Record]) -> str | None:
    """The notice at the end of a run whose last evaluation is not its best; None for any other
    run."""
    since_best = _since_best(metrics)
    if len(since_best) < 2:
        return None
    best, last = since_best[0], since_best[-1]
    return (
        f"validation was best at step {best['step']:,}, with {best['val_bits_per_byte']:.4f} bits "
        f"per byte; {pluralize(last['step'] - best['step'], 'step', ',')} later it "
        f"is {last['val_bits_per_byte']:.4f}. The link `best`, which is served, points to step "
        f"{best['step']:,}"
    )


def _since_best(metrics: Sequence[Record]) -> list[Record]:
    """The best evaluation and all later evaluations."""
    evaluations = [record for record in metrics if record["kind"] == "eval"]
    losses = [record["val_loss"] for record in evaluations]
    return evaluations[losses.index(min(losses)) :] if losses else []


def _training_loss(metrics: Sequence[Record], step: int) -> float | None:
    """The loss of the last report at or before a step."""
    reported = [r for r in metrics if r["kind"] == "train" and r["step"] <= step]
    return reported[-1]["loss"] if reported else None
