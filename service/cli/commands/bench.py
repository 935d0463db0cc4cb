"""`logitd bench`: how fast a checkpoint runs here, and how fast it could.

What the machine allows is measured first and last; in between the engine in process and then, with
the same prompts, a server. One after the other: two that compute at once would share the
processors.
"""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import httpx
from uvicorn.loops.auto import auto_loop_factory

from logitd.model.benchmark.in_process import EngineFigures, MeasuringError, measure_engine
from logitd.model.benchmark.machine import Surroundings, measure_machine, surroundings
from logitd.model.benchmark.profile import Profile, ProfileError, profile_engine
from logitd.model.benchmark.workload import Workload, WorkloadError, choose_workload
from logitd.model.checkpoint.checkpoint import (
    CheckpointError,
    CheckpointInfo,
    load_weights,
    read_checkpoint,
)
from logitd.model.device import (
    DeviceError,
    Placement,
    choose_device,
    choose_placement,
    keep_freed_memory,
    use_threads,
)
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.kernels.select import (
    DecodePath,
    KernelError,
    check_kv_cache_dtype,
    choose_decode_path,
    choose_dtype,
)
from logitd.model.inference.options import KernelChoice
from logitd.model.transformer.gpt import GPT
from logitd.service.cli.commands.benchmark.load import asking, measure_server
from logitd.service.cli.commands.benchmark.profile_report import profile_lines, profile_summary
from logitd.service.cli.commands.benchmark.raw_client import RawClient
from logitd.service.cli.commands.benchmark.report import (
    HttpMeasured,
    Measured,
    Profiled,
    lines,
    summary,
)
from logitd.service.cli.commands.benchmark.server import ServerError, started_server
from logitd.service.client import AsyncClient, Info, LogitdError
from logitd.service.settings.tools import BenchSettings

STARTUP_ERRORS = (
    CheckpointError,
    DeviceError,
    KernelError,
    LogitdError,
    MeasuringError,
    ProfileError,
    ServerError,
    WorkloadError,
)


