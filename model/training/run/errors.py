"""Errors that end a run: what went wrong, what is safe on the disk, and what to do.

Raises them for a disk that cannot be written to, before the first step and later, and for training
that diverged. Does not detect divergence (`model/training/stopping/divergence.py`).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from logitd.model.checkpoint.run_folder import is_run
from logitd.model.training.configuration.config import TrainingError
from logitd.model.training.run.directory import RunDirectory

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota, a limit on the size of a file."""


@contextmanager
def saving(directory: RunDirectory, step: int) -> Iterator[None]:
    """Turns an error of the disk into a TrainingError."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"step {step} could not be saved: {error}. {_how_to_go_on(directory, error)}"
        ) from error


@contextmanager
def preparing(directory: RunDirectory) -> Iterator[None]:
    """Turns an error of the disk before the first step into a TrainingError."""
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        way_out = "make room there, or choose" if full else "choose"
        raise TrainingError(
            f"the run cannot be prepared in {directory.path}: {error.strerror or error}; {way_out} "
            "another --out"
        ) from error


def diverged(directory: RunDirectory, reason: str) -> TrainingError:
    """The error for training that went wrong for this `reason`."""
    return TrainingError(f"{reason}. {last_good(directory)} Try lower learning rates or a warmup")


def last_good(directory: RunDirectory) -> str:
    """What is safe on the disk, as a sentence."""
    step = directory.linked_step(directory.latest)
    if step is None:
        return "Nothing was saved before."
    return f"The last good checkpoint is {directory.checkpoint(step)}."


def _how_to_go_on(directory: RunDirectory, error: OSError) -> str:
    if not is_run(directory.path):
        return f"{directory.path} was removed meanwhile: there is nothing left to resume"
    mended = "With room on the disk" if error.errno in NO_SPACE else "Once that is mended"
    return f"{last_good(directory)} {mended}, --resume goes on"
