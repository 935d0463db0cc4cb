"""Compares the bits per byte of the default recipe and of nanoGPT's after equal training time.

    python -m benchmarks.train [--minutes 2 10] [--seeds 3] [--threads N] [--results FILE]
                               [--sweep] [--smaller] [--data FILE ...]

For each budget `logitd train --minutes N` chooses a size, and nanoGPT's model and AdamW (the preset
`nanogpt`) get the same layers and width: the block matrices have the same shapes. Text, vocabulary,
threads and training time are the same. Every run is a real `train()` in a separate process, and the
two sides take turns. The sides differ only in the recipe: the shape outside the block matrices, the
context, the optimizers, the learning rates and their schedule, and the batch size. The default has
more parameters, because it has an untied head and value embeddings, which cost memory but hardly
any arithmetic. The table has the parameter counts of both sides.

Only the time of training is counted, not the time for the vocabulary, the choice of the size or the
last evaluation. Bits per byte are measured after the run, with the last weights, on the whole
validation text, in windows of the model's context.

Fairness to nanoGPT: its preset has the best of the learning rates and batch sizes that were tried
at width 128; `--sweep` first tries every pair of RATES and BATCHES at each budget, with a separate
seed, and takes the pair with the fewest bits per byte on the validation text. A recipe that learns
less from a token may be better off with a smaller model: `--smaller` adds nanoGPT at the next
smaller size.

Each run is a line in the results file as soon as it ends; a later call with the same file does not
repeat it. The last line printed is JSON. On a busy machine, or with budgets of seconds, the figures
are meaningless.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.trained import FIRST_SEED, Outcome, markdown, measured_here, outcome_of
from logitd.model.data.sources.open_text import open_text
from logitd.model.data.split import sides, split_text
from logitd.model.data.vocabulary import learn
from logitd.model.training.configuration.autosize import SIZES, Size
from logitd.model.training.configuration.config import TrainingConfig
from logitd.model.training.configuration.presets import PRESETS

RATES = (1e-3, 2e-3, 4e-3)
BATCHES = (4, 8)
"""Values that `--sweep` tries for nanoGPT."""
NANOGPT_RATE, NANOGPT_BATCH = 2e-3, 4
SWEEP_SEED = 1
NEVER = 10**9
"""Number of steps between evaluations, samples and checkpoints: more than any run has, because
evaluations, samples and checkpoints would take time from training."""
SAME_SECONDS = 0.02
"""Maximum relative excess of a run's seconds over its budget, not counting the time of one step."""


@dataclass(frozen=True)
class Run:
    """The settings of one training run."""

    minutes: float
    side: str  # "default", "nanogpt" or "nanogpt smaller"
    rate: float  # learning rate of the matrices
    batch: int
    seed: int


Finished = tuple[Run, Outcome]