def run(settings: BenchSettings) -> int:
    """1 when something could not be measured, or when streams failed."""
    try:
        measured = _profile(settings) if settings.profile else _measure(settings)
    except STARTUP_ERRORS as error:
        print(f"logitd bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("logitd bench: stopped", file=sys.stderr)
        return 130
    if isinstance(measured, Profiled):
        report = profile_summary(measured)
        print("\n".join([*profile_lines(report), json.dumps(report, allow_nan=False)]))
        return 0
    report = summary(measured)
    print("\n".join([*lines(report), json.dumps(report, allow_nan=False)]))
    return 1 if measured.http is not None and measured.http.figures.failed else 0


def _prepare(settings: BenchSettings) -> tuple[CheckpointInfo, Placement, Workload]:
    """What is measured, where, and under which load. From here on torch has its threads."""
    checkpoint = read_checkpoint(settings.checkpoint)
    device = choose_device(settings.device)
    dtype = choose_dtype(
        settings.dtype,
        checkpoint.config,
        device,
        kernels=settings.kernels,
        kernel_target=settings.kernel_target,
        log=_log,
    )
    placement = choose_placement(settings.device, dtype.name, settings.threads)
    use_threads(placement.threads)
    keep_freed_memory()
    workload = choose_workload(
        checkpoint.config,
        batches=settings.batches,
        prompt_tokens=settings.prompt_tokens,
        tokens=settings.tokens,
        rounds=settings.rounds,
        prefill_chunk=EngineConfig().prefill_chunk,
    )
    return checkpoint, placement, workload


def _profile(settings: BenchSettings) -> Profiled:
    if settings.url is not None:
        raise WorkloadError("url names a server, and profile asks none: leave one out")
    checkpoint, placement, workload = _prepare(settings)
    _log("the machine")
    before = measure_machine(placement)
    parameters, profiles = 0, dict[str, tuple[Profile, ...]]()
    for kernels in _decoders(settings):
        gpt, path = _loaded(settings, checkpoint, placement, kernels)
        parameters = gpt.parameter_count()
        if path.name not in profiles:  # where there are no native kernels both are torch
            profiles[path.name] = profile_engine(
                gpt,
                path.make_decoder,
                workload,
                quantize=settings.quantize,
                kv_cache_dtype=settings.kv_cache_dtype,
                log=_log,
            )
    _log("the machine, once more")
    return Profiled(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        surroundings=surroundings(placement),
        checkpoint=checkpoint,
        parameters=parameters,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        workload=workload,
        machines=(before, measure_machine(placement)),
        profiles=profiles,
    )


def _decoders(settings: BenchSettings) -> tuple[KernelChoice, ...]:
    """The ways of decoding to profile: both, where it was left open and plain torch can do it."""
    open_to_torch = settings.quantize == "none" and settings.kernel_target == "auto"
    if settings.kernels == "auto" and open_to_torch:
        return "auto", "torch"
    return (settings.kernels,)


def _measure(settings: BenchSettings) -> Measured:
    checkpoint, placement, workload = _prepare(settings)
    if settings.url is not None:  # what cannot run is refused before minutes have passed
        if settings.skip_http:
            raise WorkloadError("url names a server, and skip_http asks none: leave one out")
        asyncio.run(_check_server(settings.url, workload))
    _log("the machine")
    before = measure_machine(placement)
    here = surroundings(placement)
    parameters, decoding, engine = _engine(settings, checkpoint, placement, workload)
    http = None
    if not settings.skip_http:
        # The server's own kind of loop, so that the client takes as little from it as it can.
        with (
            _server(settings, placement, workload) as url,
            asyncio.Runner(loop_factory=auto_loop_factory()) as runner,
        ):
            http = runner.run(_http(url, workload, checkpoint, here, decoding))
    _log("the machine, once more")
    return Measured(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        surroundings=here,
        checkpoint=checkpoint,
        parameters=parameters,
        decoding=decoding,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        workload=workload,
        machines=(before, measure_machine(placement)),
        engine=engine,
        http=http,
    )


def _engine(
    settings: BenchSettings,
    checkpoint: CheckpointInfo,
    placement: Placement,
    workload: Workload,
) -> tuple[int, str, EngineFigures]:
    """Parameters, how is decoded, and figures. The model is gone afterwards, so that a server has
    the memory."""
    gpt, path = _loaded(settings, checkpoint, placement, settings.kernels)
    figures = measure_engine(
        gpt,
        path.make_decoder,
        workload,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
        log=_log,
    )
    return gpt.parameter_count(), path.name, figures


def _loaded(
    settings: BenchSettings,
    checkpoint: CheckpointInfo,
    placement: Placement,
    kernels: KernelChoice,
) -> tuple[GPT, DecodePath]:
    check_kv_cache_dtype(settings.kv_cache_dtype, placement.device)
    gpt = load_weights(checkpoint, device=placement.device, dtype=placement.dtype)
    path = choose_decode_path(
        gpt,
        kernels=kernels,
        kernel_target=settings.kernel_target,
        quantize=settings.quantize,
        threads=placement.threads,
        log=_log,
    )
    if path.note is not None:
        _log(f"decoding in plain torch, which is slower: {path.note}")
    return gpt, path


@contextmanager
def _server(settings: BenchSettings, placement: Placement, workload: Workload) -> Iterator[str]:
    """The URL of the server to load: the one that runs already, or one like the engine here."""
    if settings.url is not None:
        yield settings.url
        return
    _log("starting a server")
    with started_server(
        *("--checkpoint", str(settings.checkpoint.resolve())),
        *("--device", str(placement.device), "--dtype", placement.dtype_name),
        *("--threads", str(placement.threads)),
        *("--kernels", settings.kernels, "--kernel-target", settings.kernel_target),
        *("--quantize", settings.quantize, "--kv-cache-dtype", settings.kv_cache_dtype),
        *(["--max-quantization-loss", "any"] if _quantized(settings) else []),
        *("--slots", str(workload.largest), "--prefill-chunk", str(workload.prefill_chunk)),
        *("--target-gap", "none"),  # as the engine here: batches, for which nobody waits
    ) as server:
        yield server.url


def _quantized(settings: BenchSettings) -> bool:
    return settings.quantize != "none" or settings.kv_cache_dtype != "auto"


async def _check_server(url: str, workload: Workload) -> None:
    async with _client(url, workload) as client:
        _fitting(workload, await client.info())


async def _http(
    url: str, workload: Workload, checkpoint: CheckpointInfo, here: Surroundings, decoding: str
) -> HttpMeasured:
    async with _client(url, workload) as client:
        info = await client.info()
        fitting = _fitting(workload, info)
        if _is_remote(url) or not url.startswith("http://"):
            figures = await measure_server(asking(client), fitting, _log)
        else:
            with closing(RawClient(url)) as ask:
                figures = await measure_server(ask, fitting, _log)
    return HttpMeasured(url, info, _unlike(info, checkpoint, here, decoding), figures)


@asynccontextmanager
async def _client(url: str, workload: Workload) -> AsyncIterator[AsyncClient]:
    """A client with connections for the largest batch, that tries nothing again."""
    connections = httpx.Limits(max_connections=None, max_keepalive_connections=workload.largest)
    async with httpx.AsyncClient(limits=connections, trust_env=_is_remote(url)) as http:
        try:
            client = AsyncClient(url, max_retries=0, http=http)
        except ValueError as error:  # no URL, or an API key that no header can hold
            raise WorkloadError(str(error)) from error
        yield client


def _is_remote(url: str) -> bool:
    """Whether the settings of the environment for proxies are meant for it."""
    return not re.match(r"https?://(127\.0\.0\.1|localhost|\[::1\])[:/]?", url)


def _fitting(workload: Workload, info: Info) -> Workload:
    """The workload with ids that a server has, if it has room for the rest."""
    context, length = info.limits["context_length"], workload.prompt_tokens + workload.tokens
    if length > context:
        raise WorkloadError(
            f"prompt_tokens is {workload.prompt_tokens} and tokens is {workload.tokens}: together "
            f"{length}, the context of the server's model is {context}. Lower one of them"
        )
    if workload.largest > info.slots:
        raise WorkloadError(
            f"a batch of {workload.largest} is asked for, and the server has {info.slots} slots: "
            "start it with more (--slots), or ask for smaller batches"
        )
    return replace(workload, vocab_size=int(info.config["vocab_size"]))


def _unlike(
    info: Info, checkpoint: CheckpointInfo, here: Surroundings, decoding: str
) -> tuple[str, ...]:
    """In which ways a server does not compute as the engine here did."""
    return tuple(
        f"{name} there {theirs}, here {ours}"
        for name, theirs, ours in (
            ("weights_sha256 is", info.checkpoint.weights_sha256, checkpoint.weights_sha256),
            ("device is", info.device, here.device),
            ("dtype is", info.dtype, here.dtype),
            ("threads is", info.threads, here.threads),
            ("decoding is", info.decoding, decoding),
        )
        if theirs != ours
    )


def _log(line: str) -> None:
    """Progress, beside what is printed at the end."""
    print(f"bench: {line}", file=sys.stderr, flush=True)
