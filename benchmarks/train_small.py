"""Compares the recipe for a small text with the recipe for long texts and with nanoGPT's, at equal
time or equal steps.

    python -m benchmarks.train_small --data FILE [--minutes 2] [--threads N] [--seeds 1]
                                     [--sides adapted long nanogpt-char] [--size N --passes P]

FILE is a text that a run passes over several times in the given minutes, such as a megabyte of
plays in two minutes. Its last tenth is held out, as in `logitd train`. The sides:

    adapted        `logitd train --minutes N --data FILE`
    long           the same with the recipe for long texts
    nanogpt-char   nanoGPT's model for a CPU and its recipe, on bytes (the preset of that name)

With `--size N --passes P`, the figures do not depend on the speed of the machine: `adapted` and
`long` have the N-th size of `model/training/configuration/autosize.py` (from 0) and train for as
many steps as `long` needs for P passes over the text. The two then take different times, because a
step of `adapted` needs less arithmetic for its head and more for its dropout.

Each run is a real `train()` in a separate process, and the sides take turns. After the run, bits
per byte are measured on the whole validation text, both with the last weights and with the weights
of the best evaluation, which a server would use. The last line is JSON.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.trained import FIRST_SEED, Outcome, markdown, measured_here, outcome_of
from logitd.model.data.sources.open_text import open_text
from logitd.model.device import keep_freed_memory
from logitd.model.training.configuration.autosize import (
    SIZES,
    Choice,
    autosize,
    bytes_per_token,
    resolve_size,
)
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import resolve

SIDES = ("adapted", "long", "nanogpt-char")


def configuration(side: str, asked: TrainingConfig, choice: Choice) -> TrainingConfig:
    """The settings of a side. All sides get the same `choice`, so the machine is measured only
    once."""
    if side == "nanogpt-char":
        return TrainingConfig(**{**asked.to_dict(), "preset": side})
    text_bytes = open_text(asked.data).count_bytes(math.inf) if side == "adapted" else math.inf
    return autosize(asked, choice, text_bytes)[0].config


def of_passes(side: str, asked: TrainingConfig, size: int, passes: float) -> TrainingConfig:
    """The settings of a side with the given size. It trains for as many steps as `long` needs for
    `passes` passes over the text."""
    if side == "nanogpt-char":
        raise SystemExit("nanogpt-char has a fixed size: use --minutes instead of --size")
    chosen = SIZES[size]
    train_bytes = (1 - resolve(asked).recipe.val_fraction) * open_text(asked.data).count_bytes(
        math.inf
    )
    tokens = passes * train_bytes / bytes_per_token(chosen.vocab_size)
    choice = Choice(chosen, resolve_size(asked, chosen), 0.0, tokens, {})
    steps = max(1, round(tokens / (chosen.batch_size * chosen.context_length)))
    config = configuration(side, asked, choice)
    return config.model_copy(update={"steps": steps, "minutes": None})


def fewer(outcomes: Mapping[str, Sequence[Outcome]], other: str) -> tuple[float, float]:
    """Percentages by which the adapted recipe's last weights have fewer bits per byte than the last
    weights of `other`, and than the best weights of `other`."""
    ours = statistics.mean(each.last for each in outcomes["adapted"])
    last = statistics.mean(each.last for each in outcomes[other])
    best = statistics.mean(each.best for each in outcomes[other])
    return 100 * (1 - ours / last), 100 * (1 - ours / best)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--size", type=int, help="index in SIZES, with --passes")
    parser.add_argument("--passes", type=float, help="steps instead of minutes")
    arguments = parser.parse_args()
    if not arguments.data:
        parser.error("--data FILE is required: a text for several passes")
    if (arguments.size is None) != (arguments.passes is None):
        parser.error("set --size and --passes together")
    keep_freed_memory()  # as `logitd train` does before it measures
    asked = TrainingConfig(
        data=tuple(arguments.data), threads=arguments.threads, minutes=arguments.minutes
    )
    measured = measured_here(asked) if arguments.passes is None else None
    outcomes: dict[str, list[Outcome]] = {side: [] for side in arguments.sides}
    rows = []
    for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds):
        for side in arguments.sides:
            if measured is not None:
                config = configuration(side, asked, measured)
            else:
                config = of_passes(side, asked, arguments.size, arguments.passes)
            with tempfile.TemporaryDirectory() as folder:
                placed = config.model_copy(update={"out": Path(folder) / "run", "seed": seed})
                outcome = outcome_of(placed.to_dict())
            outcomes[side].append(outcome)
            rows.append({"side": side, "seed": seed, **asdict(outcome)})
            print(rows[-1], flush=True)
    print(markdown(rows))
    if "adapted" in arguments.sides:
        for other in (side for side in arguments.sides if side != "adapted"):
            last, best = fewer(outcomes, other)
            print(
                f"adapted needs {last:.1f} % fewer bits per byte than the last weights of {other}, "
                f"{best:.1f} % fewer than its best"
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
