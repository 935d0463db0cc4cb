"""The default recipe beside nanoGPT's, at equal time: bits per byte of held-out text.

    python -m benchmarks.train [--minutes 2 10] [--seeds 3] [--threads N] [--results FILE]
                               [--sweep] [--smaller] [--data FILE ...]

For each budget `logitd train --minutes N` chooses a size, and nanoGPT's model and AdamW (the preset
`nanogpt`) get the same layers and width: the block matrices have the same shapes. Text, vocabulary,
context, threads and seconds are the same; every run is a real `train()` in a process of its own, in
turns. What the two differ in is the recipe: the shape beside the matrices, the optimizers, the
learning rates and their schedule, the batch. The default has more parameters all the same: a head
of its own and value embeddings, which cost memory and hardly any arithmetic. The table has both
counts.

Only training counts as time, not the vocabulary, the choice of the size or the last evaluation. The
bits per byte are those of the last weights on the whole validation text, measured after the run, in
the same windows for all.

Fairness to nanoGPT: its preset has the best of the learning rates and batches that were tried at
width 128; `--sweep` first tries RATES times BATCHES at each budget with a seed of its own and takes
what has the fewest bits on the validation text. A recipe that learns less from a token may be
better off with a smaller model: `--smaller` adds nanoGPT at the next smaller size of the ladder.

Each run is a line in the results file as soon as it ends: called again with the same file, those
that are there are not repeated. The last line printed is JSON. On a machine that does other things
besides, or with budgets of seconds, the figures mean nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.trained import held_out_bits_per_byte, train_here, weights_of
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.split import sides, split_text
from logitd.model.data.vocabulary import learn
from logitd.model.training.configuration.autosize import SIZES, Size
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.presets import preset
from logitd.model.training.optim.optimizers import kind_of
from logitd.model.training.setup.measure import measure_machine
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

RATES = (1e-3, 2e-3, 4e-3)
BATCHES = (4, 8)
"""What `--sweep` tries on nanoGPT's side."""
NANOGPT_RATE, NANOGPT_BATCH = 2e-3, 4
SWEEP_SEED, FIRST_SEED = 1, 1337
NEVER = 10**9
"""Steps between what would take time from training."""
SAME_SECONDS = 0.02
"""Difference between runs that are compared, as a share."""


