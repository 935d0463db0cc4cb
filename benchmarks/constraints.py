"""Cost of constraints per step and per mask.

    python -m benchmarks.constraints [--checkpoint DIRECTORY] [--threads N] [--dtype D]

Steps: 1, 8 and 32 sequences that all write JSON matching a schema are compared with the same number
of sequences without a constraint. The two kinds of step alternate in one process. The time spent in
the matchers is printed as a share of the time of a step. Masks: the time to advance by one token
and compute the next mask, with the checkpoint's vocabulary and with a made-up vocabulary of 50,000
tokens. Run it on an idle machine. The last line is JSON.
"""

import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import new_parser
from benchmarks.engine_step import STEPS, engine_decoding
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.device import choose_placement, describe, use_threads
from logitd.model.inference.constraints.compiler import Compiler, Constraint, Source
from logitd.model.inference.constraints.protocol import TokenMatcher
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.text.tokenizer import SPLIT_PATTERN, Tokenizer
from logitd.model.transformer.gpt import GPT

ROUNDS, LARGE = 5, 50_000

SCHEMA = {
    "type": "array",
    "minItems": 10_000,  # so that no sequence ends while it is measured
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["module", "class", "function"]},
            "line": {"type": "integer", "minimum": 1},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}},
        },
        "required": ["name", "kind", "line"],
        "additionalProperties": False,
    },
}


class TimedMatcher:
    """A matcher that adds up the time of its calls."""

    def __init__(self, matcher: TokenMatcher, clock: "MatcherClock") -> None:
        self._matcher = matcher
        self._clock = clock

    @property
    def complete(self) -> bool:
        return self._matcher.complete

    def prepare(self) -> bool:
        return self._matcher.prepare()

    def allowed(self) -> Any:
        with self._clock:
            return self._matcher.allowed()

    def advance(self, token_id: int) -> None:
        with self._clock:
            self._matcher.advance(token_id)


class MatcherClock:
    """A constraint, and the time spent in its matchers."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began

    @property
    def kind(self) -> str:
        return self.constraint.kind

    @property
    def vocab_size(self) -> int:
        return self.constraint.vocab_size

    def matcher(self) -> TokenMatcher:
        return TimedMatcher(self.constraint.matcher(), self)


def steps(gpt: GPT, sequences: int, constraint: MatcherClock | None = None) -> tuple[float, float]:
    """Median microseconds of a step in which all sequences decode, and of its matchers."""
    path = choose_decode_path(gpt, threads=torch.get_num_threads())
    engine = engine_decoding(gpt, sequences, make_decoder=path.make_decoder, constraint=constraint)
    whole, matching = [], []
    for _ in range(STEPS):
        if constraint is not None:
            constraint.seconds = 0.0
        began = time.perf_counter()
        if engine.step().decoded_sequences < sequences:
            continue  # some masks did not fit into the step (MASK_SECONDS)
        whole.append(1e6 * (time.perf_counter() - began))
        matching.append(0.0 if constraint is None else 1e6 * constraint.seconds)
    engine.close()
    return statistics.median(whole), statistics.median(matching)


@dataclass(frozen=True)
class Cost:
    """Times of a step in which every sequence has a constraint, and of a step without
    constraints."""

    sequences: int
    free_us: float
    constrained_us: float
    matching_us: float

    @property
    def share(self) -> float:
        """Share of a constrained step spent in the matchers."""
        return self.matching_us / self.constrained_us

    @property
    def ratio(self) -> float:
        return self.constrained_us / self.free_us


def cost_of_steps(gpt: GPT, constraint: MatcherClock, sequences: int) -> Cost:
    """Measure both kinds of step alternately. Returns the medians of the rounds."""
    rounds = [(steps(gpt, sequences)[0], *steps(gpt, sequences, constraint)) for _ in range(ROUNDS)]
    return Cost(sequences, *(statistics.median(column) for column in zip(*rounds, strict=True)))


def large_tokenizer() -> Tokenizer:
    """A tokenizer of LARGE tokens: all bytes, then made-up words and pieces of words."""
    rng = random.Random(0)
    tokens = {bytes([byte]): byte for byte in range(256)}
    letters = "etaoinshrdlcumwfgypbvkxjqz"
    while len(tokens) < LARGE:
        word = "".join(rng.choices(letters, range(len(letters), 0, -1), k=rng.randint(2, 9)))
        first, last = rng.choice(["", " ", " ", '"', "_"]), rng.choice(["", "", "", '"', ":", ","])
        tokens.setdefault((first + word + last).encode(), len(tokens))
    return Tokenizer(ranks=tokens, pattern=SPLIT_PATTERN, special_tokens={})


def mask_times(constraint: Constraint, tokens: int) -> list[float]:
    """Times in microseconds, sorted, to advance by one token and compute the next mask, along
    random texts."""
    rng, times = random.Random(0), []
    matcher = constraint.matcher()
    allowed = matcher.allowed()
    for _ in range(tokens):
        token_id = rng.choice(allowed.nonzero()[0].tolist())
        began = time.perf_counter()
        matcher.advance(token_id)
        allowed = matcher.allowed()
        times.append(1e6 * (time.perf_counter() - began))
    return sorted(times)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/python-small"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    placement = choose_placement("cpu", arguments.dtype, arguments.threads)
    use_threads(placement.threads)
    info, gpt = load_checkpoint(
        arguments.checkpoint, device=placement.device, dtype=placement.dtype
    )
    source = Source("json_schema", json.dumps(SCHEMA))
    small = Compiler(info.tokenizer).compile(source)
    clock = MatcherClock(small)
    costs = [cost_of_steps(gpt, clock, count) for count in (1, 8, 32)]
    times_of_masks = {
        size: mask_times(constraint, 1000)
        for size, constraint in (
            (info.tokenizer.vocab_size, small),
            (LARGE, Compiler(large_tokenizer()).compile(source)),
        )
    }
    where = f"{describe(placement.device)}, {placement.threads} threads, torch {torch.__version__}"
    print(f"{info.name}, {gpt.parameter_count():,} parameters, {arguments.dtype}; {where}\n")
    print("sequences    free us  JSON us  matchers us  share  JSON / free")
    for cost in costs:
        print(
            f"{cost.sequences:9}  {cost.free_us:9.0f} {cost.constrained_us:8.0f} "
            f"{cost.matching_us:12.0f} {cost.share:6.1%} {cost.ratio:12.2f}"
        )
    print("\nvocabulary  advance and mask us: median     99 %  longest")
    for size, times in times_of_masks.items():
        print(
            f"{size:10} {times[len(times) // 2]:28.0f} {times[len(times) * 99 // 100]:8.0f} "
            f"{times[-1]:8.0f}"
        )
    print(
        json.dumps(
            {
                "matcher_share": {cost.sequences: cost.share for cost in costs},
                "json_over_free": {cost.sequences: cost.ratio for cost in costs},
                "mask_us": {size: times[len(times) // 2] for size, times in times_of_masks.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
