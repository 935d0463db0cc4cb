"""Compare logitd's decode and prefill with its peers', side by side on the same weights.

    python -m benchmarks.peers [--shape 124m|30m] [--threads N] [--peer-python [NAME=]PYTHON ...]

Peers: a loop in plain torch, transformers' `generate`, llama.cpp, OpenVINO GenAI, CTranslate2, and,
where --peers names it, transformers' continuous batching. A peer whose package is missing is left
out, and so is one that fails or that has no such dtype or shape; all are said. The last three but
one are run by PYTHON, an interpreter of an environment of its own (benchmarks/README.md makes
them); with NAME= that of one peer.

For each dtype all peers get the same random weights and the same prompts, and first have to agree
with logitd's plain float32 forward about the next token. Then they are measured in turns, each in a
process of its own that sleeps meanwhile: in each round the prompts anew, then STEPS decode steps.
Prefill is the time from a batch of prompts to the first token of the last of them; decode is the
median step after that, the first few left out. Both as medians over the rounds. Everybody draws at
temperature 1 from the whole vocabulary, in a way of its own. Run it on a machine that does nothing
else; the last line is JSON.
"""

import json
import sys
from dataclasses import asdict

import torch

from benchmarks.peers.comparison import BY_NAME, DTYPES, LOGITD, MODULES, WARM_UP, Plan, compare
from benchmarks.peers.options import Interpreters, comparison_parser
from benchmarks.peers.report import report
from benchmarks.shapes import SHAPES
from logitd.model.device import describe, use_threads


def parse(argv: list[str]) -> Plan:
    """The plan of a command line."""
    parser = comparison_parser(__doc__, "benchmarks.peers", shape="124m")
    peers = [name for name in MODULES if name not in BY_NAME]
    parser.add_argument("--peers", nargs="+", choices=MODULES, default=peers)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args(argv)
    shape = SHAPES[arguments.shape]
    needed = arguments.prompt + WARM_UP + arguments.steps + max(arguments.batches) + 1
    if needed > shape.context_length:
        parser.error(
            f"prompts of {arguments.prompt} and what follows take up to {needed} positions, and the"
            f" shape has {shape.context_length}: ask for fewer --steps or a shorter --prompt"
        )
    if LOGITD not in arguments.peers:
        parser.error(f"--peers names whom {LOGITD} is compared with, and {LOGITD} itself")
    return Plan(
        shape=shape,
        dtypes=tuple(arguments.dtypes),
        peers=tuple(arguments.peers),
        batches=tuple(arguments.batches),
        prompt=arguments.prompt,
        steps=arguments.steps,
        rounds=arguments.rounds,
        threads=arguments.threads,
        peer_pythons=Interpreters.of_options(arguments.peer_python),
    )


def main(argv: list[str]) -> None:
    plan = parse(argv)
    use_threads(plan.threads)
    where = f"{describe(torch.device('cpu'))}, {plan.threads} threads, torch {torch.__version__}"
    print(f"{where}; {plan.shape}; prompts of {plan.prompt} ids")
    results = compare(plan)
    print(f"\n{report(results, plan.batches, LOGITD)}\n")
    print(json.dumps({"shape": asdict(plan.shape), "threads": plan.threads,
                      "prompt": plan.prompt, "results": [asdict(r) for r in results]}))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
