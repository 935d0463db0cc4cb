"""Gain from drafts on repetitive text, and their cost on other text.

    python -m benchmarks.speculation [--shape CHECKPOINT|124m|30m] [--threads N] [--dtype NAME]
                                     [--rounds N]

Measures tokens per second of 1 and 8 sequences on native kernels, with `speculate` set to none in
one engine and to ngram in another. Both engines run in one process, one step of each in turn.
Prompts are not counted. The texts:

    repeats   greedy text after a prompt that repeats one statement
    ordinary  code at temperature 1: short runs of tokens recur, but mostly continue differently
    noise     prompts of random ids, at a temperature at which nothing repeats

A shape without a checkpoint has random weights. With these, greedy text repeats one token, and
there is no ordinary text. Both settings must generate the same tokens. Run it on an idle machine.
The last line is JSON.
"""

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import new_parser
from benchmarks.shapes import SHAPES
from benchmarks.synthetic import load_gpt
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.device import describe, use_threads
from logitd.model.inference.engine.config import EngineConfig
from logitd.model.inference.engine.engine import Engine
from logitd.model.inference.engine.events import TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.options import ComputeOptions, Speculation
from logitd.model.inference.sampling.params import SamplingParams
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.gpt import GPT

BATCHES = (1, 8)
TOKENS = 160
SAYING = 'def area(self, width, height):\n    """The area."""\n    return width * height\n\n\n'
CODE = (
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n"
    "        self.lines = []\n\n    def read(self):\n        with open(self.path) as file:\n"
)


@dataclass(frozen=True)
class Text:
    name: str
    prompts: list[list[int]]  # one per sequence
    temperature: float


@dataclass(frozen=True)
class Result:
    tokens_per_second: float
    drafted: int
    accepted: int
    answers: dict[str, list[int]]


def load(shape: str, dtype: torch.dtype) -> tuple[GPT, Tokenizer | None]:
    """A model and its tokenizer, which is None for a synthetic model because its vocabulary is
    meaningless."""
    tokenizer = None if shape in SHAPES else read_checkpoint(Path(shape)).tokenizer
    return load_gpt(shape, dtype), tokenizer


def texts(gpt: GPT, tokenizer: Tokenizer | None, batch: int) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(gpt.config.vocab_size, (batch, 128), generator=generator).tolist()
    if tokenizer is None:
        return [Text("repeats", noise, 0.0), Text("noise", noise, 20.0)]
    saying, code = tokenizer.encode(SAYING), tokenizer.encode(CODE)
    again = (saying * 8)[: gpt.config.context_length - TOKENS]
    return [
        Text("repeats", [again] * batch, 0.0),
        Text("ordinary", [code] * batch, 1.0),
        Text("noise", noise, 20.0),
    ]


class Run:
    """An engine that answers all prompts of one kind of text. Only the steps after the first tokens
    are timed."""

    def __init__(self, gpt: GPT, text: Text, speculate: Speculation, threads: int) -> None:
        path = choose_decode_path(gpt, ComputeOptions(kernels="native"), threads=threads)
        config = EngineConfig(slots=len(text.prompts), prefill_chunk=2048, speculate=speculate)
        self.engine = Engine(gpt, config, make_decoder=path.make_decoder)
        self._seconds, self._tokens, self._drafted, self._accepted = 0.0, 0, 0, 0
        self._answers: dict[str, list[int]] = {}
        for index, prompt in enumerate(text.prompts):
            params = SamplingParams(max_tokens=TOKENS, seed=index, temperature=text.temperature)
            request = GenerationRequest(
                request_id=str(index), token_ids=tuple(prompt), params=params, prefix_reuse=False
            )
            self._answers[request.request_id] = []
            self.engine.add(request)

    def step(self) -> None:
        began = time.perf_counter()
        result = self.engine.step()
        took = time.perf_counter() - began
        given = [event for event in result.events if isinstance(event, TokenEvent)]
        for event in given:
            self._answers[event.request_id].append(event.token_id)
        if not result.prefilled_tokens:
            self._seconds, self._tokens = self._seconds + took, self._tokens + len(given)
        self._drafted += result.drafted_tokens
        self._accepted += result.accepted_tokens

    def result(self) -> Result:
        self.engine.close()
        rate = self._tokens / self._seconds
        return Result(rate, self._drafted, self._accepted, self._answers)


def run_in_turns(
    gpt: GPT, text: Text, order: list[Speculation], threads: int
) -> dict[Speculation, Result]:
    """Run both engines, one step of each in turn, so that other work on the machine affects both
    alike."""
    runs = {name: Run(gpt, text, name, threads) for name in order}
    while any(run.engine.has_work() for run in runs.values()):
        for run in runs.values():
            if run.engine.has_work():
                run.step()
    return {name: run.result() for name, run in runs.items()}


def compare(gpt: GPT, text: Text, rounds: int, threads: int) -> dict[str, Any]:
    """Medians over the rounds, and medians of the ratios within each round. The two engines swap
    their order after every round."""
    measured: list[dict[Speculation, Result]] = []
    order: list[Speculation] = ["none", "ngram"]
    for _ in range(rounds + 1):
        measured.append(run_in_turns(gpt, text, order, threads))
        order.reverse()
    del measured[0]  # it was a warm-up
    drafts, plain = [pair["ngram"] for pair in measured], [pair["none"] for pair in measured]
    if any(result.answers != plain[0].answers for result in (*drafts, *plain)):
        raise SystemExit("the answers differ")
    ratios = [
        draft.tokens_per_second / other.tokens_per_second
        for draft, other in zip(drafts, plain, strict=True)
    ]
    return {
        "text": text.name,
        "batch": len(text.prompts),
        "none": statistics.median(result.tokens_per_second for result in plain),
        "ngram": statistics.median(result.tokens_per_second for result in drafts),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "drafted": drafts[0].drafted,
        "accepted": drafts[0].accepted,
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", default="checkpoints/python-small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=31)
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    gpt, tokenizer = load(arguments.shape, getattr(torch, arguments.dtype))
    print(
        f"{describe(torch.device('cpu'))}, {arguments.threads} threads, torch {torch.__version__}"
    )
    print(f"{arguments.shape}, {arguments.dtype}; tokens per second\n")
    print("text      batch      none     ngram  ratio (least to most)  drafted accepted")
    results = []
    for batch in BATCHES:
        for text in texts(gpt, tokenizer, batch):
            compared = compare(gpt, text, arguments.rounds, arguments.threads)
            results.append(compared)
            print(
                "{text:9} {batch:5} {none:9.0f} {ngram:9.0f}  {ratio:5.2f} ".format_map(compared)
                + f"({min(compared['ratios']):.2f} to {max(compared['ratios']):.2f})        "
                + "{drafted:7} {accepted:8}".format_map(compared),
                flush=True,
            )
    where = {"shape": arguments.shape, "dtype": arguments.dtype, "threads": arguments.threads}
    print(json.dumps({**where, "results": results}))


if __name__ == "__main__":
    main()
