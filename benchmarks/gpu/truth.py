"""What has to be true on a GPU before its speed means anything.

Everything is held to the CPU or to the same device without recordings: logits, greedy texts,
replayed steps in changing batches, overlapped steps, the same bits alone and in any batch, and
memory that does not grow. Each check yields findings; one that does not hold is a failure.
"""

import random
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.plan import Finding
from benchmarks.synthetic import synthetic_gpt
from logitd.model.checkpoint.checkpoint import load_checkpoint
from logitd.model.evaluation.quantization_loss import decode_nats
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Collect
from logitd.model.inference.kernels.cuda.capture import DirectCalls
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.inference.sampling.sample import SamplingRows
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import MODERN, gpt2_shape
from logitd.model.transformer.gpt import GPT

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "python-small"
CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Of a loss, as a share of the CPU's in float32."""
LOGIT_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of any one logit, in standard deviations of them all."""
RANDOM_CONTEXT = 256
RANDOM_VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Size:
    """How much is checked."""

    positions: int
    prompts: int
    tokens: int
    requests: int
    steps: int


FULL = Size(positions=512, prompts=20, tokens=64, requests=64, steps=100_000)
SMALL = Size(positions=16, prompts=2, tokens=8, requests=4, steps=20)
SAMPLED: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9})
ASKING: tuple[dict[str, Any], ...] = ({"logprobs": 1}, {"frequency_penalty": 0.5})
"""Requests that need no logits processing, and some that do."""
WARM_UP = 0.1
"""Share of the steps after which everything has been allocated that ever will be."""


def logits(device: torch.device, size: Size) -> Iterator[Finding]:
    """The loss of the bundled checkpoint on this very file: prefilled at once, and decoded one
    position after the other, in both kinds of numbers."""
    _, exact_gpt, ids = _bundled(CPU, torch.float32)
    inputs, targets = ids[None, : size.positions], ids[None, 1 : size.positions + 1]
    exact = _forward_nats(exact_gpt, inputs, targets)
    for dtype, tolerance in TOLERANCES.items():
        _, gpt, _ = _bundled(device, dtype)
        name = str(dtype).removeprefix("torch.")
        for way, nats in (
            ("forward", _forward_nats(gpt, inputs.to(device), targets.to(device))),
            ("decoded", decode_nats(gpt, inputs, targets, GraphDecoder)),
        ):
            apart = abs(nats / exact - 1)
            yield Finding(
                "logits",
                f"{name} {way}",
                f"loss {nats / size.positions:.5f}, on the CPU in float32 "
                f"{exact / size.positions:.5f}: {apart:.5%} apart, {tolerance:.2%} allowed",
                {"relative": apart, "allowed": tolerance},
                apart <= tolerance,
            )


def random_weights(device: torch.device, size: Size) -> Iterator[Finding]:
    """The logits of models that learned nothing, of both families: the largest distance to the
    CPU's in float32, by forward and by decode steps."""
    positions = min(size.positions, RANDOM_CONTEXT)
    ids = torch.randint(RANDOM_VOCABULARY, (1, positions), generator=torch.manual_seed(0))
    for family, shape in (("gpt-2", {}), ("modern", {**MODERN, "n_kv_head": 2})):
        config = gpt2_shape(
            vocab_size=RANDOM_VOCABULARY, context_length=RANDOM_CONTEXT, n_layer=4, n_head=4,
            d_model=256, **shape,
        )  # fmt: skip
        exact_gpt = synthetic_gpt(config)
        with torch.inference_mode():
            exact = exact_gpt(ids).logits[0]  # (T, V)
        for dtype, tolerance in LOGIT_TOLERANCES.items():
            gpt = synthetic_gpt(config).to(dtype).to(device)
            with torch.inference_mode():
                forward = gpt(ids.to(device)).logits[0].float().cpu()
            for way, logits in (("forward", forward), ("decoded", _decoded(gpt, ids))):
                apart = float((logits - exact).abs().max() / exact.std())
                yield Finding(
                    "random",
                    f"{family}, {str(dtype).removeprefix('torch.')} {way}",
                    f"logits at most {apart:.2g} standard deviations from the CPU's in float32, "
                    f"{tolerance:.2g} allowed",
                    {"apart": apart, "allowed": tolerance},
                    apart <= tolerance,
                )


