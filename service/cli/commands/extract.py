"""`logitd extract`: computes values for each token of a text with a checkpoint, and writes them to
files. Running the same command again continues an extraction that was killed."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.data.errors import DataError
from logitd.model.data.sources.download import Downloaded, Downloading
from logitd.model.data.sources.read_options import ReadOptions
from logitd.model.device import DeviceError
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.run import Extracted, ExtractionRequest, Progress, Surveyed, extract
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError
from logitd.model.inference.options import ComputeOptions
from logitd.model.plural import pluralize
from logitd.model.training.events import duration, line
from logitd.service.cli.busy import busy_notice
from logitd.service.cli.terminal import ProgressLine, say, tell
from logitd.service.settings.tools import ExtractSettings

ERRORS = CheckpointError, DataError, DeviceError, ExtractionError, InvalidRequest, KernelError


class Reporter:
    """Prints progress on stderr, and remembers whether the user interrupted the command."""

    def __init__(self) -> None:
        self.interrupted = False
        self.lines = ProgressLine(sys.stderr, "logitd extract: ")

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """In this context, SIGINT raises KeyboardInterrupt. The extraction's next event raises it
        again, in case it was first raised in a finalizer: Python ignores exceptions there, and Ray
        has many finalizers."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def __call__(self, event: Surveyed | Progress | Downloading | Downloaded, /) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        show = self.lines.show if isinstance(event, Progress | Downloading) else self.lines.say
        show(_line(event))


def run(settings: ExtractSettings) -> int:
    if refusal := _unclear(settings):
        tell("extract", refusal)
        return 2
    reporter = Reporter()
    lines = reporter.lines
    with reporter.interrupts():
        if notice := busy_notice():
            lines.say(notice)
        try:
            result = _extract(settings, reporter)
        except (*ERRORS, KeyboardInterrupt) as error:
            # An interrupt may make Ray raise its own error.
            if reporter.interrupted or isinstance(error, KeyboardInterrupt):
                lines.say(
                    f"stopped; if {settings.out} exists, the same command continues from there"
                )
                return 130
            lines.say(str(error))
            return 1
    lines.end()
    if settings.as_json:
        facts = {**asdict(result), "path": str(result.path)}
        facts["tokens_per_second"] = result.tokens_per_second
        say(json.dumps(facts, allow_nan=False))
    else:
        say(_summary(result))
    return 0


def _extract(settings: ExtractSettings, reporter: Reporter) -> Extracted:
    return extract(
        settings.checkpoint,
        settings.data,
        settings.out,
        ExtractionRequest(
            stages=settings.stages,
            top_k=settings.top_k or 0,
            lens=settings.lens,
            stride=settings.stride,
            shard_tokens=settings.shard_tokens,
            stored_dtype=settings.stored_dtype,
            sample=settings.sample,
            sample_seed=settings.sample_seed,
        ),
        options=ComputeOptions.of(settings),
        ray=settings.ray or None,
        ray_workers=settings.ray_workers,
        reading=ReadOptions.of(settings),
        log=reporter.lines.say,
        tell=reporter,
    )


def _unclear(settings: ExtractSettings) -> str:
    """The error message if the command line does not request exactly one kind of value; otherwise
    ""."""
    chosen = {
        "--logprobs": settings.logprobs,
        "--top-k": settings.top_k is not None and not (settings.logprobs or settings.lens),
        "--lens": settings.lens,
        "--stages": bool(settings.stages),
    }
    given = [flag for flag, is_given in chosen.items() if is_given]
    if len(given) == 1:
        return ""
    hint = " (--lens includes --logprobs: they are the values of the last layer)"
    return (
        "give one of --logprobs (or --top-k K, which includes it), --lens and --stages NAMES; "
        + (f"{' and '.join(given)} are given" if given else "none of them is given")
        + (hint if given == ["--logprobs", "--lens"] else "")
    )


def _summary(result: Extracted) -> str:
    rows = (
        f"{_counted(result.rows, 'token')} of {_counted(result.documents, 'document')} in "
        f"{_counted(result.shards, 'shard')}"
    )
    if not result.tokens:
        return f"{result.path}: {rows}; all of them were already computed"
    rate = f"{result.tokens_per_second:,.0f} tok/s"
    now = "" if result.tokens >= result.rows else f", {result.tokens:,} of them now"
    return f"{result.path}: {rows}{now}, in {result.seconds:,.1f} s, {rate}"


def _line(event: Surveyed | Progress | Downloading | Downloaded) -> str:
    match event:
        case Surveyed(data, shards, rows):
            there = f"; {_counted(rows, 'token')} in {_counted(shards, 'shard')} are finished"
            return f"{_counted(data.documents, 'document')}, {_counted(data.bytes, 'byte')}" + (
                there if shards else ""
            )
        case Progress():
            return (
                f"{event.share:4.0%}  {event.tokens:,} tokens  {event.shards:,} shards  "
                f"{event.tokens_per_second:,.0f} tok/s  {duration(event.seconds_left)} left"
            )
        case Downloading() | Downloaded():
            return line(event)


def _counted(count: int, noun: str) -> str:
    return pluralize(count, noun, ",")
