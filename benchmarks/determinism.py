"""Cost of batch invariance (ARCHITECTURE.md).

    python -m benchmarks.determinism [--shape 124m|30m|CHECKPOINT] [--dtype bfloat16] [--threads N]

The cost is the time that would be saved without batch invariance. There is no second decoder
without it, so each part is compared with stock torch's fastest code for the same result, which is
not batch-invariant:

decode, native  Every product of a step of one sequence, summed in the same order as in any batch,
                against torch's `F.linear` or its matrix-vector product for one row, whichever is
                faster.
                Neither torch function returns the same bits for one row as for several. Our
                products and torch's use the same weights, one matrix after the other, so that both
                read memory alike.
                The cost is the difference as a share of the whole step; it is below 0 if torch is
                slower. Kernels without batch invariance could be faster than torch's, so a bound is
                printed as well: the time of the products minus the time to read their weights once,
                at the rate at which a sum over an array reads memory. (The bound is meaningless if
                the weights stay in the processor's caches.) Attention is not compared, because one
                sequence has nothing to share with others.
sampling        Native sampling of one row, with float64 sums and a random number that depends only
                on the seed, against torch's softmax and multinomial, as a share of the same step.
decode, torch   Time of a step whose rows are padded and grouped as batch invariance requires on
                this processor, divided by the time of a step whose rows are not.
prefill         Attention block by block, against one fused causal attention; and an activation that
                computes the same bits for an element wherever it is in the tensor, against torch's
                fused activation. Both costs are shares of the prompt's time.

All measurements take turns in one process. Run it on an idle machine. The last line is JSON.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.arguments import new_parser
from benchmarks.engine_step import STEPS, engine_decoding
from benchmarks.profile import Profile, profile_engine
from benchmarks.synthetic import load_gpt
from logitd.model.benchmark.rates import Workload
from logitd.model.device import keep_freed_memory, use_threads
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kernels.eager.row_groups import RowGroups
from logitd.model.inference.kernels.select import choose_decode_path
from logitd.model.inference.kv_cache import KVCache
from logitd.model.machine import processor_name, read_bandwidth
from logitd.model.transformer.activation import activate
from logitd.model.transformer.attention import CausalAttend
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.gpt import GPT

ROUNDS, PASSES, PREFILL = 5, 20, 256
PRODUCTS = ("qkv", "attention_out", "mlp_up", "mlp_down", "head")
BATCHES = (1, 2, 3, 5, 8)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Product of a matrix (N, C) and a row (C,), plus a bias (N,)."""


@dataclass(frozen=True, slots=True)
class NativePrice:
    """Times of a step of one sequence: medians over the rounds, in seconds. `ours` and `fastest`
    map each kind of product to its time in all layers; `reading` is the time to read all
    weights."""

    step: float
    ours: dict[str, float]
    fastest: dict[str, float]
    reading: float
    sampling: float
    fastest_sampling: float

    @property
    def products(self) -> float:
        """Cost of batch invariance in products, as a share of the step. It is at most 0 if torch is
        not faster."""
        return (sum(self.ours.values()) - sum(self.fastest.values())) / self.step

    @property
    def bound(self) -> float:
        """Upper bound on the cost of batch invariance in products, whichever kernels are used."""
        return max(0.0, sum(self.ours.values()) - self.reading) / self.step

    @property
    def whole(self) -> float:
        """Cost of batch invariance in products and sampling together, as a share of the step."""
        return self.products + (self.sampling - self.fastest_sampling) / self.step


@dataclass(frozen=True, slots=True)
class PrefillPrice:
    """Costs of batch invariance in attention and in the activation, as shares of the prompt's
    time."""

    seconds: float
    attention: float
    activation: float


def matrices(gpt: GPT) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Every matrix that a decode step multiplies by, with its bias, in the step's order."""
    for block in gpt.blocks:
        for kind in PRODUCTS[:-1]:
            linear = getattr(block, kind)
            yield kind, linear.weight, linear.bias
    head, bias = gpt.head_parameters()
    vocab_size = gpt.config.vocab_size
    yield "head", head[:vocab_size], None if bias is None else bias[:vocab_size]


