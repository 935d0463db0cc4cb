"""Report: what `logitd bench` found, as one JSON object and as lines for a terminal.

The lines are written from the object, so the two cannot differ. Rates are per second, times in
milliseconds, shares 1 for all of it; what could not be measured is null. Keys are for programs:
they are added to, not renamed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from logitd.model.benchmark.in_process import EngineFigures
from logitd.model.benchmark.machine import Machine, Surroundings, best_of
from logitd.model.benchmark.profile import Profile
from logitd.model.benchmark.spread import Spread
from logitd.model.benchmark.work import Limit, limit
from logitd.model.benchmark.workload import Workload
from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.version import VERSION
from logitd.service.cli.commands.benchmark.load import DecodeLoad, Failure, HttpFigures, PrefillLoad
from logitd.service.client import Info

NONE = "-"


@dataclass(frozen=True, slots=True)
class HttpMeasured:
    """A server under load. `unlike` says in which ways it does not compute as the engine here
    does; where it says anything, shares of the engine's speed and of its limits mean nothing."""

    url: str
    info: Info
    unlike: tuple[str, ...]
    figures: HttpFigures


@dataclass(frozen=True, slots=True)
class Measured:
    """All of one run. `machines` as measured before everything else and after it; `date` in UTC,
    ISO 8601; `http` None where that was skipped."""

    date: str
    surroundings: Surroundings
    checkpoint: CheckpointInfo
    parameters: int
    decoding: str
    quantize: str
    kv_cache_dtype: str
    workload: Workload
    machines: tuple[Machine, ...]
    engine: EngineFigures
    http: HttpMeasured | None


@dataclass(frozen=True, slots=True)
class Profiled:
    """All of one run of `--profile`: what `Measured` has of the same names, and the profiles of
    each way of decoding by its name."""

    date: str
    surroundings: Surroundings
    checkpoint: CheckpointInfo
    parameters: int
    quantize: str
    kv_cache_dtype: str
    workload: Workload
    machines: tuple[Machine, ...]
    profiles: Mapping[str, tuple[Profile, ...]]


def summary(run: Measured) -> dict[str, Any]:
    """The JSON object."""
    machine = best_of(*run.machines)
    prefill, decode = _engine_prefill(run, machine), _engine_decode(run, machine)
    return {
        **about(run),
        "engine": {"prefill": prefill, "decode": decode},
        "http": None if run.http is None else _http(run.http, prefill, decode),
    }


def about(run: Measured | Profiled) -> dict[str, Any]:
    """What was measured, on what."""
    return {
        "logitd": VERSION,
        "date": run.date,
        **asdict(run.surroundings),
        **({"decoding": run.decoding} if isinstance(run, Measured) else {}),
        "quantize": run.quantize,
        "kv_cache_dtype": run.kv_cache_dtype,
        "checkpoint": {
            "name": run.checkpoint.name,
            "step": run.checkpoint.training.step,
            "weights_sha256": run.checkpoint.weights_sha256,
            "parameters": run.parameters,
        },
        "workload": {
            "batches": list(run.workload.batches),
            "prompt_tokens": run.workload.prompt_tokens,
            "tokens": run.workload.tokens,
            "rounds": run.workload.rounds,
        },
        "machine": {
            **_machine(best_of(*run.machines)),
            "measured": [_machine(machine) for machine in run.machines],
        },
    }


def lines(report: Mapping[str, Any]) -> list[str]:
    """What a terminal shows of a summary."""
    shown = [
        *heading(report),
        *table("prefill, in process", "prompts", report["engine"]["prefill"], _LIMITED),
        *table("decode, in process", "batch", report["engine"]["decode"], _LIMITED | _STEP),
    ]
    if report["http"] is not None:
        shown += _http_lines(report["http"])
    return [*shown, *_notes(report)]


