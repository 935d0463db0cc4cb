"""RunDirectory: the files of a training run, and errors about them.

  run.json         the user's settings, and the resolved ones
  data/            the tokenized text (`model/data/prepare.py`)
  metrics.jsonl    one JSON object per line: {"kind": "train" | "eval", "step": ..., ...}
  loss.png         the curves, redrawn at each evaluation
  samples.txt      samples of the model, oldest first
  step-000500/     checkpoints, ready to be served
  history/         checkpoints that are never removed, if `keep_every` is set
  base/            the checkpoint that adapters are trained on, if it is another run's
  latest, best     links to the newest checkpoint and to the one with the lowest validation loss
  state/state.pt   the trainer's own state, for an exact resume
  run.lock         names the process that is training the run

Files are written under a temporary name and renamed, so a kill at any moment leaves a directory
that can be served and resumed. Only the main process of one trainer writes a run, and it holds the
lock. Readers need no lock.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from logitd.model.checkpoint.card_and_curve import METRICS, SAMPLE, SAMPLES
from logitd.model.checkpoint.run_folder import (
    BASE,
    BEST,
    HISTORY,
    LATEST,
    LOCK,
    RUN,
    STEP,
    checkpoints_in,
    is_run,
)
from logitd.model.data.shards import DATA
from logitd.model.files import CONFIG_BYTES, parse_json, read_regular, write_whole
from logitd.model.folder_lock import FolderLock, FolderLocked
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.configuration.resolve import ResolvedTraining
from logitd.model.training.run.metrics_log import read_metrics
from logitd.model.transformer.config import ConfigError
from logitd.model.transformer.lora import LoraError

PLOT = "loss.png"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exceeded quota, and a file that exceeds the size limit."""


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = path / DATA
        self.base = path / BASE
        self.state = path / "state" / "state.pt"
        self.plot = path / PLOT
        self.history = path / HISTORY
        self.latest = path / LATEST
        self.best = path / BEST
        self._lock: FolderLock | None = None

    @classmethod
    def create(cls, path: Path) -> "RunDirectory":
        """Create and lock a run. Raises TrainingError if the directory is not empty, if another
        process is training in it, or if it cannot be created."""
        directory = cls(path)
        directory.require_free()  # before `lock`, which writes a file
        with directory.preparing():
            path.mkdir(parents=True, exist_ok=True)
            directory.lock()
        try:
            _require_empty(path)
        except BaseException:
            directory.release()
            raise
        return directory

    def require_free(self) -> None:
        """Raise TrainingError if the directory exists and is not empty, if another process is
        training in it, or if it cannot be read."""
        path = self.path
        with self.preparing():
            if path.exists() and not path.is_dir():
                raise TrainingError(
                    f"{path} already exists and is not a folder: choose another --out"
                )
            if (path / LOCK).exists():
                self.lock()
                self.release()
            if path.is_dir():
                _require_empty(path)

    def discard(self) -> None:
        """Remove a run that could not be prepared. A linked folder, and one that cannot be removed,
        such as a mount point, is left empty, so that the same command works later. A folder that
        has replaced the run's is another process's, and stays."""
        if not self._replaced():
            folder = self.path.resolve()
            shutil.rmtree(folder, ignore_errors=True)
            if self.path.is_symlink():
                folder.mkdir(exist_ok=True)
        self.release()

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """Open an existing run without locking it."""
        if not is_run(path):
            raise TrainingError(f"there is nothing to resume: {path} has no {RUN}")
        return cls(path)

    def lock(self) -> None:
        """Lock the run until `release` or the end of this process. Raises TrainingError if another
        trainer holds the lock, and OSError if the lock file cannot be written."""
        try:
            self._lock = FolderLock(self.path / LOCK)
        except FolderLocked as error:
            raise TrainingError(
                f"{self.path} is being trained by {error.owner}: wait until it has ended, stop it "
                "(SIGTERM lets it save), or choose another --out"
            ) from error

    def _replaced(self) -> bool:
        return self._lock is not None and self._lock.replaced

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Convert an OSError that occurs in the `with` block, before the first step, to a
        TrainingError."""
        try:
            yield
        except OSError as error:
            way_out = "make room there, or choose" if error.errno in NO_SPACE else "choose"
            raise TrainingError(
                f"the run cannot be prepared in {self.path}: {error.strerror or error}; {way_out} "
                "another --out"
            ) from error

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Convert an OSError that occurs in the `with` block to a TrainingError that says how to
        continue. Raises TrainingError before the block if the run's folder was replaced."""
        moved = "if you moved it, continue with --resume and its new path as --out"
        try:
            if self._replaced():
                raise TrainingError(
                    f"step {step} could not be saved: another process made a new folder "
                    f"{self.path} during training, so this run's folder was removed or moved: "
                    f"{moved}"
                )
            yield
        except OSError as error:
            way_out = f"{self.path} was removed or moved during training: {moved}"
            if is_run(self.path):
                fix = "Free disk space" if error.errno in NO_SPACE else "Fix the error"
                way_out = f"{self.last_good()} {fix}, then continue with --resume"
            raise TrainingError(f"step {step} could not be saved: {error}. {way_out}") from error

    def diverged(self, reason: str) -> TrainingError:
        """The error for a run that diverged for this `reason`."""
        return TrainingError(f"{reason}. {self.last_good()} Try lower learning rates or a warmup")

    def last_good(self) -> str:
        """A sentence that names the newest checkpoint."""
        step = self.linked_step(self.latest)
        if step is None:
            return "Nothing was saved before."
        return f"The last good checkpoint is {self.checkpoint(step)}."

    def write_training(self, training: ResolvedTraining) -> None:
        write_whole(self.path / RUN, (json.dumps(training.to_dict(), indent=2) + "\n").encode())

    def read_training(self) -> ResolvedTraining:
        """Read run.json. Raises TrainingError if it is damaged."""
        path = self.path / RUN
        try:
            document = parse_json(read_regular(path, CONFIG_BYTES))
        except (OSError, ValueError) as error:
            raise TrainingError(f"{path} cannot be read: {error}") from error
        try:
            return ResolvedTraining.from_dict(document)
        except (ConfigError, LoraError, TrainingError) as error:
            reason = " ".join(str(error).split())
            raise TrainingError(f"{path} is not a valid description of a run: {reason}") from error

    def checkpoint(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def checkpoints(self) -> dict[int, Path]:
        return checkpoints_in(self.path)

    def kept(self, step: int) -> Path:
        """The path of this step's checkpoint in the history."""
        return self.history / self.checkpoint(step).name

    def linked_step(self, link: Path) -> int | None:
        """The step that `latest` or `best` points to; None if that checkpoint does not exist."""
        match = STEP.fullmatch(os.readlink(link)) if link.is_symlink() else None
        return int(match[1]) if match and link.exists() else None

    def prune(self, keep: int, state_step: int | None) -> None:
        """Remove all checkpoints except the newest `keep`, the linked ones, and the checkpoint of
        step `state_step`, from which a resumed run would continue."""
        kept = {self.linked_step(self.latest), self.linked_step(self.best), state_step}
        for step, path in list(self.checkpoints().items())[:-keep]:
            if step not in kept:
                _remove(path)

    def append(self, record: Mapping[str, Any]) -> None:
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The valid records of the log. Raises TrainingError."""
        return read_metrics(self.path / METRICS)[0]

    def append_sample(self, step: int, prompt: str, text: str) -> None:
        with (self.path / SAMPLES).open("a", encoding="utf-8") as file:
            file.write(f"=== step {step}\n{prompt}{text}\n\n")

    def rewind(self, step: int) -> tuple[str, ...]:
        """Remove everything written after the state of `step`, because it will be written again.
        Also remove incomplete files of a killed process, and damaged lines of the log. Returns
        notes on these lines. Raises TrainingError if the log cannot be read."""
        records, notes = read_metrics(self.path / METRICS)
        state = self.state.parent.glob(f".{self.state.name}.*")
        steps = (*self.path.glob(".step-*"), *self.history.glob(".step-*"))
        for left in {*steps, *self.path.glob(".*.part"), *state}:
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
        kept = [record for record in records if record["step"] <= step]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write_whole(self.path / METRICS, text.encode())
        self._cut_samples(step if step in self.checkpoints() else step - 1)
        self.link_newest_and_best(last=step)  # before checkpoints are removed
        for later, path in (*self.checkpoints().items(), *checkpoints_in(self.history).items()):
            if later > step:
                _remove(path)
        return notes

    def _cut_samples(self, last: int) -> None:
        path = self.path / SAMPLES
        if not path.is_file():
            return
        text = path.read_bytes().decode(errors="surrogateescape")
        for head in SAMPLE.finditer(text):
            if int(head[1]) > last:
                write_whole(path, text[: head.start()].encode(errors="surrogateescape"))
                return

    def link_newest_and_best(self, last: int | None = None) -> None:
        """Link `latest` and `best` to the newest and the best of the existing checkpoints, up to
        step `last`."""
        steps = [step for step in self.checkpoints() if last is None or step <= last]
        scores = {
            record["step"]: record["val_loss"]
            for record in self.metrics()
            if record["kind"] == "eval" and record["step"] in steps
        }
        self._link(self.latest, steps[-1] if steps else None)
        self._link(self.best, min(scores, key=scores.__getitem__) if scores else None)

    def _link(self, link: Path, step: int | None) -> None:
        if step is None:
            link.unlink(missing_ok=True)
            return
        if link.is_dir() and not link.is_symlink():
            raise TrainingError(
                f"{link} is a folder instead of a link to a checkpoint, because the run was copied "
                f"without links: remove its folders {BEST} and {LATEST}, which are copies"
            )
        aside = link.with_name(f".{link.name}.part")
        aside.unlink(missing_ok=True)
        aside.symlink_to(self.checkpoint(step).name)
        aside.replace(link)


def _require_empty(path: Path) -> None:
    """Raise TrainingError if a folder contains anything except the lock."""
    if all(child.name == LOCK for child in path.iterdir()):
        return
    if not (path / RUN).exists():
        raise TrainingError(
            f"{path} already exists and has no {RUN}: remove it if it is left over from a run "
            "that was killed while preparing its text, otherwise choose another --out"
        )
    raise TrainingError(f"{path} already exists: resume it with --resume, or choose another --out")


def _remove(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that a folder with a checkpoint's name is always
    complete."""
    aside = path.with_name(f".{path.name}.gone")
    path.rename(aside)
    shutil.rmtree(aside)
