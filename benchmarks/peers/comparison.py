"""Comparison: chooses the peers, checks their results, and measures them one after the other in
each round.

The weights are saved once, and all peers read them. The peers of a dtype are loaded together, then
checked against the model's plain forward pass, then measured.
"""

import math
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.contract import Run, disagreement
from benchmarks.peers.huggingface import write_huggingface
from benchmarks.peers.options import Interpreters
from benchmarks.peers.process import PeerFailed, PeerMissing, PeerProcess
from benchmarks.peers.report import Result
from benchmarks.peers.weights import HUGGINGFACE, save_weights
from benchmarks.shapes import Shape
from benchmarks.synthetic import config_of, synthetic_gpt
from logitd.model.transformer.gpt import GPT

LOGITD = "logitd"
MODULES = {
    LOGITD: "logitd_engine",
    "torch": "plain_torch",
    "transformers": "transformers_generate",
    "transformers-continuous": "transformers_continuous",
    "llama.cpp": "llama_cpp_batch",
    "openvino": "openvino_batch",
    "ctranslate2": "ctranslate2_generator",
}
BY_NAME = {"transformers-continuous"}
"""Peers that are measured only if they are named, because they take a long time to compute the
prompts of 32 sequences."""
FOREIGN = {"llama.cpp", "openvino", "ctranslate2"}
"""Peers that run in the interpreter given by --peer-python."""
FROM_HUGGINGFACE = {"openvino", "ctranslate2"}
"""Peers that read the folder in Hugging Face's format."""
NOT_QUANTIZED = {"torch", "transformers", "transformers-continuous"}
"""Peers that are not measured in int8 and int4, because they would need more packages."""
QUANTIZED = ("int8", "int4")
LIMITS = {
    "gpt2": {"float32": 0.005, "bfloat16": 0.03, "int8": 0.05, "int4": 0.2},
    "llama": {"float32": 0.01, "bfloat16": 0.03, "int8": 0.12, "int4": 0.4},
}
"""Tolerance of a peer's log-probabilities (`contract.disagreement`). In float32 llama.cpp is the
least exact: its flash attention rounds to float16, and its GELU is a float16 table. int4 changes
random weights so much that only gross errors show; the code that int4 shares with int8 is checked
more strictly in int8."""
DTYPES = tuple(LIMITS["gpt2"])
SHARPER = {"learned": 3.0, "rotary": 1.5}
"""Factor by which the weights of queries, keys and values are larger than in a new model, for each
kind of positions."""
CALMER = 0.2
"""Factor that scales down the outputs of a Llama's blocks. Without SHARPER and CALMER, 24 layers of
random weights amplify any rounding until the logprobs differ completely (by 0.5 in bfloat16). With
both, "llama-416m" is off by 0.009 in bfloat16 and by 0.036 in 8 bits, but rotary channels in the
wrong order are still off by 0.28."""
CHECKED = 1024
"""Maximum number of prompt ids on which peers are checked. The plain forward pass has no cache and
needs a lot of memory for long prompts."""
WARM_UP = 4
"""Number of steps at the start of each round that are not counted."""
MOST_TIMES = 4
"""Smaller batches get more rounds than the largest one, but at most this many times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a comparison."""

    shape: Shape
    dtypes: tuple[str, ...]
    peers: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    steps: int
    rounds: int  # for the largest batch
    threads: int
    peer_pythons: Interpreters


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


def make_weights(shape: Shape, folder: Path) -> GPT:
    """Save random weights of this shape for all peers, and return them as a GPT in float32."""
    gpt = synthetic_gpt(config_of(shape))
    make_everything_matter(gpt)
    tensors = {name: value.numpy() for name, value in gpt.state_dict().items()}
    embedding = tensors["token_embedding.weight"]
    save_weights(
        folder, shape, {**tensors, "token_embedding.weight": embedding[: shape.vocab_size]}
    )
    return gpt


def make_everything_matter(gpt: GPT) -> None:
    """Change a new model so that all of its parts matter. In a new model, norms and biases have no
    effect and attention is almost uniform, so a peer that omits any of them would look correct.
    Speed does not depend on the values of the weights."""
    generator = torch.Generator().manual_seed(0)
    rotary = gpt.config.positions == "rotary"
    for name, parameter in gpt.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1, generator=generator)
        elif name.endswith("qkv.weight"):
            parameter.mul_(SHARPER[gpt.config.positions])
        elif rotary and name.endswith(("attention_out.weight", "mlp_down.weight")):
            parameter.mul_(CALMER)


