"""Targets: what the figures of an H200-class card should be, and where they are read from."""

from collections.abc import Iterator, Sequence

from benchmarks.gpu.plan import Finding, Plan
from benchmarks.targets import Target

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


def targets(plan: Plan, findings: Sequence[Finding]) -> Iterator[Target]:
    """Each target with its figure, for the shapes and batches of a plan."""
    names = list(plan.shapes)
    for name in names:
        share = figure(findings, "decode", f"{name} graphs, 1 at once", "share_of_limit")
        bound = DECODE_OF_ONE.get(name, DECODE_OF_ONE["1.5b"])
        yield Target(f"{name}: decode of 1, of the limit", share, bound, "share")
    share = figure(findings, "prefill", f"{names[-1]} graphs", "share_of_limit")
    yield Target(f"{names[-1]}: prefill, of the matrix rate", share, PREFILL, "share")
    for name in names:
        for batch, bound in OVER_TRANSFORMERS.items():
            ratio = over_transformers(findings, name, batch)
            yield Target(f"{name}: decode of {batch}, over transformers", ratio, bound, "ratio")
    yield Target(f"{names[0]}: over HTTP, of the engine", over_http(findings), OVER_HTTP, "share")
    share = figure(findings, "training", "", "mfu")
    yield Target(f"{names[0]}: training, of the matrix rate", share, TRAINING, "share")


def figure(findings: Sequence[Finding], part: str, case: str, key: str) -> float | None:
    """The largest of a part's cases that begin so; None where none was measured."""
    figures = [
        float(finding.figures[key])
        for finding in findings
        if finding.part == part and finding.case.startswith(case) and key in finding.figures
    ]
    return max(figures, default=None)


def over_transformers(findings: Sequence[Finding], name: str, batch: int) -> float | None:
    """Tokens per second over theirs, whose time of a step has a share of the prefill in it."""
    ours = figure(findings, "decode", f"{name} graphs, {batch} at once", "tokens_per_second")
    theirs = figure(findings, "transformers", f"{name}, {batch} at once", "tokens_per_second")
    return None if ours is None or theirs is None else ours / theirs


def over_http(findings: Sequence[Finding]) -> float | None:
    """Share over HTTP at the batch whose engine is nearest to ten thousand tokens a second."""
    cases = [finding.figures for finding in findings if finding.part == "http"]
    if not cases:
        return None
    near = min(cases, key=lambda case: abs(case["engine"] - 10_000))
    return float(near["tokens_per_second"] / near["engine"])