def greedy(device: torch.device, size: Size) -> Iterator[Finding]:
    """Greedy texts in float32: the CPU's, token for token."""
    asked: list[GenerationRequest] = []
    texts = []
    decoders: tuple[tuple[torch.device, DecoderMaker], ...]
    decoders = ((CPU, PlainDecoder), (device, GraphDecoder))
    for where, make in decoders:
        _, gpt, ids = _bundled(where, torch.float32)
        asked = [
            _request(f"{i}", ids[20 * i : 20 * i + 5 + i].tolist(), size.tokens, temperature=0.0)
            for i in range(size.prompts)
        ]
        texts.append(_run(gpt, make, asked))
    same = sum(texts[0][request.request_id] == texts[1][request.request_id] for request in asked)
    yield Finding(
        "greedy",
        "float32",
        f"{same} of {len(asked)} texts of {size.tokens} tokens are the CPU's",
        {"same": same, "of": len(asked)},
        same == len(asked),
    )


def replay(device: torch.device, size: Size) -> Iterator[Finding]:
    """Recorded steps against the same steps called one by one: requests that come and are aborted
    at any time, so that rows, slots and lengths change and slots are used again."""
    for dtype in TOLERANCES:
        _, gpt, ids = _bundled(device, dtype)
        for drafts in ("none", "ngram"):
            ways: tuple[DecoderMaker, ...]
            ways = (GraphDecoder, partial(GraphDecoder, capture=DirectCalls()))
            results = [_mixed(gpt, make, ids, size, drafts) for make in ways]
            same = sum(token_id == other for token_id, other in zip(*results, strict=True))
            yield Finding(
                "replay",
                f"{str(dtype).removeprefix('torch.')}, drafts {drafts}",
                f"{same} of {len(results[0])} sequences have the bits of steps without recording",
                {"same": same, "of": len(results[0])},
                same == len(results[0]),
            )


class Counted(GraphDecoder):
    """Keeps record of the steps that are launched behind others: the row count of each."""

    def __init__(self, behind: list[int], gpt: GPT, cache: KVCache, **options: Any) -> None:
        super().__init__(gpt, cache, **options)
        self._behind = behind

    def launch_next(
        self,
        rows: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        sampling: SamplingRows,
    ) -> Collect:
        self._behind.append(len(rows))
        return super().launch_next(rows, slots, positions, sampling)


def overlap(device: torch.device, size: Size) -> Iterator[Finding]:
    """Steps launched before the tokens of those before them are known, against the same steps
    that wait: the same tokens. Sequences end by their length, so that all steps have the same rows;
    batch-invariant some are aborted, too, and their rows are in a step that is under
    way."""
    for dtype in TOLERANCES:
        _, gpt, ids = _bundled(device, dtype)
        for invariant in (False, True):
            behind: list[int] = []
            ways: tuple[DecoderMaker, ...] = (
                partial(Counted, behind, batch_invariant=invariant),
                partial(GraphDecoder, batch_invariant=invariant, overlap=False),
            )
            given, expected = (
                _mixed(gpt, make, ids, size, "none", kinds=SAMPLED, ends_early=invariant)
                for make in ways
            )
            same = sum(token_id == other for token_id, other in zip(given, expected, strict=True))
            yield Finding(
                "overlap",
                f"{str(dtype).removeprefix('torch.')}, "
                f"{'batch-invariant, some aborted' if invariant else 'of any size'}",
                f"{same} of {len(given)} sequences have the tokens of steps that wait; "
                f"{len(behind)} steps were launched early",
                {"same": same, "of": len(given), "overlapped": len(behind)},
                same == len(given) and bool(behind),
            )


