"""Profile report: what `logitd bench --profile` found, as one JSON object and as lines.

Like `report.py`: the lines are written from the object, and keys are added to, not renamed. Times
are in microseconds, because some stages take few. A share of the limit is that of the least time
that a stage's bytes or operations can take here; it is null where a stage has neither, and above 1
where what is read comes from the processor's caches, or is compressed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from logitd.model.benchmark.machine import Machine, best_of
from logitd.model.benchmark.profile import Profile, StageTime
from logitd.model.benchmark.work import limit
from logitd.service.cli.commands.benchmark.report import Profiled, about, heading, table

REMAINDER = "remainder"


def profile_summary(run: Profiled) -> dict[str, Any]:
    """The JSON object."""
    machine = best_of(*run.machines)
    return {
        **about(run),
        "profiles": [
            {"decoding": decoding, **_profile(profile, machine)}
            for decoding, profiles in run.profiles.items()
            for profile in profiles
        ],
    }


def profile_lines(report: Mapping[str, Any]) -> list[str]:
    """What a terminal shows of it."""
    shown = heading(report)
    for profile in report["profiles"]:
        shown += table(_title(profile), "stage", [*profile["stages"], _rest(profile)], _COLUMNS)
        shown += _notes(profile)
    return shown


def _profile(profile: Profile, machine: Machine) -> dict[str, Any]:
    return {
        "case": "decode" if profile.prompt_tokens is None else "prefill",
        "batch": profile.batch,
        "prompt_tokens": profile.prompt_tokens,
        "steps": profile.steps,
        "step_us": 1e6 * profile.seconds,
        "overhead_us": 1e6 * profile.overhead,
        "remainder_us": 1e6 * profile.remainder,
        "watching_share": profile.watching,
        "stages": [_stage(stage, profile.seconds, machine) for stage in profile.stages],
    }


def _stage(stage: StageTime, whole: float, machine: Machine) -> dict[str, Any]:
    least = None if stage.work is None else limit(stage.work, machine)
    return {
        "stage": stage.stage,
        "us": 1e6 * stage.seconds,
        "share_of_step": stage.seconds / whole,
        "read_bytes": None if stage.work is None else stage.work.read_bytes,
        "matrix_operations": None if stage.work is None else stage.work.operations,
        "limited_by": None if least is None else least.by,
        "share_of_limit": None if least is None else least.seconds / stage.seconds,
    }


_COLUMNS: dict[str, tuple[str, ...]] = {
    "us": ("us",),
    "of step": ("share_of_step",),
    "MB read": ("read_bytes",),
    "MFLOP": ("matrix_operations",),
    "of limit": ("share_of_limit",),
    "limited by": ("limited_by",),
}


def _title(profile: Mapping[str, Any]) -> str:
    if profile["case"] == "prefill":
        return f"prefill of {profile['prompt_tokens']} tokens, decoding {profile['decoding']}"
    return f"decode step of {profile['batch']}, {profile['decoding']}"


def _rest(profile: Mapping[str, Any]) -> dict[str, Any]:
    """A row for what is in no stage."""
    microseconds = profile["remainder_us"]
    return {
        "stage": REMAINDER,
        "us": microseconds,
        "share_of_step": microseconds / profile["step_us"],
        "read_bytes": None,
        "matrix_operations": None,
        "limited_by": None,
        "share_of_limit": None,
    }


def _notes(profile: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"step {profile['step_us']:,.0f} us, {profile['overhead_us']:,.0f} us of it neither the "
        f"model nor the sampling; {profile['steps']} watched, which took "
        f"{profile['watching_share']:+.1%}"
    )