def settings(run: Run, size: Size, data: Sequence[str], tokenizer: Path, threads: int) -> Any:
    """The run as fields of TrainingConfig."""
    fields = {
        "n_layer": size.n_layer,
        "n_head": size.n_head,
        "d_model": size.d_model,
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
    if run.side == "default":
        own = {"context_length": size.context_length, "weight_decay": size.weight_decay}
        return {**fields, **own}
    rates = {f"{part}_lr": run.rate for part in ("embedding", "head", "scalar")}
    return {**fields, **rates, "preset": "nanogpt"}


def learn_vocabulary(data: Sequence[str], vocab_size: int, path: Path) -> None:
    """Learn a vocabulary from the training part of the text only, as a run does, and write it for
    all runs."""
    text = open_text(data)
    split = split_text(text.documents, PRESETS["nanogpt"].recipe.val_fraction)
    pieces = (
        piece
        for document in text.documents
        for side, piece in sides(document, split)
        if side == "train"
    )
    learn(pieces, vocab_size).write_ranks(path)


class Measurement:
    """Runs on one text. `results` has a line of JSON for each chosen size and each finished run."""

    def __init__(self, data: Sequence[str], threads: int, results: Path, folder: Path) -> None:
        self._data, self._threads, self._results, self._folder = data, threads, results, folder
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        records = [json.loads(line) for line in lines]
        self._sizes = {each["minutes"]: Size(**each["size"]) for each in records if "size" in each}
        self._outcomes = {
            Run(**each["run"]): Outcome(**each["outcome"]) for each in records if "run" in each
        }

    def size(self, minutes: float) -> Size:
        """The size that `logitd train --minutes` chooses on this machine."""
        if minutes not in self._sizes:
            asked = TrainingConfig(minutes=minutes, threads=self._threads)
            size = self._sizes[minutes] = measured_here(asked).size
            self._append({"minutes": minutes, "size": asdict(size)})
        return self._sizes[minutes]

    def finished(self, run: Run) -> Finished:
        """The outcome of a run: from the results file, or by training in a separate process."""
        if run not in self._outcomes:
            size = self.size(run.minutes)
            tokenizer = self._folder / f"{size.vocab_size}.tiktoken"
            if not tokenizer.exists():
                learn_vocabulary(self._data, size.vocab_size, tokenizer)
            shape = smaller(size) if run.side == "nanogpt smaller" else size
            fields = settings(run, shape, self._data, tokenizer, self._threads)
            with tempfile.TemporaryDirectory(dir=self._folder) as place:
                outcome = outcome_of({**fields, "out": str(Path(place) / "run")})
            self._outcomes[run] = outcome
            self._append({"run": asdict(run), "outcome": asdict(outcome)})
        outcome = self._outcomes[run]
        print(f"{run}: {outcome.last:.4f} bits per byte, {outcome.steps:,} steps")
        return run, outcome

    def nanogpt(self, minutes: float, side: str, sweep: bool) -> Run:
        """nanoGPT's best learning rate and batch size, as a run to repeat with other seeds."""
        first = Run(minutes, side, NANOGPT_RATE, NANOGPT_BATCH, FIRST_SEED)
        if not sweep:
            return first
        tried = [
            self.finished(replace(first, rate=rate, batch=batch, seed=SWEEP_SEED))
            for rate in RATES
            for batch in BATCHES
        ]
        return replace(min(tried, key=lambda finished: finished[1].last)[0], seed=FIRST_SEED)

    def _append(self, record: dict[str, Any]) -> None:
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def smaller(size: Size) -> Size:
    """The next smaller size."""
    return SIZES[max(0, SIZES.index(size) - 1)]


def check(finished: Iterable[Finished]) -> None:
    """Exit with an error if runs differ in seconds, threads or matrices; only a smaller model may
    have other matrices. A run may exceed its time by one step."""
    finished = list(finished)
    for run, outcome in finished:
        asked = 60 * run.minutes
        allowed = SAME_SECONDS * asked + outcome.seconds / max(1, outcome.steps)
        if not asked <= outcome.seconds <= asked + allowed:
            raise SystemExit(f"{run} took {outcome.seconds:.1f} s instead of {asked:.1f} s")
    if len({outcome.threads for _, outcome in finished}) > 1:
        raise SystemExit("the runs used different numbers of threads")
    same = {outcome.matrices for run, outcome in finished if run.side != "nanogpt smaller"}
    if len(same) > 1:
        raise SystemExit(
            f"the block matrices of the runs differ in their parameter counts: {sorted(same)}"
        )


def summary(finished: Sequence[Finished], default: Sequence[Finished]) -> dict[str, Any]:
    """Summarize the runs of one side at one budget. `fewer` is the percentage by which the default
    needs fewer bits per byte than this side."""
    run, outcomes = finished[0][0], [outcome for _, outcome in finished]
    bits = [outcome.last for outcome in outcomes]
    mean, ours = statistics.mean(bits), statistics.mean(outcome.last for _, outcome in default)
    return {
        "minutes": run.minutes,
        "side": run.side,
        "rate": run.rate,
        "batch": run.batch,
        "bits_per_byte": bits,
        "mean": mean,
        "spread": max(bits) - min(bits),
        "fewer": 100 * (1 - ours / mean),
        "steps": round(statistics.mean(outcome.steps for outcome in outcomes)),
        "tokens": round(statistics.mean(outcome.tokens for outcome in outcomes)),
        "tokens_per_second": statistics.mean(each.tokens / each.seconds for each in outcomes),
        "matrices": outcomes[0].matrices,
        "parameters": outcomes[0].parameters,
    }


def compare(
    measurement: Measurement, minutes: float, seeds: int, sweep: bool, with_smaller: bool
) -> list[dict[str, Any]]:
    """Train all sides with one budget. The sides take turns."""
    size = measurement.size(minutes)
    print(f"{minutes:g} minutes: {size}, context {size.context_length}")
    runs = [Run(minutes, "default", size.matrix_lr, size.batch_size, FIRST_SEED)]
    for side in ("nanogpt", "nanogpt smaller") if with_smaller else ("nanogpt",):
        runs.append(measurement.nanogpt(minutes, side, sweep))
    finished: dict[str, list[Finished]] = {run.side: [] for run in runs}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for run in runs:
            finished[run.side].append(measurement.finished(replace(run, seed=seed)))
    check(each for side in finished.values() for each in side)
    return [summary(side, finished["default"]) for side in finished.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, nargs="+", default=[2.0, 10.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0: all processors")
    parser.add_argument("--data", nargs="*", default=[], help="default: Python's own text")
    parser.add_argument("--results", type=Path, help="file to continue (default: a new one)")
    parser.add_argument("--sweep", action="store_true", help="tune nanoGPT's rate and batch")
    parser.add_argument("--smaller", action="store_true", help="and nanoGPT a size smaller")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or Path(folder) / "results.jsonl"
        measurement = Measurement(arguments.data, arguments.threads, results, Path(folder))
        summaries = [
            row
            for minutes in arguments.minutes
            for row in compare(
                measurement, minutes, arguments.seeds, arguments.sweep, arguments.smaller
            )
        ]
    print(markdown(summaries))
    print(json.dumps(summaries))


if __name__ == "__main__":
    main()
