"""Wanted: what the figures of an H200-class card should be, and where they are read from."""

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.goals.wanted import Goal
from benchmarks.gpu.plan import Finding, Plan

DECODE_OF_ONE = {"124m": 0.35, "1.5b": 0.75}
"""Share of the time in which the card reads weights and live keys and values: the small model is
bound by launches, the large one should be by memory."""
OVER_TRANSFORMERS = {1: 3.0, 64: 5.0}
"""By sequences at once."""
PREFILL = 0.5
TRAINING = 0.5
"""Shares of the card's matrix rate."""
OVER_HTTP = 0.9
"""Share of the engine's own rate, where it makes about ten thousand tokens a second."""


def goals(plan: Plan) -> Iterator[Goal]:
    """All of them, for the shapes and batches of a plan; `Goal.part` is the whole benchmark."""
    names = list(plan.shapes)
    for name in names:
        yield Goal(
            f"{name}: decode of 1, of the limit",
            "gpu",
            partial(figure, part="decode", case=f"{name} graphs, 1 at once", key="share_of_limit"),
            DECODE_OF_ONE.get(name, DECODE_OF_ONE["1.5b"]),
            "share",
        )
    yield Goal(f"{names[-1]}: prefill, of the matrix rate", "gpu",
               partial(figure, part="prefill", case=f"{names[-1]} graphs", key="share_of_limit"),
               PREFILL, "share")  # fmt: skip
    for name in names:
        for batch, bound in OVER_TRANSFORMERS.items():
            yield Goal(f"{name}: decode of {batch}, over transformers", "gpu",
                       partial(over_transformers, name=name, batch=batch), bound,
                       "ratio")  # fmt: skip
    yield Goal(f"{names[0]}: over HTTP, of the engine", "gpu", over_http, OVER_HTTP, "share")
    yield Goal(f"{names[0]}: training, of the matrix rate", "gpu",
               partial(figure, part="training", case="", key="mfu"), TRAINING,
               "share")  # fmt: skip


def figure(found: Sequence[Finding], *, part: str, case: str, key: str) -> float | None:
    """The largest of a part's cases that begin so; None where none was measured."""
    figures = [
        float(one.figures[key])
        for one in found
        if one.part == part and one.case.startswith(case) and key in one.figures
    ]
    return max(figures, default=None)


def over_transformers(found: Sequence[Finding], *, name: str, batch: int) -> float | None:
    """Tokens per second over theirs, whose time of a step has a share of the prefill in it."""
    ours = figure(
        found, part="decode", case=f"{name} graphs, {batch} at once", key="tokens_per_second"
    )
    theirs = figure(
        found, part="transformers", case=f"{name}, {batch} at once", key="tokens_per_second"
    )
    return None if ours is None or theirs is None else ours / theirs


def over_http(found: Sequence[Finding]) -> float | None:
    """The better place of the engine, at the batch whose engine is nearest to ten thousand tokens a
    second."""
    cases = [one.figures for one in found if one.part == "http"]
    if not cases:
        return None
    near = min(cases, key=lambda one: abs(one["engine"] - 10_000))
    return float(max(near["thread"], near["process"]) / near["engine"])