def invariance(device: torch.device, size: Size) -> Iterator[Finding]:
    """Batch-invariant: the same bits alone and in a batch; and how often without it."""
    for dtype in TOLERANCES:
        _, gpt, ids = _bundled(device, dtype)
        for invariant in (True, False):
            make = partial(GraphDecoder, batch_invariant=invariant)
            rng = random.Random(0)
            asked = [
                _request(str(i), _piece(rng, ids, 150), size.tokens, logprobs=2, seed=i)
                for i in range(size.requests)
            ]
            together = _run(gpt, make, asked)
            checked = asked[:: max(1, len(asked) // 16)]
            same = sum(
                _run(gpt, make, [request])[request.request_id] == together[request.request_id]
                for request in checked
            )
            yield Finding(
                "invariance",
                f"{str(dtype).removeprefix('torch.')}, {'on' if invariant else 'off'}",
                f"{same} of {len(checked)} sequences have the bits that they have alone",
                {"same": same, "of": len(checked)},
                same == len(checked) if invariant else None,
            )


def memory(device: torch.device, size: Size) -> Iterator[Finding]:
    """What is held after a tenth of so many steps, and at their end: the same load again and
    again."""
    _, gpt, ids = _bundled(device, torch.bfloat16)
    engine = Engine(gpt, EngineConfig(slots=8), make_decoder=GraphDecoder)
    steps, rounds, warm = 0, 0, None
    try:
        while steps < size.steps:
            if warm is None and steps >= WARM_UP * size.steps:
                warm = _held_bytes(device)
            rng = random.Random(0)  # the same load each time: the same recordings
            for i in range(size.requests):
                engine.add(_request(f"{rounds} {i}", _piece(rng, ids, 100), size.tokens, seed=i))
            while engine.has_work():
                engine.step()
                steps += 1
            rounds += 1
        assert warm is not None
        grown = _held_bytes(device) - warm
    finally:
        engine.close()
    allowed = 0 if device.type == "cuda" else 64 * 2**20  # a process's peak is not exact
    yield Finding(
        "memory",
        f"{steps:,} steps, {rounds} times the same load",
        f"{grown / 2**20:.1f} MiB more than after a tenth of them",
        {"grown_bytes": grown, "steps": steps},
        grown <= allowed,
    )


CHECKS = (logits, random_weights, greedy, replay, overlap, invariance, memory)


def _bundled(device: torch.device, dtype: torch.dtype) -> tuple[Tokenizer, GPT, torch.Tensor]:
    """The bundled checkpoint, and the ids of this file."""
    info, gpt = load_checkpoint(BUNDLED, device=device, dtype=dtype)
    text = Path(__file__).read_text(encoding="utf-8")
    return info.tokenizer, gpt, torch.tensor(info.tokenizer.encode(text))


def _decoded(gpt: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Logits (T, V) in float32 on the CPU, each position of ids (1, T) by a decode step."""
    weight = gpt.token_embedding.weight
    cache = KVCache(gpt.config, 1, device=weight.device, dtype=weight.dtype)
    decoder = GraphDecoder(gpt, cache)
    try:
        rows = [
            decoder.decode([token_id], [0], [position])[0].to("cpu", copy=True)
            for position, token_id in enumerate(ids[0].tolist())
        ]
    finally:
        decoder.close()
    return torch.stack(rows)


@torch.inference_mode()
def _forward_nats(gpt: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    logprobs = gpt(inputs).logits.double().log_softmax(dim=-1)
    return -float(logprobs.gather(-1, targets[..., None]).sum())


def _piece(rng: random.Random, ids: torch.Tensor, longest: int) -> list[int]:
    start, length = rng.randrange(len(ids) - longest), rng.randint(1, longest)
    piece: list[int] = ids[start : start + length].tolist()
    return piece


def _request(name: str, token_ids: Sequence[int], tokens: int, **options: Any) -> GenerationRequest:
    options = {"seed": 0} | options
    params = SamplingParams(max_tokens=tokens, **options)
    return GenerationRequest(request_id=name, token_ids=tuple(token_ids), params=params)


def _run(gpt: GPT, make: DecoderMaker, asked: Sequence[GenerationRequest]) -> dict[str, list[Any]]:
    """Tokens with their logprobs, by request: all together, in eight slots."""
    engine = Engine(gpt, EngineConfig(slots=8), make_decoder=make)
    answers: dict[str, list[Any]] = {request.request_id: [] for request in asked}
    try:
        for request in asked:
            engine.add(request)
        while engine.has_work():
            for event in engine.step().events:
                if isinstance(event, TokenEvent):
                    answers[event.request_id].append((event.token_id, event.chosen, event.top))
    finally:
        engine.close()
    return answers


def _mixed(
    gpt: GPT,
    make: DecoderMaker,
    ids: torch.Tensor,
    size: Size,
    drafts: Any,
    *,
    kinds: Sequence[dict[str, Any]] = (*SAMPLED, *ASKING),
    ends_early: bool = True,
) -> list[list[Any]]:
    """The tokens of requests of many kinds, some aborted if sequences may end before their length;
    the same play for the same arguments."""
    engine = Engine(gpt, EngineConfig(slots=6, speculate=drafts), make_decoder=make)
    rng = random.Random(1)
    answers: dict[str, list[Any]] = {}

    def step() -> None:
        for event in engine.step().events:
            if isinstance(event, TokenEvent):
                answers[event.request_id].append((event.token_id, event.chosen))

    try:
        for number in range(size.requests):
            name = str(number)
            answers[name] = []
            options = dict(rng.choice(kinds))
            asked = _request(name, _piece(rng, ids, 200), rng.randint(1, size.tokens), **options)
            engine.add(replace(asked, params=replace(asked.params, seed=number)))
            for _ in range(rng.randrange(6)):
                step()
            if ends_early and rng.random() < 0.25:
                engine.abort(str(rng.randrange(number + 1)))
        while engine.has_work():
            step()
    finally:
        engine.close()
    return list(answers.values())


def _held_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