def heading(report: Mapping[str, Any]) -> list[str]:
    """The machine, the model and the load; how is decoded where all of it is decoded alike."""
    machine, checkpoint, workload = report["machine"], report["checkpoint"], report["workload"]
    decoding = [("decoding", str(report["decoding"]))] if "decoding" in report else []
    return aligned(
        [
            ("machine", f"{report['processor']}, {report['device']}, {report['threads']} threads"),
            ("versions", f"logitd {report['logitd']}, torch {report['torch']}, "
                         f"Python {report['python']}"),
            ("memory", f"{machine['read_bytes_per_second'] / 1e9:,.1f} GB/s, read by a sum"),
            ("products", f"{machine['matrix_operations_per_second'] / 1e9:,.0f} GFLOP/s "
                         f"of matrices in {report['dtype']}"),
            ("model", f"{checkpoint['name']}, {checkpoint['parameters']:,} parameters, "
                      f"{report['dtype']}"),
            *decoding,
            ("load", f"random prompts of {workload['prompt_tokens']} tokens, "
                     f"{workload['tokens']} tokens each, {workload['rounds']} rounds"),
        ],
        left=2,
    )  # fmt: skip


def _http_lines(http: Mapping[str, Any]) -> list[str]:
    server = http["server"]
    shown = [
        *table("prefill, over HTTP", "prompts", http["prefill"], _COMPARED),
        *table("decode, over HTTP", "batch", http["decode"], _COMPARED | _WAITS),
        "",
        f"server: {http['url']}, {server['model']}, {server['device']}, {server['dtype']}, "
        f"{server['threads']} threads, {server['decoding']}",
    ]
    for difference in http["unlike_the_engine"]:
        shown.append(f"not compared with the engine, because {difference}")
    for kind in ("prefill", "decode"):
        for case in http[kind]:
            for error in case["errors"]:
                name = f"{kind} of {case.get('batch', case.get('prompts'))}"
                shown.append(f"{name}: {error['count']} x {error['kind']}: {error['message']}")
    return shown


def _notes(report: Mapping[str, Any]) -> Iterable[str]:
    rows = [*report["engine"]["prefill"], *report["engine"]["decode"]]
    if any(row["share_of_limit"] > 1 for row in rows):
        yield (
            "above 100 %: what is read comes from the processor's caches, not from memory, or "
            "weights are compressed and take fewer bytes than those of their dtype"
        )
    if report["quantize"] != "none":
        yield f"{report['quantize']}: the rate of such products is not known, memory is the limit"
    http = report["http"]
    if http is not None and any(
        row["tokens_per_second"] is None and not row["errors"] for row in http["decode"]
    ):
        yield "no rate: the first stream ended before the last began; raise --tokens"


# From figures to JSON


def _machine(machine: Machine) -> dict[str, float]:
    return {
        "read_bytes_per_second": machine.read_bandwidth,
        "matrix_operations_per_second": machine.matrix_rate,
    }


def _engine_prefill(run: Measured, machine: Machine) -> list[dict[str, Any]]:
    return [
        {
            "prompts": load.prompts,
            "tokens_per_second": load.tokens_per_second,
            **_against(
                limit(load.work, machine),
                load.prompts * run.workload.prompt_tokens,
                load.tokens_per_second,
            ),
        }
        for load in run.engine.prefill
    ]


def _engine_decode(run: Measured, machine: Machine) -> list[dict[str, Any]]:
    return [
        {
            "batch": load.batch,
            "tokens_per_second": load.tokens_per_second,
            **_against(limit(load.work, machine), load.batch, load.tokens_per_second),
            "steps": load.steps,
            "step_ms": _milliseconds(load.step),
            "read_bytes_per_step": load.work.read_bytes,
            "matrix_operations_per_step": load.work.operations,
        }
        for load in run.engine.decode
    ]


def _against(least: Limit, tokens: int, rate: float) -> dict[str, Any]:
    """A rate beside the limit of computing `tokens`."""
    limited = tokens / least.seconds
    return {
        "limit_tokens_per_second": limited,
        "limited_by": least.by,
        "share_of_limit": rate / limited,
    }


