"""Effect of `--target-gap` on gaps, times to first token and tokens per second, in processor time.

    python -m benchmarks.target_gap [--shape 124m|30m|CHECKPOINT] [--dtype float32|bfloat16]
                                    [--clients 8] [--slots N] [--requests N] [--prompt-tokens N]
                                    [--tokens N] [--targets 3x none]

Clients in a closed loop use an engine in this process: each sends a new prompt when its previous
stream has ended. The engine computes with one thread, and its clock is the processor time of this
thread. So other work on the machine hardly affects the figures, and all targets are measured under
the same conditions. `closed_loop.py` measures over HTTP, in wall-clock time and with all threads.

The first streams have different lengths, so that later prompts do not arrive together. Counting
begins when all of these first streams have ended. The last line is JSON.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.spread import Spread
from benchmarks.synthetic import load_gpt
from logitd.model.device import use_threads
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import FinishEvent, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.engine.runner import DecoderMaker
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.options import format_target, parse_target_gap
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.machine import processor_name
from logitd.model.transformer.gpt import GPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Size of the load. Each client completes a first stream and then, on average, `requests` more.
    If there are fewer slots than clients, some clients wait."""

    clients: int
    slots: int
    requests: int
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Tokens per second of processor time; times in seconds of processor time."""

    target: str
    tokens_per_second: float
    first_token: Spread | None
    gap: Spread | None


@dataclass(slots=True)
class Stream:
    """A client's current request: when it was sent, and when its latest token arrived."""

    client: int
    asked: float
    last: float | None = None


@dataclass(slots=True)
class Loop:
    """Clients in a closed loop around an engine."""

    engine: Engine
    question: Question
    prompts: random.Random
    streams: dict[str, Stream] = field(default_factory=dict)
    ids: "itertools.count[int]" = field(default_factory=itertools.count)
    ended: list[int] = field(default_factory=list)  # requests of each client
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0

    def ask(self, client: int, tokens: int) -> None:
        """Add a new request of a client."""
        name, vocabulary = str(next(self.ids)), range(self.engine.model_config.vocab_size)
        prompt = tuple(self.prompts.choices(vocabulary, k=self.question.prompt_tokens))
        params = SamplingParams(max_tokens=tokens, seed=client)
        self.streams[name] = Stream(client, self.engine.clock())
        self.engine.add(GenerationRequest(request_id=name, token_ids=prompt, params=params))

    def run(self) -> float:
        """Run until the clients have completed all streams: on average, each client completes its
        first stream and `requests` more. Returns the seconds from the start of counting to the
        end."""
        clients, tokens = self.question.clients, self.question.tokens
        self.ended = [0] * clients
        for client in range(clients):
            self.ask(client, max(1, tokens * (client + 1) // clients))
        began: float | None = None
        while sum(self.ended) < clients * (1 + self.question.requests):
            self._step()
            if began is None and min(self.ended) > 0:
                self.first_tokens, self.gaps, self.tokens = [], [], 0
                began = self.engine.clock()
        assert began is not None, "counting starts with the second request of the last client"
        return self.engine.clock() - began

    def _step(self) -> None:
        events = self.engine.step().events
        now = self.engine.clock()
        for event in events:
            if isinstance(event, TokenEvent):
                stream = self.streams[event.request_id]
                if stream.last is None:
                    self.first_tokens.append(now - stream.asked)
                else:
                    self.gaps.append(now - stream.last)
                stream.last = now
                self.tokens += 1
            elif isinstance(event, FinishEvent):
                assert event.error is None, event.error
                client = self.streams.pop(event.request_id).client
                self.ended[client] += 1
                self.ask(client, self.question.tokens)


def measure(gpt: GPT, make_decoder: DecoderMaker, question: Question, target: str) -> Figures:
    """Measure one target on a new engine."""
    config = EngineConfig(slots=question.slots, target_gap=parse_target_gap(target))
    engine = Engine(gpt, config, make_decoder=make_decoder, clock=time.thread_time)
    try:
        loop = Loop(engine, question, random.Random(0))
        seconds = loop.run()
    finally:
        engine.close()
    return Figures(
        target=format_target(config.target_gap),
        tokens_per_second=loop.tokens / seconds,
        first_token=Spread.of(loop.first_tokens),
        gap=Spread.of(loop.gaps),
    )


def table(results: Sequence[Figures]) -> str:
    """Results in Markdown."""
    lines = [
        "| target gap | tokens/s | TTFT p50 ms | p99 | gap p50 ms | p99 | p99/p50 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        first, gap = result.first_token, result.gap
        assert first is not None
        assert gap is not None
        times = (first.p50, first.p99, gap.p50, gap.p99)
        cells = " | ".join(f"{1e3 * seconds:,.0f}" for seconds in times)
        ratio = gap.p99 / gap.p50
        lines.append(
            f"| {result.target} | {result.tokens_per_second:,.1f} | {cells} | {ratio:.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.target_gap",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--shape", default="124m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", type=int, help="default: as many as clients")
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--targets", nargs="+", default=["3x", "none"])
    given = parser.parse_args(argv)
    question = Question(
        clients=given.clients,
        slots=given.slots or given.clients,
        requests=given.requests,
        prompt_tokens=given.prompt_tokens,
        tokens=given.tokens,
    )
    use_threads(1)
    gpt = load_gpt(given.shape, getattr(torch, given.dtype))
    path = choose_decode_path(gpt, threads=1, log=print)
    print(f"{processor_name()}, 1 thread, {given.shape}, {given.dtype}, {path.name}; {question}")
    results = []
    for target in given.targets:
        results.append(measure(gpt, path.make_decoder, question, target))
        print(f"{target}: {results[-1].tokens_per_second:,.1f} tokens/s", flush=True)
    print(f"\n{table(results)}\n")
    print(json.dumps({"question": asdict(question), "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    main(sys.argv[1:])
