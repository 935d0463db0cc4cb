"""Checks that a GPU computes the promised results. Each part yields its findings."""

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.part import Finding, Setting
from benchmarks.synthetic import synthetic_gpt
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.device import choose_device, disable_cudnn_attention
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.base import Decoder
from logitd.model.inference.kernels.cuda.check import find_fault, tolerance
from logitd.model.inference.kernels.cuda.decoder import GraphDecoder
from logitd.model.inference.kernels.cuda.stream import DirectStream
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.options import Speculation
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.transformer.gpt import GPT
from logitd.model.transformer.shapes import gpt2_shape

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "python-small"
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SAMPLED: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_k": 20}, {"top_p": 0.9})
PROCESSED: tuple[dict[str, Any], ...] = ({"logprobs": 1}, {"frequency_penalty": 0.5})
"""Parameters of requests whose logits are processed before sampling."""
MEMORY_SECONDS = 12.0


def checked(setting: Setting) -> Iterator[Finding]:
    """Run the self-check that a server runs when it starts."""
    for dtype in DTYPES:
        for name, gpt in models(setting, dtype).items():
            for invariant in (False, True):
                began = time.perf_counter()
                make = partial(tested, batch_invariant=invariant)
                fault = find_fault(gpt, make, batch_invariant=invariant)
                figures = {"fault": fault, "in s": time.perf_counter() - began}
                yield Finding(case(name, dtype, invariant), figures, fault is None)


@torch.inference_mode()
def logits(setting: Setting) -> Iterator[Finding]:
    """Compare the logits of a text, computed in one pass and in decode steps, with the CPU's
    float32 logits. The distance is given in standard deviations of a row of logits."""
    ids = torch.tensor(text())[None, : 16 if setting.tiny else 256]
    exact = {name: gpt(ids).logits[0] for name, gpt in models(CPU_ONLY, torch.float32).items()}
    for dtype in DTYPES:
        for name, gpt in models(setting, dtype).items():
            device, expected = gpt.token_embedding.weight.device, exact[name]
            decoder = tested(gpt, KVCache(gpt.config, 1, device=device, dtype=dtype))
            rows = [
                decoder.decode([token_id], [0], [at])[0].to("cpu", copy=True)
                for at, token_id in enumerate(ids[0].tolist())
            ]
            decoder.close()
            forward = gpt(ids.to(device)).logits[0].float().cpu()
            for way, found in (("at once", forward), ("decoded", torch.stack(rows))):
                off = (found - expected).square().mean(-1).sqrt() / expected.std(-1)
                figures = {"off": float(off.max()), "allowed": tolerance(dtype)}
                holds = figures["off"] <= figures["allowed"]
                yield Finding(f"{case(name, dtype)}, {way}", figures, holds)


def greedy(setting: Setting) -> Iterator[Finding]:
    """Check that greedy texts in float32 have the same tokens as on the CPU."""
    asked = requests(setting, [{"temperature": 0.0}])
    exact, gpt = (models(one, torch.float32)["bundled"] for one in (CPU_ONLY, setting))
    yield same("the CPU's texts", play(exact, PlainDecoder, asked), play(gpt, tested, asked))


def recorded(setting: Setting) -> Iterator[Finding]:
    """Check that steps recorded as CUDA graphs return the same results as steps that are not
    recorded. Requests arrive and are aborted at any time, so rows, slots and lengths change and
    slots are reused."""
    asked = requests(setting, (*SAMPLED, *PROCESSED))
    directly = partial(tested, stream=DirectStream())
    drafts: Speculation
    for dtype in DTYPES:
        gpt = models(setting, dtype)["bundled"]
        for drafts in ("none", "ngram"):
            run = partial(play, gpt, asked=asked, drafts=drafts, staggered=True, aborts=True)
            yield same(f"{dtype}, drafts {drafts}", run(directly), run(tested))


def overlap(setting: Setting) -> Iterator[Finding]:
    """Check that steps launched before the previous step has ended return the same results as steps
    launched after it. A step launched ahead still has the rows of sequences that have ended;
    without batch invariance, these rows may change the results of the others. So the check aborts
    requests, and launches several steps at once, only with batch invariance."""
    asked = requests(setting, SAMPLED)
    for dtype in DTYPES:
        gpt = models(setting, dtype)["bundled"]
        for invariant in (False, True):
            make = partial(tested, batch_invariant=invariant)
            run = partial(play, gpt, asked=asked, staggered=True)
            one = partial(run, aborts=invariant)
            waiting = one(partial(make, overlap=False))
            yield same(case("bundled", dtype, invariant), waiting, one(partial(make, most_steps=1)))
        found = same(case("bundled", dtype, True), run(partial(make, overlap=False)), run(make))
        yield replace(found, case=f"{found.case}, several steps")


