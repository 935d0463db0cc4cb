"""`logitd bench`: measures the speed of a checkpoint on this machine, as a share of the machine's
limit.

With --url, the command first uses the Python client to time streams of completions from a running
server. Then it measures the machine's peak rates, and times the same prompts on the engine in this
process.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import httpx

from logitd.model.benchmark.rates import BenchmarkError, Workload, measure_engine
from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.device import DeviceError, use_threads
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.kernels.select import KernelError, check_kv_cache_dtype
from logitd.model.inference.load import load_model
from logitd.model.inference.options import ComputeOptions
from logitd.model.machine import measure_machine, surroundings
from logitd.model.plural import pluralize
from logitd.model.transformer.size import parameter_count
from logitd.model.version import VERSION
from logitd.service.cli.terminal import say, tell
from logitd.service.client import AsyncClient, LogitdError
from logitd.service.settings.tools import BenchSettings

ERRORS = BenchmarkError, CheckpointError, DeviceError, InvalidRequest, KernelError, LogitdError
USUAL_PROMPT_TOKENS = 256
_log = partial(tell, "bench")
Arrivals = list[tuple[float, int]]
"""Arrival times of a stream's tokens, each with the number of tokens that arrived. The first entry
is the time of the request, with 0 tokens."""


def run(settings: BenchSettings) -> int:
    """Print a line for each rate, then the report as one line of JSON."""
    report = measure(settings)
    say("\n".join([*lines(report), json.dumps(report, allow_nan=False)]))
    return 0


def measure(settings: BenchSettings) -> dict[str, Any]:
    """Measure, and return the report. Later versions may add members to it. May raise any of
    ERRORS."""
    loaded = load_model(settings.checkpoint, ComputeOptions.of(settings), log=_log)
    placement = loaded.placement
    check_kv_cache_dtype(settings.kv_cache_dtype, placement.device)
    use_threads(placement.threads)
    config = loaded.checkpoint.shape
    usual = max(1, min(USUAL_PROMPT_TOKENS, config.context_length - settings.tokens))
    workload = Workload(
        batches=settings.batches,
        prompt_tokens=settings.prompt_tokens or usual,
        tokens=settings.tokens,
        rounds=settings.rounds,
        vocab_size=config.vocab_size,
    )
    http = []
    if settings.url is not None:
        http = asyncio.run(measure_server(settings.url, workload, config.context_length))
    _log("measuring the machine and the engine")
    machine = measure_machine(placement)
    prefill, decode = measure_engine(
        loaded.network,
        loaded.decode_path.make_decoder,
        workload,
        machine,
        quantize=settings.quantize,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    for served, alone in zip(http, decode, strict=False):
        served["share_of_engine"] = served["tokens_per_second"] / alone.tokens_per_second
    return {
        "logitd": VERSION,
        **asdict(surroundings(placement)),
        "checkpoint": loaded.checkpoint.name,
        "weights_sha256": loaded.checkpoint.weights_sha256,
        "parameters": parameter_count(config),
        "decoding": loaded.decode_path.name,
        "quantize": settings.quantize,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "workload": asdict(workload),
        "machine": asdict(machine),
        "engine": {"prefill": list(map(asdict, prefill)), "decode": list(map(asdict, decode))},
        "http": http,
    }


async def measure_server(url: str, workload: Workload, context: int) -> list[dict[str, float]]:
    """For each batch size, measure that many concurrent streams. With a small model the first
    stream may end before the last one begins; then all streams are repeated with more tokens, up to
    the context length. Raises LogitdError and BenchmarkError."""
    rows = []
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as http:
        client = AsyncClient(url, max_retries=0, http=http)
        tokens, most = workload.tokens, context - workload.prompt_tokens
        for batch in workload.batches:
            rates: list[float] = []
            first_tokens: list[float] = []
            while len(rates) < workload.rounds:
                prompts = workload.prompts(batch, f"decode {len(rates)}")
                requests = (stream(client, prompt, tokens) for prompt in prompts)
                streams = await asyncio.gather(*requests)
                rate = whole_batch_rate(streams)
                if rate is not None:
                    rates.append(rate)
                    first_tokens += [arrivals[1][0] - arrivals[0][0] for arrivals in streams]
                elif tokens < most:
                    tokens = min(2 * tokens, most)
                else:
                    raise BenchmarkError(
                        f"{batch} streams of {tokens} tokens never all ran at the same time, and "
                        f"the context of {context} tokens has no room for longer streams: lower "
                        "--batches or --prompt-tokens, or give the server more --slots"
                    )
            row = {"batch": batch, "tokens_per_second": statistics.median(rates)}
            rows.append({**row, "first_token_seconds": statistics.median(first_tokens)})
    return rows


async def stream(client: AsyncClient, prompt: Sequence[int], tokens: int) -> Arrivals:
    """Request `tokens` tokens after a prompt. Returns their arrival times."""
    arrivals = [(time.perf_counter(), 0)]
    chunks = client.stream(prompt, max_tokens=tokens, ignore_eos=True, prefix_reuse=False)
    async with chunks:
        async for chunk in chunks:
            if count := sum(len(choice.token_ids) for choice in chunk.choices):
                arrivals.append((time.perf_counter(), count))
    return arrivals


def whole_batch_rate(streams: Sequence[Arrivals]) -> float | None:
    """Tokens per second while all streams were running, that is, after each had received its first
    token and before any had ended. None if there was no such time."""
    begin = max(arrivals[1][0] for arrivals in streams)
    end = min(arrivals[-1][0] for arrivals in streams)
    if end <= begin:
        return None
    return sum(n for arrivals in streams for at, n in arrivals if begin < at <= end) / (end - begin)


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines for a terminal."""
    bandwidth, products = (rate / 1e9 for rate in report["machine"].values())
    yield f"{report['processor']}, {report['device']}, {pluralize(report['threads'], 'thread')}"
    yield f"memory {bandwidth:,.1f} GB/s, matrix products {products:,.0f} GFLOP/s"
    yield f"{report['checkpoint']} in {report['dtype']}, decoding {report['decoding']}"
    for kind, rates in report["engine"].items():
        for rate in rates:
            line = f"{kind} of {rate['batch']:<4} {rate['tokens_per_second']:>9,.0f} tokens/s"
            if (share := rate["share_of_limit"]) is not None:
                line += f", {share:.0%} of the limit by {rate['limited_by']}"
            yield line
    for rate in report["http"]:
        yield (
            f"{rate['batch']:<4} streams   {rate['tokens_per_second']:>9,.0f} tokens/s, "
            f"{rate['share_of_engine']:.0%} of the engine's, first token after "
            f"{1e3 * rate['first_token_seconds']:,.0f} ms"
        )