@dataclass(frozen=True)
class Run:
    """One training run: what is asked for."""

    minutes: float
    side: str  # "default", "nanogpt" or "nanogpt smaller"
    rate: float  # of the matrices
    batch: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of it. `matrices` counts the block matrices, `parameters` everything."""

    run: Run
    bits_per_byte: float
    seconds: float
    steps: int
    tokens: int
    matrices: int
    parameters: int
    threads: int


class Results:
    """A file with a line of JSON for each size chosen and each run that ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines]
        self.sizes = {
            record["minutes"]: Size(**record["size"]) for record in records if "size" in record
        }
        self.outcomes = {
            Run(**record["run"]): outcome_of(record) for record in records if "run" in record
        }

    def add_size(self, minutes: float, size: Size) -> None:
        self.sizes[minutes] = size
        self._append({"minutes": minutes, "size": asdict(size)})

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.run] = outcome
        self._append(asdict(outcome))

    def _append(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def choose_size(minutes: float, threads: int) -> Size:
    """The size that `logitd train --minutes` takes on this machine, for a long text."""
    return measure_machine(TrainingConfig(minutes=minutes, threads=threads)).choice.size


def settings(run: Run, size: Size, data: Sequence[str], tokenizer: Path, threads: int) -> Any:
    """The run as fields of TrainingConfig."""
    common = {
        "data": tuple(data),
        "tokenizer": str(tokenizer),
        "minutes": run.minutes,
        "threads": threads,
        "seed": run.seed,
        "batch_size": run.batch,
        "matrix_lr": run.rate,
        "eval_every": NEVER,
        "eval_batches": 1,
        "sample_every": NEVER,
        "sample_tokens": 1,
        "checkpoint_every": NEVER,
    }
    shape = {
        name: getattr(size, name) for name in ("n_layer", "n_head", "d_model", "context_length")
    }
    if run.side == "default":
        return {**shape, **common, "weight_decay": size.weight_decay}
    rates = {f"{part}_lr": run.rate for part in ("embedding", "head", "scalar")}
    return {**shape, **common, **rates, "preset": "nanogpt"}


def train_one(fields: dict[str, Any], run: Run) -> Outcome:
    """Train in this process, then evaluate the last weights on the whole validation text."""
    result, placement = train_here(TrainingConfig(**fields))
    gpt = weights_of(result.checkpoint, placement)
    return Outcome(
        run=run,
        bits_per_byte=held_out_bits_per_byte(gpt, result.run, placement),
        seconds=result.seconds,
        steps=result.step,
        tokens=result.tokens,
        matrices=block_matrices(gpt.config),
        parameters=gpt.parameter_count(),
        threads=placement.threads,
    )


def block_matrices(config: GPTConfig) -> int:
    """Numbers in what the recipe calls matrices."""
    with torch.device("meta"):
        gpt = GPT(config)
    return sum(p.numel() for name, p in gpt.named_parameters() if kind_of(gpt, name) == "matrix")


def learn_vocabulary(data: Sequence[str], vocab_size: int, path: Path) -> None:
    """Learn it from the training side alone, as a run does, and write it for all of them."""
    text = open_text(data)
    split = split_text(text.documents, preset("nanogpt").recipe.val_fraction)
    pieces = (
        piece
        for document in text.documents
        for side, piece in sides(document, split)
        if side == "train"
    )
    learn(pieces, vocab_size).write_ranks(path)


class Measurement:
    """The runs of one invocation, on one text."""

    def __init__(self, data: Sequence[str], threads: int, results: Results, folder: Path) -> None:
        self._data, self._threads = data, threads
        self._results, self._folder = results, folder

    def size(self, minutes: float) -> Size:
        if minutes not in self._results.sizes:
            self._results.add_size(minutes, choose_size(minutes, self._threads))
        return self._results.sizes[minutes]

    def outcome(self, run: Run) -> Outcome:
        """Of a run that ended before, or of one that is made now, in a process of its own."""
        if run not in self._results.outcomes:
            size = self.size(run.minutes)
            tokenizer = self._folder / f"{size.vocab_size}.tiktoken"
            if not tokenizer.exists():
                learn_vocabulary(self._data, size.vocab_size, tokenizer)
            shape = smaller(size) if run.side == "nanogpt smaller" else size
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                fields = settings(run, shape, self._data, tokenizer, self._threads)
                fields["out"] = str(Path(place) / "run")
                self._results.add(_in_a_process(fields, run))
        outcome = self._results.outcomes[run]
        print(f"{run}: {outcome.bits_per_byte:.4f} bits per byte, {outcome.steps:,} steps")
        return outcome

    def nanogpt(self, minutes: float, side: str, sweep: bool) -> Run:
        """Its best learning rate and batch, as a run to be repeated with other seeds."""
        first = Run(minutes, side, NANOGPT_RATE, NANOGPT_BATCH, FIRST_SEED)
        if not sweep:
            return first
        tried = [
            self.outcome(replace(first, rate=rate, batch=batch, seed=SWEEP_SEED))
            for rate in RATES
            for batch in BATCHES
        ]
        return replace(min(tried, key=lambda outcome: outcome.bits_per_byte).run, seed=FIRST_SEED)


def smaller(size: Size) -> Size:
    """The rung below, with the context of this one so that windows are the same."""
    below = SIZES[max(0, SIZES.index(size) - 1)]
    return replace(below, context_length=size.context_length)


def _in_a_process(fields: dict[str, Any], run: Run) -> Outcome:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train", "--one", json.dumps([fields, asdict(run)])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{run} failed:\n{done.stderr}")
    return outcome_of(json.loads(done.stdout.splitlines()[-1]))


def outcome_of(record: dict[str, Any]) -> Outcome:
    return Outcome(**{**record, "run": Run(**record["run"])})


