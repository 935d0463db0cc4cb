"""Command line: writes the settings of a run as the flags of `logitd train`.

`service/cli/flags.py` parses these flags to the same settings.
"""

import shlex
from collections.abc import Iterator
from typing import Any

from logitd.model.training.configuration.config import TrainingConfig

OMITTED = frozenset({"out", "resume", "device", "threads", "shard", "data_licence", "tensorboard"})
"""Fields that belong to the machine or to the run's folder, not to the model."""


def command(config: TrainingConfig) -> str:
    """The command, quoted for a shell, that repeats a run: its preset, and the fields that the user
    set, except those in `OMITTED`."""
    given = {"preset": config.preset, **config.given()}
    words = ["logitd", "train"]
    for name in TrainingConfig.model_fields:
        if name in given and name not in OMITTED:
            words += _words(name, given[name])
    return shlex.join(words)


def _words(name: str, value: Any) -> Iterator[str]:
    """The words that set a field to a value."""
    word = "from" if name == "from_checkpoint" else name.replace("_", "-")
    kind = TrainingConfig.model_fields[name].annotation
    if kind in (bool, bool | None):
        yield f"--{word}" if value else f"--no-{word}"
        return
    for item in value if kind == tuple[str, ...] else (value,):
        text = written(item)
        if text.startswith("-"):  # after a space, it could be read as another flag
            yield f"--{word}={text}"
        else:
            yield from (f"--{word}", text)


def shown(value: Any) -> str:
    """A value in a message."""
    return "not set" if value is None or value == () else written(value)


def written(value: Any) -> str:
    """A value as its flag takes it. The items of a list are separated by commas. An item None is a
    window over all positions."""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    return "all" if value is None else str(value)
