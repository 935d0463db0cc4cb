"""What a GPU gives: first whether it computes what is promised, then how fast, in one table.

    python -m benchmarks.gpu [--device cuda] [--parts logits,engine,...] [--out FILE] [--tiny]

The checks are those of `truth.py`. Then whole steps of the engine, sampling
included, with GPT-2's shapes and random weights in bfloat16: decode with steps that are recorded
with overlap, recorded without overlap, called one by one, batch-invariant, and in plain torch;
the kernels of a step; prefill; `transformers` generating with a compiled static cache; streams over
HTTP; steps of training; and a model trained from text to checkpoint, for eight minutes at most.
Rates are shares of what the same card reads and multiplies at best, measured before them; the head
of the table has the better of that and of a second measurement at the end.
Last come the targets (`targets.py`) and whether they are reached.

A part that fails loses its own results alone: it is named at the end, and the exit code is 1. The
last line is JSON; `--out` keeps every finding as a line of JSON as soon as it is there, for a run
that is cut short. All parts together are estimated to take half an hour on a large card, most of it
`engine`, `transformers` and `trained`: where time is short, run some. `--device cpu --tiny` runs
all of it that needs no GPU, to see that it runs; its times mean nothing. Nothing here has been run
on a GPU yet.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.plan import Finding, Plan, median_seconds
from benchmarks.gpu.serving import engine, http, kernels, transformers
from benchmarks.gpu.targets import targets
from benchmarks.gpu.training import trained, training
from benchmarks.gpu.truth import CHECKS, FULL, SMALL
from benchmarks.targets import table
from logitd.model.device import DeviceError, choose_placement, disable_cudnn_attention, use_threads
from logitd.model.machine import best_of, measure_machine, surroundings

AS_TORCH_COMES = ("transformers", "training")
TINY_BYTES, TINY_WIDTH = 2**24, 256
"""Of what is read and multiplied where times mean nothing."""


def copy_bandwidth(device: torch.device, nbytes: int) -> float:
    """Bytes read and written per second by a copy within the device."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / median_seconds(lambda: target.copy_(source), device, rounds=5)


def guarded(
    name: str, part: Callable[[], Iterator[Finding]], keep: Callable[[Finding], None]
) -> tuple[list[Finding], str | None]:
    """What a part found before it ended or failed, and how it failed."""
    findings: list[Finding] = []
    print(f"gpu: {name}", file=sys.stderr, flush=True)
    try:
        for finding in part():
            findings.append(finding)
            keep(finding)
            print(line(finding), file=sys.stderr, flush=True)
    except Exception as error:  # whatever it is, the other parts are still wanted
        traceback.print_exc()
        return (
            findings,
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
    return findings, None


def keeper(path: Path | None) -> Callable[[Finding], None]:
    """Adds findings to a file, each when it is there."""

    def keep(finding: Finding) -> None:
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(finding)) + "\n")

    return keep


def begun(name: str, part: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A part on a device as it would find it alone: without memory of the one before, and without
    attention by cuDNN where it serves (`load_model`)."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    if name not in AS_TORCH_COMES:
        disable_cudnn_attention()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    yield from part()


def line(finding: Finding) -> str:
    mark = {None: " ", True: "ok", False: "NO"}[finding.holds]
    return f"{mark:2} {finding.part:12} {finding.case:44} {finding.said}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    speeds = (engine, kernels, transformers, http, training, trained)
    names = [part.__name__ for part in (*CHECKS, *speeds)]
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(names), help="with commas between them")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0 is all")
    parser.add_argument("--out", type=Path, help="a file that findings are added to")
    parser.add_argument("--tiny", action="store_true", help="shapes that any machine runs")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"no such parts: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    try:
        placement = choose_placement(arguments.device, "bfloat16", arguments.threads)
    except DeviceError as error:
        parser.error(str(error))
    use_threads(placement.threads)
    measured: dict[str, int] = {"nbytes": TINY_BYTES, "width": TINY_WIDTH} if arguments.tiny else {}
    measure = partial(measure_machine, placement, **measured)
    before = measure()
    copied = copy_bandwidth(placement.device, 2**24 if arguments.tiny else 2**30)
    plan = Plan(placement, before, arguments.tiny)
    size = SMALL if arguments.tiny else FULL
    parts: dict[str, Callable[[], Iterator[Finding]]] = {
        **{check.__name__: partial(check, placement.device, size) for check in CHECKS},
        **{speed.__name__: partial(speed, plan) for speed in speeds},
    }
    keep = keeper(arguments.out)
    findings: list[Finding] = []
    failures: dict[str, str] = {}
    for name in names:
        if name in chosen:
            results, failure = guarded(name, partial(begun, name, parts[name]), keep)
            findings += results
            if failure is not None:
                failures[name] = failure
    after, failure_after = before, None
    try:
        after = measure()
    except Exception as error:  # a device that is lost does not take the results with it
        failure_after = f"{type(error).__name__}: {error}"
        failures["machine"] = failure_after
    best = best_of(before, after)
    here = surroundings(placement)
    print(
        f"{here.device}, torch {here.torch}: reads {best.read_bandwidth / 1e9:,.0f} GB/s, copies "
        f"{copied / 1e9:,.0f} GB/s, multiplies {best.matrix_rate / 1e12:,.2f} TFLOP/s in "
        f"{here.dtype}"
    )
    for finding in findings:
        print(line(finding))
    for name, reason in failures.items():
        print(f"FAILED {name}: {reason}")
    found_targets = list(targets(plan, findings))
    print(f"\n{table(found_targets)}\n")
    wrong = [finding for finding in findings if finding.holds is False]
    print(
        json.dumps(
            {
                "surroundings": asdict(here),
                "machine": asdict(best),
                "copy_bandwidth": copied,
                "tiny": arguments.tiny,
                "findings": [asdict(finding) for finding in findings],
                "targets": [target.json() for target in found_targets],
                "failures": failures,
            }
        )
    )
    return 1 if failures or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
