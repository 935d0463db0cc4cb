"""Compare logitd's decode and prefill with its peers', side by side on the same weights.

    python -m benchmarks.peers [--shape 124m|30m] [--threads N] [--peer-python [NAME=]PYTHON ...]

Peers: a loop in plain torch, transformers' `generate`, llama.cpp, OpenVINO GenAI, CTranslate2, and
transformers' continuous batching if --peers names it. A peer is left out, with a message, if its
package is missing, if it fails, or if it does not support the dtype or shape. llama.cpp, OpenVINO
and CTranslate2 are run by PYTHON, an interpreter of another environment
(benchmarks/peers/README.md). With NAME=, PYTHON is for that peer only.

For each dtype, all peers get the same random weights and the same prompts. First they must agree
with logitd's plain float32 forward pass about the next token. Then they are measured in turn, each
in its own process, which sleeps while the others are measured. A round computes the prompts from
scratch, and then runs STEPS decode steps. Prefill is the time from sending a batch of prompts until
the last of them has its first token. Decode is the median of the steps after that, without the
first few. Both are medians over the rounds. All peers draw at temperature 1 from the whole
vocabulary, with their own samplers. Run it on an idle machine. The last line is JSON.
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
    """Parse the command line into a plan."""
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
            f"prompts of {arguments.prompt} tokens and their continuations take up to {needed} "
            f"positions, but the shape has {shape.context_length}: lower --steps or --prompt"
        )
    if LOGITD not in arguments.peers:
        parser.error(f"--peers lists the peers to compare with, but includes {LOGITD} itself")
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
