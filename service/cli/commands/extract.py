"""`logitd extract`: every token of a text through a checkpoint, into files, and on after a kill."""

import contextlib
import json
import signal
import sys
import time
from dataclasses import asdict
from types import FrameType
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.data.errors import DataError
from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.device import DeviceError
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.on_ray import Cluster
from logitd.model.extraction.run import Extracted, ExtractionRequest, Progress, Surveyed, extract
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.options import ComputeOptions
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.terminal import redraw, say
from logitd.service.settings.extract import ExtractSettings

ERRORS = (
    CheckpointError,
    DataError,
    DeviceError,
    ExtractionError,
    InvalidRequest,
    KernelError,
)
SECONDS_BETWEEN_LINES = 10.0
"""Of progress, where it is not drawn in place."""


class Interrupts:
    """SIGINT as KeyboardInterrupt, and once more with the next event where it was lost: Python
    drops what is raised in a finalizer, and on a cluster there are many of them.

    came  whether there was one: what fails afterwards may fail because of it
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def check(self) -> None:
        """Raises KeyboardInterrupt if there was one."""
        if self.came:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def __enter__(self) -> "Interrupts":
        with contextlib.suppress(ValueError):  # only the main thread takes signals
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class ProgressLines:
    """Says on stderr how far it is: on one line that is redrawn on a terminal, elsewhere on a line
    every few seconds."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._in_place = sys.stderr.isatty()
        self._open_line = False
        self._next = 0.0

    @property
    def interrupted(self) -> bool:
        return self._interrupts.came

    def __call__(self, event: Surveyed | Progress | Downloading | Downloaded, /) -> None:
        self._interrupts.check()
        text = _line(event)
        if isinstance(event, Progress | Downloading):
            if self._in_place:
                redraw(text, sys.stderr)
                self._open_line = True
                return
            if (now := time.monotonic()) < self._next:
                return
            self._next = now + SECONDS_BETWEEN_LINES
        self.say(text)

    def say(self, text: str) -> None:
        """A line of its own."""
        self.end()
        say(f"logitd extract: {text}", file=sys.stderr)

    def end(self) -> None:
        """Leave the line that is redrawn."""
        if self._open_line:
            print(file=sys.stderr)
            self._open_line = False


def run(settings: ExtractSettings) -> int:
    if refusal := _unclear(settings):
        say(f"logitd extract: {refusal}", file=sys.stderr)
        return 2
    with Interrupts() as interrupts:
        progress = ProgressLines(interrupts)
        if notice := busy_notice():
            progress.say(notice)
        return _run(settings, progress)


def _run(settings: ExtractSettings, progress: ProgressLines) -> int:
    try:
        result = extract(
            settings.checkpoint,
            settings.data,
            settings.out,
            ExtractionRequest(
                stages=settings.stages,
                top_k=settings.top_k or 0,
                lens=settings.lens,
                stride=settings.stride,
                shard_tokens=settings.shard_tokens,
            ),
            options=ComputeOptions.of(settings),
            cluster=Cluster(settings.ray, settings.ray_workers) if settings.ray else None,
            reading=ReadOptions.of(settings),
            log=progress.say,
            report=progress,
            tell=progress,
        )
    except ERRORS as error:
        if progress.interrupted:  # Ray answers an interrupt with an error of its own
            return _stopped(settings, progress)
        progress.say(str(error))
        return 1
    except KeyboardInterrupt:
        return _stopped(settings, progress)
    progress.end()
    say(json.dumps(facts(result), allow_nan=False) if settings.as_json else _summary(result))
    return 0


def _stopped(settings: ExtractSettings, progress: ProgressLines) -> int:
    progress.say(f"stopped; the same command goes on, if {settings.out} was begun")
    return 130


def _unclear(settings: ExtractSettings) -> str:
    """Why it is not clear what is to be extracted; nothing if it is."""
    asked = {
        "--logprobs": settings.logprobs,
        "--top-k": settings.top_k is not None and not (settings.logprobs or settings.lens),
        "--lens": settings.lens,
        "--stages": bool(settings.stages),
    }
    given = [flag for flag, is_given in asked.items() if is_given]
    if len(given) == 1:
        return ""
    hint = " (the last layer's logprobs of --lens are those of --logprobs)"
    return (
        "give either --logprobs (or --top-k K, which includes them) or --lens or --stages NAMES; "
        + (f"{' and '.join(given)} are given" if given else "none is given")
        + (hint if given == ["--logprobs", "--lens"] else "")
    )


def facts(result: Extracted) -> dict[str, object]:
    """What --json prints."""
    return {
        **asdict(result),
        "path": str(result.path),
        "tokens_per_second": result.tokens_per_second,
    }


def _summary(result: Extracted) -> str:
    rows = (
        f"{pluralize(result.rows, 'token')} of {pluralize(result.documents, 'document')} in "
        f"{pluralize(result.shards, 'shard')}"
    )
    if not result.tokens:
        return f"{result.path}: {rows}; nothing was left to compute"
    rate = f"{result.tokens_per_second:,.0f} tok/s"
    now = "" if result.tokens == result.rows else f", {result.tokens:,} of them now"
    return f"{result.path}: {rows}{now}, in {result.seconds:,.1f} s, {rate}"


def _line(event: Surveyed | Progress | Downloading | Downloaded) -> str:
    match event:
        case Surveyed(data, shards, rows):
            there = f"; {pluralize(rows, 'token')} in {pluralize(shards, 'shard')} are there"
            return f"{pluralize(data.documents, 'document')}, {pluralize(data.bytes, 'byte')}" + (
                there if shards else ""
            )
        case Progress():
            return (
                f"{event.share:4.0%}  {event.tokens:,} tokens  {event.shards:,} shards  "
                f"{event.tokens_per_second:,.0f} tok/s  {_duration(event.seconds_left)} left"
            )
        case Downloading(url, done, total):
            share = "" if total is None else f" of {total / 1e6:,.1f}"
            return f"downloading {url}: {done / 1e6:,.1f}{share} MB"
        case Downloaded(url, size):
            return f"{url}: {size:,} bytes"


def pluralize(count: int, noun: str) -> str:
    """1 token, 2 tokens, 1,000 tokens."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(int(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
