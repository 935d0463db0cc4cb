"""The recipe for a small text beside the one for long texts and nanoGPT's, at equal time or steps.

    python -m benchmarks.train_small --data FILE [--minutes 2] [--threads N] [--seeds 1]
                                     [--sides adapted long nanogpt-char] [--size N --passes P]

FILE is a text that is passed several times in that time, such as a megabyte of plays for two
minutes. Its last tenth is held out, as `logitd train` does. The sides:

    adapted        `logitd train --minutes N --data FILE`
    long           the same as if the text were long: nothing is changed because it is passed often
    nanogpt-char   nanoGPT's model for a CPU and its recipe, on bytes (the preset of that name)

With `--size N --passes P` the clock decides nothing: `adapted` and `long` have the N-th size of
`model/training/configuration/autosize.py` (from 0) and as many steps as `long` needs to pass the
text P times. So a machine that does other things besides gives the same figures. A step of
`adapted` has less arithmetic in its head and more for its dropout.

Each run is a real `train()` in a process of its own, in turns. Bits per byte are measured after it
on the whole validation text, of the last weights and of the best evaluation's, which are what is
served. The last line is JSON.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.trained import held_out_bits_per_byte, train_here, weights_of
from logitd.model.data.prepare import read_prepared
from logitd.model.data.sources.open_text import open_text
from logitd.model.device import keep_freed_memory
from logitd.model.training.configuration.autosize import (
    SIZES,
    Measured,
    autosize,
    bytes_per_token,
    fill_in,
    suit_text,
)
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.setup.measure import measure_machine

SIDES = ("adapted", "long", "nanogpt-char")
FIRST_SEED = 1337


@dataclass(frozen=True)
class Outcome:
    """What came of a run. Losses are in bits per byte."""

    side: str
    seed: int
    last: float
    best: float
    training: float  # smoothed, of the last report
    passes: float
    steps: int
    tokens: int
    seconds: float
    parameters: int
    vocab_size: int
    dropout: float


def configuration(side: str, asked: TrainingConfig, measured: Measured) -> TrainingConfig:
    """What a side trains in the minutes that are asked for, on a machine that was measured once
    for all sides."""
    if side == "nanogpt-char":
        return TrainingConfig(**{**asked.to_dict(), "preset": side})
    count = open_text(asked.data).count_bytes if side == "adapted" else _endless
    return autosize(asked, measured, count)[0]


def of_passes(side: str, asked: TrainingConfig, size: int, passes: float) -> TrainingConfig:
    """What a side trains of a size, in the steps that `long` needs for so many passes."""
    if side == "nanogpt-char":
        raise SystemExit("nanogpt-char has a size of its own: compare it by --minutes")
    text, chosen = open_text(asked.data), SIZES[size]
    share = 1 - resolve(asked).recipe.val_fraction
    tokens = passes * share * text.count_bytes(float("inf")) / bytes_per_token(chosen.vocab_size)
    filled = fill_in(asked, chosen, tokens)
    count = text.count_bytes if side == "adapted" else _endless
    changes, _ = suit_text(filled, asked, tokens, None, count)
    steps = max(1, round(tokens / (chosen.batch_size * chosen.context_length)))
    return filled.model_copy(update={**changes, "steps": steps, "minutes": None})


def _endless(limit: float) -> int:
    """The bytes of a text that is longer than any limit."""
    return ceil(limit) + 1


def train_one(fields: dict[str, Any], side: str) -> Outcome:
    """Train in this process, then evaluate on the whole validation text."""
    result, placement = train_here(TrainingConfig(**fields))
    last, best = (weights_of(path, placement) for path in (result.checkpoint, result.best))
    prepared = read_prepared(result.run / "data")
    records = map(json.loads, (result.run / "metrics.jsonl").read_text().splitlines())
    reports = [record for record in records if record["kind"] == "train"]
    described = json.loads((result.run / "run.json").read_text())
    train_bytes = prepared.train.text_bytes
    return Outcome(
        side=side,
        seed=described["recipe"]["seed"],
        last=held_out_bits_per_byte(last, result.run, placement),
        best=held_out_bits_per_byte(best, result.run, placement),
        training=reports[-1]["smoothed_loss"] * prepared.train.count / train_bytes / math.log(2),
        passes=result.tokens / prepared.train.count,
        steps=result.step,
        tokens=result.tokens,
        seconds=result.seconds,
        parameters=last.parameter_count(),
        vocab_size=prepared.tokenizer.vocab_size,
        dropout=described["model"]["dropout"],
    )


def _in_a_process(config: TrainingConfig, side: str) -> Outcome:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.train_small",
            "--one",
            side,
            json.dumps(config.to_dict()),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def fewer(outcomes: Sequence[Outcome], other: str) -> tuple[float, float]:
    """How many percent fewer bits per byte the adapted recipe's last weights need than another's
    last ones and than its best ones."""
    ours = statistics.mean(each.last for each in outcomes if each.side == "adapted")
    theirs = [each for each in outcomes if each.side == other]
    last = statistics.mean(each.last for each in theirs)
    best = statistics.mean(each.best for each in theirs)
    return 100 * (1 - ours / last), 100 * (1 - ours / best)


def table(outcomes: Sequence[Outcome]) -> str:
    lines = [
        "| side | last | best | training | passes | steps | tokens | seconds | parameters "
        "| vocabulary | dropout |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.side} | {each.last:.3f} | {each.best:.3f} | {each.training:.3f} "
        f"| {each.passes:.1f} | {each.steps:,} | {each.tokens:,} | {each.seconds:.0f} "
        f"| {each.parameters:,} | {each.vocab_size} | {each.dropout:g} |"
        for each in outcomes
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--size", type=int, help="of the ladder, with --passes")
    parser.add_argument("--passes", type=float, help="steps instead of minutes")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    if arguments.one:
        side, fields = arguments.one
        print(json.dumps(asdict(train_one(json.loads(fields), side))))
        return
    if not arguments.data:
        parser.error("--data FILE is needed: a text that is passed several times")
    if (arguments.size is None) != (arguments.passes is None):
        parser.error("--size and --passes go together")
    keep_freed_memory()  # as `logitd train` does before it measures
    asked = TrainingConfig(
        data=tuple(arguments.data), threads=arguments.threads, minutes=arguments.minutes
    )
    measured = measure_machine(asked) if arguments.passes is None else None
    outcomes = []
    for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds):
        for side in arguments.sides:
            if measured is not None:
                config = configuration(side, asked, measured)
            else:
                config = of_passes(side, asked, arguments.size, arguments.passes)
            with tempfile.TemporaryDirectory() as folder:
                placed = config.model_copy(update={"out": Path(folder) / "run", "seed": seed})
                outcomes.append(_in_a_process(placed, side))
            print(outcomes[-1], flush=True)
    print(table(outcomes))
    others = [side for side in arguments.sides if side != "adapted"]
    if "adapted" in arguments.sides:
        for other in others:
            last, best = fewer(outcomes, other)
            print(
                f"adapted needs {last:.1f} % fewer bits per byte than the last weights of {other}, "
                f"{best:.1f} % fewer than its best"
            )
    print(json.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main()
