"""Targets are read off what was found, where the benchmark puts it."""

import pytest
import torch

from benchmarks.gpu.plan import Finding, Plan
from benchmarks.gpu.targets import targets
from logitd.model.benchmark.machine import Machine
from logitd.model.device import Placement


def test_targets_are_read_off_what_was_found_and_the_rest_stays_open() -> None:
    found = [
        _found("decode", "124m graphs, 1 at once", share_of_limit=0.4, tokens_per_second=400.0),
        _found("decode", "124m torch, 1 at once", share_of_limit=0.9, tokens_per_second=900.0),
        _found("decode", "1.5b graphs, 1 at once"),  # left out: it did not fit
        _found("prefill", "1.5b graphs, 8 at once, 1 prompts", share_of_limit=0.3),
        _found("prefill", "1.5b graphs, 8 at once, 8 prompts", share_of_limit=0.6),
        _found("transformers", "124m, 1 at once", tokens_per_second=160.0),
        _found("http", "124m, 8 streams", tokens_per_second=7000.0, engine=7500.0),
        _found("http", "124m, 64 streams", tokens_per_second=20_000.0, engine=60_000.0),
    ]
    machine = Machine(read_bandwidth=1.0, matrix_rate=1.0)
    plan = Plan(Placement(torch.device("cpu"), torch.bfloat16, 1), machine, tiny=False)
    verdicts = {one.name: (one.measured, one.reached) for one in targets(plan, found)}
    assert verdicts == {
        "124m: decode of 1, of the limit": (0.4, True),
        "1.5b: decode of 1, of the limit": (None, None),
        "1.5b: prefill, of the matrix rate": (0.6, True),
        "124m: decode of 1, over transformers": (2.5, False),
        "124m: decode of 64, over transformers": (None, None),
        "1.5b: decode of 1, over transformers": (None, None),
        "1.5b: decode of 64, over transformers": (None, None),
        "124m: over HTTP, of the engine": (pytest.approx(7000 / 7500), True),
        "124m: training, of the matrix rate": (None, None),
    }


def _found(part: str, case: str, **figures: float) -> Finding:
    return Finding(part, case, "", figures)