def _http(
    http: HttpMeasured, prefill: Sequence[Mapping[str, Any]], decode: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    comparable = not http.unlike
    info = http.info
    return {
        "url": http.url,
        "server": {
            "version": info.version,
            "model": info.model,
            "weights_sha256": info.checkpoint.weights_sha256,
            "device": info.device,
            "dtype": info.dtype,
            "threads": info.threads,
            "decoding": info.decoding,
            "slots": info.slots,
        },
        "unlike_the_engine": list(http.unlike),
        "prefill": [
            {"prompts": load.prompts, **_compared(load, engine, comparable)}
            for load, engine in zip(http.figures.prefill, prefill, strict=True)
        ],
        "decode": [
            {
                "batch": load.batch,
                **_compared(load, engine, comparable),
                "streams": load.streams,
                "ttft_ms": _milliseconds(load.first_token),
                "gap_ms": _milliseconds(load.gap),
                "tokens_per_chunk": load.tokens_per_chunk,
                "client_cpu": load.client_cpu,
            }
            for load, engine in zip(http.figures.decode, decode, strict=True)
        ],
    }


def _compared(
    load: PrefillLoad | DecodeLoad, engine: Mapping[str, Any], comparable: bool
) -> dict[str, Any]:
    """A rate over HTTP beside the engine's and beside the limit of both."""
    rate = load.tokens_per_second

    def share(of: float) -> float | None:
        return rate / of if comparable and rate is not None else None

    return {
        "tokens_per_second": rate,
        "share_of_limit": share(engine["limit_tokens_per_second"]),
        "share_of_engine": share(engine["tokens_per_second"]),
        "errors": _errors(load.failures),
    }


def _errors(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """How often each kind, with the sentence of the first."""
    counts = Counter(failure.kind for failure in failures)
    first = {failure.kind: failure.message for failure in reversed(failures)}
    return [{"kind": kind, "count": count, "message": first[kind]}
            for kind, count in counts.items()]  # fmt: skip


def _milliseconds(spread: Spread | None) -> dict[str, float | None]:
    if spread is None:
        return {"p50": None, "p99": None}
    return {"p50": 1e3 * spread.p50, "p99": 1e3 * spread.p99}


# From JSON to lines

Columns = Mapping[str, tuple[str, ...]]
"""The heads of columns, and where their values are in a row; the last of a path says how a value is
written."""

_LIMITED: dict[str, tuple[str, ...]] = {
    "tokens/s": ("tokens_per_second",),
    "limit": ("limit_tokens_per_second",),
    "of limit": ("share_of_limit",),
    "limited by": ("limited_by",),
}
_STEP: dict[str, tuple[str, ...]] = {
    "step p50 ms": ("step_ms", "p50"),
    "p99 ms": ("step_ms", "p99"),
}
_COMPARED: dict[str, tuple[str, ...]] = {
    "tokens/s": ("tokens_per_second",),
    "of limit": ("share_of_limit",),
    "of engine": ("share_of_engine",),
}
_WAITS: dict[str, tuple[str, ...]] = {
    "TTFT p50 ms": ("ttft_ms", "p50"),
    "p99 ms": ("ttft_ms", "p99"),
    "gap p50 ms": ("gap_ms", "p50"),
    "gap p99 ms": ("gap_ms", "p99"),
    "tokens/chunk": ("tokens_per_chunk",),
}


def table(title: str, first: str, rows: Sequence[Mapping[str, Any]], columns: Columns) -> list[str]:
    """A title and rows in columns, the case in the first one."""
    written = [(first, *columns)]
    for row in rows:
        written.append((str(row[first]), *(_written(row, path) for path in columns.values())))
    return ["", title, *aligned(written, left=0)]


def _written(row: Mapping[str, Any], path: Sequence[str]) -> str:
    value: Any = row
    for key in path:
        value = value[key]
    match value:
        case None:
            return NONE
        case str():
            return value
        case _ if path[-1].startswith("share"):
            return f"{round(value, 2) + 0.0:.0%}"  # a little below nothing is nothing
        case _ if path[-1].endswith("per_second"):
            return f"{value:,.0f}"
        case _ if path[-1] in ("read_bytes", "matrix_operations"):
            return f"{value / 1e6:,.2f}"
        case _:
            return f"{value:,.2f}"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Rows as lines, the first `left` columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