def check(outcomes: Iterable[Outcome]) -> None:
    """Refuse to compare runs of unequal seconds or threads, or of unequal matrices where these
    should be the same. A run ends with the step in which its time is up."""
    outcomes = list(outcomes)
    for outcome in outcomes:
        asked = 60 * outcome.run.minutes
        allowed = SAME_SECONDS * asked + outcome.seconds / max(1, outcome.steps)
        if not asked <= outcome.seconds <= asked + allowed:
            raise SystemExit(f"{outcome.run} took {outcome.seconds:.1f} s of {asked:.1f}")
    if len({outcome.threads for outcome in outcomes}) > 1:
        raise SystemExit("not all runs had the same threads")
    same = {outcome.matrices for outcome in outcomes if outcome.run.side != "nanogpt smaller"}
    if len(same) > 1:
        raise SystemExit(f"the block matrices are not equal: {sorted(same)} numbers")


def summary(outcomes: Sequence[Outcome], default: Sequence[Outcome]) -> dict[str, Any]:
    """One side at one budget. `fewer`: how many percent fewer bits the default needs."""
    bits = [outcome.bits_per_byte for outcome in outcomes]
    mean = statistics.mean(bits)
    ours = statistics.mean(outcome.bits_per_byte for outcome in default)
    first = outcomes[0]
    return {
        "minutes": first.run.minutes,
        "side": first.run.side,
        "rate": first.run.rate,
        "batch": first.run.batch,
        "bits_per_byte": bits,
        "mean": mean,
        "spread": max(bits) - min(bits),
        "fewer": 100 * (1 - ours / mean),
        "steps": round(statistics.mean(outcome.steps for outcome in outcomes)),
        "tokens": round(statistics.mean(outcome.tokens for outcome in outcomes)),
        "tokens_per_second": statistics.mean(
            outcome.tokens / outcome.seconds for outcome in outcomes
        ),
        "matrices": first.matrices,
        "parameters": first.parameters,
    }


def table(summaries: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| minutes | side | bits per byte, each seed | mean | spread | default needs fewer | steps "
        "| tokens | tokens/s | matrices | parameters |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in summaries:
        seeds = ", ".join(f"{bits:.4f}" for bits in row["bits_per_byte"])
        fewer = "" if row["side"] == "default" else f"{row['fewer']:.1f} %"
        lines.append(
            f"| {row['minutes']:g} | {row['side']}, {row['rate']:g}, batch {row['batch']} "
            f"| {seeds} | {row['mean']:.4f} | {row['spread']:.4f} | {fewer} "
            f"| {row['steps']:,} | {row['tokens']:,} | {row['tokens_per_second']:,.0f} "
            f"| {row['matrices']:,} | {row['parameters']:,} |"
        )
    return "\n".join(lines)


def compare(
    measurement: Measurement, minutes: float, seeds: int, sweep: bool, with_smaller: bool
) -> list[dict[str, Any]]:
    """All runs of one budget, the sides in turns."""
    size = measurement.size(minutes)
    print(f"{minutes:g} minutes: {size}, context {size.context_length}")
    runs = [Run(minutes, "default", size.matrix_lr, size.batch_size, FIRST_SEED)]
    for side in ("nanogpt", "nanogpt smaller") if with_smaller else ("nanogpt",):
        runs.append(measurement.nanogpt(minutes, side, sweep))
    outcomes: dict[str, list[Outcome]] = {run.side: [] for run in runs}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for run in runs:
            outcomes[run.side].append(measurement.outcome(replace(run, seed=seed)))
    check(outcome for side in outcomes.values() for outcome in side)
    return [summary(side, outcomes["default"]) for side in outcomes.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--data", nargs="*", default=[], help="default: Python's own text")
    parser.add_argument("--results", type=Path, help="file to continue (default: a new one)")
    parser.add_argument("--sweep", action="store_true", help="tune nanoGPT's rate and batch")
    parser.add_argument("--smaller", action="store_true", help="and nanoGPT a size smaller")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
    if arguments.one:
        fields, run = json.loads(arguments.one)
        print(json.dumps(asdict(train_one(fields, Run(**run)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = Results(arguments.results or Path(folder) / "results.jsonl")
        measurement = Measurement(arguments.data, arguments.threads, results, Path(folder))
        summaries = [
            summary
            for minutes in arguments.minutes
            for summary in compare(
                measurement, minutes, arguments.seeds, arguments.sweep, arguments.smaller
            )
        ]
    print(table(summaries))
    print(json.dumps(summaries))


if __name__ == "__main__":
    main()