def expected_logprobs(gpt: GPT, ids: list[int]) -> NDArray[np.float64]:
    """Expected log-probabilities of the token after `ids`, by one forward pass without a cache."""
    logits = gpt(torch.tensor([ids])).logits[0, -1]
    return logits.double().log_softmax(-1).numpy()


def start(name: str, dtype: str, plan: Plan, folder: Path) -> PeerProcess:
    python = plan.peer_pythons.of(name) if name in FOREIGN else sys.executable
    return PeerProcess(python, MODULES[name], folder=folder, dtype=dtype, threads=plan.threads)


class Comparison:
    """Checks and measures the peers of one dtype. A peer that fails is reported and left out. The
    comparison ends if the logprobs of any peer are wrong. It also ends if logitd fails, because
    then there is nothing to compare with."""

    def __init__(self, plan: Plan, dtype: str, folder: Path) -> None:
        self._plan = plan
        self._dtype = dtype
        self._folder = folder
        self._processes: dict[str, PeerProcess] = {}
        self._disagreements: dict[str, float] = {}

    def start(self, closing: ExitStack, ids: list[int], expected: NDArray[np.float64]) -> None:
        """Load the peers, and check that their logprobs agree with the plain forward pass."""
        for name in self._plan.peers:
            if self._dtype in QUANTIZED and name in NOT_QUANTIZED:
                continue
            try:
                process = start(name, self._dtype, self._plan, self._folder)
                closing.callback(process.close)
                distance = disagreement(process.logprobs(ids), expected)
            except (PeerMissing, PeerFailed) as error:
                self._leave_out(name, error)
                continue
            limit = LIMITS[self._plan.shape.family][self._dtype]
            if not distance <= limit:
                raise SystemExit(
                    f"{name} disagrees with the plain forward pass: off by {distance:.2g}, {limit=}"
                )
            self._processes[name] = process
            self._disagreements[name] = distance
            print(f"{self._dtype}: {name} is {process.about}; off by {distance:.1e}", flush=True)

    def measure(self, prompts: list[list[int]]) -> list[Result]:
        """Measure one batch size: the peers take turns. The first turn of each is not counted,
        because it allocates memory."""
        runs: dict[str, list[Run]] = {name: [] for name in self._processes}
        for _ in range(1 + rounds_of(self._plan, len(prompts))):
            for name, process in list(self._processes.items()):
                try:
                    runs[name].append(process.run(prompts, WARM_UP + self._plan.steps))
                except PeerFailed as error:
                    del self._processes[name]
                    self._leave_out(name, error)
        return [
            summarize(runs[name][1:], self._dtype, name, prompts, self._disagreements[name])
            for name in self._processes
        ]

    def _leave_out(self, name: str, error: Exception) -> None:
        if name == LOGITD:
            raise error
        print(f"{self._dtype}: {name} is left out: {error}", flush=True)


def rounds_of(plan: Plan, batch: int) -> int:
    """Number of rounds of a batch size. Smaller batches have more rounds, because they take less
    time, so a brief load on the machine distorts them more."""
    return plan.rounds * min(math.isqrt(max(plan.batches) // batch), MOST_TIMES)


def summarize(
    runs: list[Run], dtype: str, peer: str, prompts: list[list[int]], disagreement: float
) -> Result:
    """Combine the rounds of one peer."""
    steps = [statistics.median(run.step_seconds[WARM_UP:]) for run in runs]
    prefills = [run.prefill_seconds for run in runs]
    batch = len(prompts)
    return Result(
        dtype=dtype,
        peer=peer,
        batch=batch,
        decode_tokens_per_second=batch / statistics.median(steps),
        prefill_tokens_per_second=batch * len(prompts[0]) / statistics.median(prefills),
        step_seconds=steps,
        prefill_seconds=prefills,
        disagreement=disagreement,
    )


def compare(plan: Plan) -> list[Result]:
    """Run the whole comparison."""
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpt = make_weights(plan.shape, folder)
        prompts = random_prompts(max(plan.batches), plan.prompt, plan.shape.vocab_size)
        checked = prompts[0][:CHECKED]
        expected = expected_logprobs(gpt, checked)
        if FROM_HUGGINGFACE.intersection(plan.peers):
            write_huggingface(folder / HUGGINGFACE, gpt)
        del gpt
        for dtype in plan.dtypes:
            with ExitStack() as closing:
                comparison = Comparison(plan, dtype, folder)
                comparison.start(closing, checked, expected)
                for batch in plan.batches:
                    measured = comparison.measure(prompts[:batch])
                    rates = (f"{r.peer} {r.decode_tokens_per_second:,.0f}" for r in measured)
                    print(f"{dtype}, batch {batch}, tokens/s: {', '.join(rates)}", flush=True)
                    results += measured
    return results