def by_linear(weight: Tensor, row: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(row[None], weight, bias)


def by_vector(weight: Tensor, row: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)


def one_pass(gpt: GPT, product: Product) -> dict[str, float]:
    """Seconds that each kind of product takes in a step of one row."""
    seconds = dict.fromkeys(PRODUCTS, 0.0)
    rows = {
        width: torch.randn(width).to(gpt.token_embedding.weight.dtype)
        for width in {weight.shape[1] for _, weight, _ in matrices(gpt)}
    }
    for kind, weight, bias in matrices(gpt):
        row = rows[weight.shape[1]]
        began = time.perf_counter()
        product(weight, row, bias)
        seconds[kind] += time.perf_counter() - began
    return seconds


@torch.inference_mode()
def fastest_products(gpt: GPT) -> dict[str, float]:
    """Seconds for each kind of product in torch. Takes the median over several passes for each of
    two functions, then the smaller of the two medians."""
    fastest = dict.fromkeys(PRODUCTS, float("inf"))
    for product in (by_linear, by_vector):
        passes = [one_pass(gpt, product) for _ in range(PASSES)]
        for kind in PRODUCTS:
            fastest[kind] = min(
                fastest[kind],
                statistics.median(seconds_by_product[kind] for seconds_by_product in passes),
            )
    return fastest


@torch.inference_mode()
def fastest_sampling(gpt: GPT) -> float:
    """Seconds that torch takes to sample one row."""
    logits = torch.randn(1, gpt.config.vocab_size)
    return median_seconds(lambda: torch.multinomial(logits.softmax(-1), 1))


def native_price(gpt: GPT, threads: int) -> NativePrice | None:
    """Measure the native decoder. Returns None if the model is not decoded natively."""
    path = choose_decode_path(gpt, threads=threads)
    if not path.name.startswith("native"):
        return None
    profiles, products, samplings = list[Profile](), list[dict[str, float]](), list[float]()
    for _ in range(ROUNDS):
        profiles.append(profile_engine(path.make_decoder, gpt, workload(gpt))[1])
        products.append(fastest_products(gpt))
        samplings.append(fastest_sampling(gpt))
    read = sum(
        weight.nbytes + (0 if bias is None else bias.nbytes) for _, weight, bias in matrices(gpt)
    )
    return NativePrice(
        step=statistics.median(profile.step_us for profile in profiles) / 1e6,
        ours={
            kind: statistics.median(in_stage(profile, kind) for profile in profiles)
            for kind in PRODUCTS
        },
        fastest={
            kind: statistics.median(seconds_of[kind] for seconds_of in products)
            for kind in PRODUCTS
        },
        reading=read / read_bandwidth(torch.device("cpu")),
        sampling=statistics.median(in_stage(profile, "sampling") for profile in profiles),
        fastest_sampling=statistics.median(samplings),
    )


def in_stage(profile: Profile, stage: str) -> float:
    return profile.stages_us[stage] / 1e6


def workload(gpt: GPT) -> Workload:
    """A workload of one sequence, long enough to measure STEPS steps if the context has room for
    them."""
    prompt = prompt_length(gpt)
    return Workload(
        batches=(1,),
        prompt_tokens=prompt,
        tokens=min(2 * STEPS, gpt.config.context_length - prompt),
        rounds=1,
        vocab_size=gpt.config.vocab_size,
    )


def prompt_length(gpt: GPT) -> int:
    """Number of prompt tokens: PREFILL, or half of the context if that is less, rounded down to
    whole blocks."""
    return max(BLOCK, min(PREFILL, gpt.config.context_length // 2) // BLOCK * BLOCK)


def padding_price(gpt: GPT, sequences: int) -> float:
    """Time of a step in plain torch with padded rows, divided by the time without padding: the
    median over rounds in which the two take turns."""
    as_they_are = partial(PlainDecoder, row_groups=RowGroups(1, sequences))
    ratios = []
    for _ in range(ROUNDS):
        padded, free = (
            median_seconds(engine_decoding(gpt, sequences, 0, make_decoder).step)
            for make_decoder in (PlainDecoder, as_they_are)
        )
        ratios.append(padded / free)
    return statistics.median(ratios)


@torch.inference_mode()
def prefill_price(gpt: GPT) -> PrefillPrice:
    """Measure a prompt of several blocks, computed without the head."""
    config, length = gpt.config, prompt_length(gpt)
    weight = gpt.token_embedding.weight
    cache = KVCache(config, 1, device=weight.device, dtype=weight.dtype)
    ids = torch.randint(config.vocab_size, (1, length))
    positions = torch.arange(length)[None]
    up = torch.randn(1, length, gpt.blocks[0].mlp_up.out_features).to(weight.dtype)  # type: ignore[union-attr, arg-type]
    times = dict[str, list[float]]()
    for _ in range(ROUNDS):
        for name, run in (
            ("blocks", lambda: gpt.transform(ids, positions, cache.prefill(0, 0))),
            ("fused", lambda: gpt.transform(ids, positions, CausalAttend())),
            ("spelled", lambda: activate(up, config.activation, fused=False)),
            ("torch's", lambda: activate(up, config.activation, fused=True)),
        ):
            times.setdefault(name, []).append(median_seconds(run, 5))
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    return PrefillPrice(
        seconds=middle["blocks"],
        attention=1 - middle["fused"] / middle["blocks"],
        activation=config.n_layer * (middle["spelled"] - middle["torch's"]) / middle["blocks"],
    )


def median_seconds(run: Callable[[], object], times: int = STEPS) -> float:
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def show_native(price: NativePrice) -> None:
    print(f"\ndecode, native, one sequence: a step of {1e6 * price.step:,.0f} us")
    print("product           ours us  fastest us  of the step")
    for kind in PRODUCTS:
        ours, fastest = price.ours[kind], price.fastest[kind]
        print(f"{kind:16} {1e6 * ours:8.0f} {1e6 * fastest:11.0f} "
              f"{(ours - fastest) / price.step:+12.1%}")  # fmt: skip
    print(f"{'sampling':16} {1e6 * price.sampling:8.0f} {1e6 * price.fastest_sampling:11.0f} "
          f"{(price.sampling - price.fastest_sampling) / price.step:+12.1%}")  # fmt: skip
    print(f"products {price.products:+.1%}, with the sampling {price.whole:+.1%} of the step")
    print(f"at most {price.bound:.1%}: the time of the products beyond reading their weights")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shape", default="checkpoints/python-small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    keep_freed_memory()
    gpt = load_gpt(arguments.shape, getattr(torch, arguments.dtype))
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}; "
          f"{arguments.shape}, {arguments.dtype}")  # fmt: skip
    prefill = prefill_price(gpt)
    padding = {count: padding_price(gpt, count) for count in BATCHES}
    native = native_price(gpt, arguments.threads)
    if native is not None:
        show_native(native)
    print("\ndecode, torch: sequences, a step with padded rows over one without")
    for count, ratio in padding.items():
        print(f"{count:9}  {ratio:.2f}")
    print(f"\nprefill of {prompt_length(gpt)}: {1e3 * prefill.seconds:.1f} ms, attention in blocks "
          f"{prefill.attention:+.1%}, activation {prefill.activation:+.1%}")  # fmt: skip
    kept = None
    if native is not None:
        kept = {
            **asdict(native),
            "products_share": native.products,
            "whole_share": native.whole,
            "bound_share": native.bound,
        }
    print(json.dumps({"shape": arguments.shape, "dtype": arguments.dtype,
                      "threads": arguments.threads, "native": kept, "padding_ratio": padding,
                      "prefill": asdict(prefill)}))  # fmt: skip


if __name__ == "__main__":
    main()
