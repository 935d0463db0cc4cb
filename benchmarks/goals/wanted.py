"""Wanted: what each figure should be, where it is read from, and the table of what became of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from benchmarks.goals.parts import BUNDLED, NUMBERS, OVER_HTTP, Plan

Unit = Literal["share", "ratio", "us", "s", "MB"]
Measure = Callable[[Any], float | None]
"""From a part's JSON to a figure; None where it has none."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure of a part should be at least, or at most."""

    name: str
    part: str
    measure: Measure
    bound: float
    unit: Unit
    at_least: bool = True

    def reached(self, figure: float) -> bool:
        return figure >= self.bound if self.at_least else figure <= self.bound


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is wanted."""

    decode_of_one: float  # share of the machine's limit
    over_others: Mapping[tuple[str, str, int], float]  # shape, numbers, batch: decode rates
    prefill_over_others: float
    over_transformers: float
    over_http: float  # share of the engine's rate, at the largest batch
    overhead_us: Mapping[int, float]  # of a step of the bundled model, which has six layers
    determinism: float  # share of a step of one sequence
    ready: float  # seconds
    besides: float  # MB


GOALS = Bounds(
    decode_of_one=0.85,
    over_others={
        ("124m", "bfloat16", 8): 1.7,
        ("124m", "bfloat16", 32): 1.5,
        ("124m", "int8", 8): 3.0,
        ("124m", "int8", 32): 3.0,
        ("30m", "bfloat16", 8): 2.0,
        ("30m", "bfloat16", 32): 2.0,
    },
    prefill_over_others=1.15,
    over_transformers=1.0,
    over_http=0.95,
    overhead_us={1: 150.0, 32: 400.0},
    determinism=0.1,
    ready=3.0,
    besides=500.0,
)
"""To be ahead of everybody by so much, and so near to what the machine allows."""


def goals(plan: Plan, bounds: Bounds = GOALS) -> Iterator[Goal]:
    for shape in plan.shapes:
        for numbers in NUMBERS:
            name, part = f"{shape}, {numbers}", f"bench-{shape}-{numbers}"
            yield Goal(
                f"{name}: decode of 1, of the limit",
                part,
                partial(share_of_limit, kind="decode", key="batch", value=1),
                bounds.decode_of_one,
                "share",
            )
            if numbers == OVER_HTTP:
                largest = plan.batches[-1]
                yield Goal(
                    f"{name}: over HTTP, {largest} streams, of the engine",
                    part,
                    partial(share_of_engine, batch=largest),
                    bounds.over_http,
                    "share",
                )
    yield from overhead_goals(plan, bounds)
    for shape in plan.shapes:
        yield Goal(f"{shape}: what determinism costs a step of 1", f"determinism-{shape}",
                   determinism, bounds.determinism, "share", at_least=False)  # fmt: skip
        part = f"footprint-{shape}"
        yield Goal(f"{shape}: server ready", part, ready, bounds.ready, "s", at_least=False)
        yield Goal(f"{shape}: memory besides weights and KV cache", part, besides_mb,
                   bounds.besides, "MB", at_least=False)  # fmt: skip
        if shape != BUNDLED:
            yield from peer_goals(plan, shape, bounds)


def overhead_goals(plan: Plan, bounds: Bounds) -> Iterator[Goal]:
    for batch in sorted({plan.batches[0], plan.batches[-1]}):
        yield Goal(
            f"{plan.shapes[-1]}: a step of {batch}, outside the model and the sampling",
            "profile",
            partial(overhead_us, batch=batch),
            bounds.overhead_us.get(batch, 400.0),
            "us",
            at_least=False,
        )


def peer_goals(plan: Plan, shape: str, bounds: Bounds) -> Iterator[Goal]:
    """Of each kind of numbers: decode at each batch, and prefill of one prompt."""
    for numbers in NUMBERS:
        cases = [("decode", batch) for batch in plan.batches]
        for kind, batch in (*cases, ("prefill", plan.batches[0])):
            bound = bounds.prefill_over_others
            if kind == "decode":
                bound = bounds.over_others.get((shape, numbers, batch), 1.0)
            yield Goal(
                f"{shape}, {numbers}: {kind} of {batch}, over the best other",
                f"peers-{shape}",
                partial(over_others, kind=kind, numbers=numbers, batch=batch),
                bound,
                "ratio",
            )
    for batch in plan.batches:
        yield Goal(
            f"{shape}, {OVER_HTTP}: {batch} streams over HTTP, over the best transformers serve",
            f"serving-{shape}",
            partial(over_transformers, batch=batch),
            bounds.over_transformers,
            "ratio",
        )


def share_of_limit(found: Any, *, kind: str, key: str, value: int) -> float | None:
    return only(one["share_of_limit"] for one in found["engine"][kind] if one[key] == value)


def share_of_engine(found: Any, *, batch: int) -> float | None:
    return only(one["share_of_engine"] for one in found["http"]["decode"] if one["batch"] == batch)


def overhead_us(found: Any, *, batch: int) -> float | None:
    """Of the way of decoding that comes first: the native one, where there is one."""
    return only(
        one["overhead_us"]
        for one in found["profiles"]
        if one["case"] == "decode" and one["batch"] == batch
    )


def determinism(found: Any) -> float | None:
    native = found["native"]
    return None if native is None else native["whole_share"]


def ready(found: Any) -> float | None:
    return found["ready_seconds"]


def besides_mb(found: Any) -> float | None:
    return found["besides_bytes"] / 1e6


def over_others(found: Any, *, kind: str, numbers: str, batch: int) -> float | None:
    """logitd's rate over the best of the others', None where llama.cpp is not among them."""
    rates = {
        one["peer"]: one[f"{kind}_tokens_per_second"]
        for one in found["results"]
        if (one["dtype"], one["batch"]) == (numbers, batch)
    }
    ours = rates.pop("logitd", None)
    return None if ours is None or "llama.cpp" not in rates else ours / max(rates.values())


def over_transformers(found: Any, *, batch: int) -> float | None:
    """logitd's rate, prompts included, over that of the better of their servers."""
    rates = {
        one["server"]: one["tokens_per_second"] for one in found["results"] if one["batch"] == batch
    }
    ours = rates.pop("logitd serve", None)
    return None if ours is None or not rates else ours / max(rates.values())


def only(figures: Iterator[float | None]) -> float | None:
    """The first of what should be one."""
    return next(figures, None)


# The table


def judged(goal: Goal, results: Mapping[str, Any]) -> dict[str, Any]:
    """A goal with what was measured of it, if anything was."""
    found = (results.get(goal.part) or {}).get("found")
    figure = None if found is None else goal.measure(found)
    return {
        "goal": goal.name,
        "part": goal.part,
        "wanted": goal.bound,
        "at_least": goal.at_least,
        "unit": goal.unit,
        "measured": figure,
        "reached": None if figure is None else goal.reached(figure),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| goal | wanted | measured | reached |", "|---|---:|---:|---|"]
    for row in rows:
        sign = ">=" if row["at_least"] else "<="
        measured, reached = "", "not measured"
        if row["measured"] is not None:
            measured = written(row["measured"], row["unit"])
            reached = "yes" if row["reached"] else "no"
        wanted = written(row["wanted"], row["unit"])
        lines.append(f"| {row['goal']} | {sign} {wanted} | {measured} | {reached} |")
    return "\n".join(lines)


def written(value: float, unit: Unit) -> str:
    match unit:
        case "share":
            return f"{value:.0%}"
        case "ratio":
            return f"{value:.2f}"
        case "s":
            return f"{value:.1f} s"
        case _:
            return f"{value:,.0f} {unit}"