def invariance(setting: Setting) -> Iterator[Finding]:
    """Check that with batch invariance the results of a request have the same bits alone and in a
    batch; without it, count how often they do."""
    asked = requests(setting, [{**kind, "logprobs": 2} for kind in SAMPLED])
    some = slice(None, None, max(1, len(asked) // 8))
    for dtype, invariant in ((DTYPES[0], True), (DTYPES[1], True), (DTYPES[1], False)):
        gpt = models(setting, dtype)["bundled"]
        make = partial(tested, batch_invariant=invariant)
        alone = [play(gpt, make, [one])[0] for one in asked[some]]
        finding = same(case("bundled", dtype, invariant), alone, play(gpt, make, asked)[some])
        yield finding if invariant else replace(finding, holds=None)


def memory(setting: Setting) -> Iterator[Finding]:
    """Run the same load many times. Check that the device memory in use after the last run does not
    exceed the memory in use after the second."""
    gpt, asked = models(setting, torch.bfloat16)["bundled"], requests(setting, SAMPLED)
    engine, held = Engine(gpt, EngineConfig(slots=8), make_decoder=tested), list[int]()
    end = time.monotonic() + (0 if setting.tiny else MEMORY_SECONDS)
    while len(held) < 3 or time.monotonic() < end:
        for one in asked:
            engine.add(replace(one, request_id=f"{len(held)} {one.request_id}"))
        while engine.has_work():
            list(tokens_of(engine))
        held.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    engine.close()
    figures = {"times": len(held), "bytes": held[1], "more bytes": held[-1] - held[1]}
    yield Finding("the same load", figures, held[-1] <= held[1])


CPU_ONLY = Setting("cpu", tiny=False, train_seconds=0)


def tested(gpt: GPT, cache: KVCache, **options: Any) -> Decoder:
    """The decoder under test. On a CPU, where the parts are only tried out, it is the plain
    decoder."""
    on_gpu = gpt.token_embedding.weight.is_cuda
    return GraphDecoder(gpt, cache, **options) if on_gpu else PlainDecoder(gpt, cache)


def models(setting: Setting, dtype: torch.dtype) -> dict[str, GPT]:
    """The bundled checkpoint, and a GPT-2 with random weights and the same vocabulary."""
    disable_cudnn_attention()  # like a server
    torch.set_num_threads(1)  # with more threads, a CPU's float32 products treat rows differently
    device = choose_device(setting.device)
    info, gpt = load_checkpoint(BUNDLED, device=device, dtype=dtype)
    config = gpt2_shape(
        vocab_size=info.config.vocab_size, context_length=512, n_layer=4, n_head=4, d_model=256
    )
    return {"bundled": gpt, "gpt-2": synthetic_gpt(config).to(dtype).to(device)}


def case(name: str, dtype: torch.dtype, batch_invariant: bool = False) -> str:
    return f"{name}, {dtype}" + ", batch-invariant" * batch_invariant


def text() -> list[int]:
    """Token ids of this source file, in the bundled checkpoint's vocabulary."""
    return read_checkpoint(BUNDLED).tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))


def requests(setting: Setting, kinds: Sequence[dict[str, Any]]) -> list[GenerationRequest]:
    """Requests of several kinds and lengths, the same in each call."""
    count, most = (4, 8) if setting.tiny else (40, 64)
    rng, ids, asked = random.Random(0), text(), []
    for number in range(count):
        start, length = rng.randrange(len(ids) - 200), rng.randint(1, 200)
        params = SamplingParams(max_tokens=rng.randint(1, most), seed=number, **rng.choice(kinds))
        prompt = tuple(ids[start : start + length])
        asked.append(GenerationRequest(request_id=str(number), token_ids=prompt, params=params))
    return asked


def play(
    gpt: GPT,
    make: DecoderMaker,
    asked: Sequence[GenerationRequest],
    *,
    drafts: Speculation = "none",
    staggered: bool = False,
    aborts: bool = False,
) -> list[list[Any]]:
    """Tokens and logprobs of each request. All requests are added before the first step, or a few
    steps apart if `staggered`. With `aborts`, some are aborted."""
    engine = Engine(gpt, EngineConfig(slots=8, speculate=drafts), make_decoder=make)
    answers: dict[str, list[Any]] = {one.request_id: [] for one in asked}
    rng = random.Random(1)

    def step() -> None:
        for token in tokens_of(engine):
            answers[token.request_id].append((token.token_id, token.chosen, token.top))

    for number, one in enumerate(asked):
        engine.add(one)
        for _ in range(rng.randrange(6) if staggered else 0):
            step()
        if aborts and rng.random() < 0.25:
            engine.abort(str(rng.randrange(number + 1)))
    while engine.has_work():
        step()
    engine.close()
    return list(answers.values())


def tokens_of(engine: Engine) -> Iterator[TokenEvent]:
    """The tokens of a step. Raises RuntimeError if a sequence failed."""
    for event in engine.step().events:
        if isinstance(event, FinishEvent) and event.error is not None:
            raise RuntimeError(event.error)
        if isinstance(event, TokenEvent):
            yield event


def same(name: str, expected: list[list[Any]], found: list[list[Any]]) -> Finding:
    """A finding that holds if sequences have the same tokens and logprobs."""
    equal = sum(one == other for one, other in zip(expected, found, strict=True))
    return Finding(name, {"equal": equal, "of": len(expected)}, equal == len(expected))
