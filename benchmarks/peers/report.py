"""Tables of a comparison, in Markdown, with a row for each peer and a column for each batch size.
The last row of each dtype has the ratio of logitd's rate to the best peer's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Figures of one peer in one dtype at one batch size. The lists have one number for each round;
    `step_seconds` has the median time of a step."""

    dtype: str
    peer: str
    batch: int
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    step_seconds: list[float]
    prefill_seconds: list[float]
    disagreement: float


Rate = Callable[[Result], float]


def report(results: list[Result], batches: tuple[int, ...], ours: str) -> str:
    """The tables of decode and prefill rates."""
    decode = table(results, batches, ours, lambda result: result.decode_tokens_per_second)
    prefill = table(results, batches, ours, lambda result: result.prefill_tokens_per_second)
    return f"Decode, tokens per second\n\n{decode}\n\nPrefill, tokens per second\n\n{prefill}"


def table(results: list[Result], batches: tuple[int, ...], ours: str, rate: Rate) -> str:
    """A table of rates; a cell is empty if the peer has no rate at that batch size."""
    lines = [
        f"| | {' | '.join(f'batch {batch}' for batch in batches)} |",
        f"|---|{'---:|' * len(batches)}",
    ]
    for dtype in dict.fromkeys(result.dtype for result in results):
        lines += rows([r for r in results if r.dtype == dtype], dtype, batches, ours, rate)
    return "\n".join(lines)


def rows(
    results: list[Result], dtype: str, batches: tuple[int, ...], ours: str, rate: Rate
) -> Iterator[str]:
    """The rows of one dtype."""
    rates = {(result.peer, result.batch): rate(result) for result in results}
    for peer in dict.fromkeys(result.peer for result in results):
        cells = (
            f"{rates[peer, batch]:,.0f}" if (peer, batch) in rates else "" for batch in batches
        )
        yield f"| {peer}, {dtype} | {' | '.join(cells)} |"
    ratios = (against_the_best(rates, batch, ours) for batch in batches)
    yield f"| *{ours} over the best other, {dtype}* | {' | '.join(ratios)} |"


def against_the_best(rates: dict[tuple[str, int], float], batch: int, ours: str) -> str:
    """Our rate divided by the best other peer's, as `1.25 (NAME)`; empty if either is missing."""
    others = {peer: rate for (peer, b), rate in rates.items() if b == batch and peer != ours}
    if not others or (ours, batch) not in rates:
        return ""
    best = max(others, key=lambda peer: others[peer])
    return f"{rates[ours, batch] / others[best]:.2f} ({best})"
