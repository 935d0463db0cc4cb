"""Overlap: launch the next decode step before the tokens of the present one are read.

A GPU whose steps are launched one at a time waits while the host reads tokens, makes events of them
and plans the next step. But what the next step computes is known before: the same sequences, one
position further, with random numbers that depend on no other token. Only the tokens are unknown to
the host, and those the device has. So with N in flight the host launches N + 1, and then waits:

    host     plan N | launch N + 1 | wait for N | events of N | plan N + 1 | launch N + 2 | wait ...
    device   N ...........................| N + 1 .............................| N + 2 ...........

One call of `begin` per plan: it takes over the step that the call before launched for this plan,
launches the one after it, and returns; the runner then computes the prompts of the plan and
collects the tokens.

The scheduler does not know. Every step decodes all running sequences, so whatever the next plan has
besides, its decode is in flight already, and a prompt that came meanwhile is computed after it. A
sequence that ended in step N still has a row in N + 1, whose result is discarded: it wrote its key
after everything that may be shared of the slot, is noted there as written, and runs before all that
the slot's next owner gives the device to do.

Not overlapped: a step after one that computes prompts or verifies drafts, or of which a row needs
logits processing (penalties, logprobs, a mask). Knows decoders by `Launcher`, and no tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from logitd.model.inference.engine.scheduler import StepPlan
from logitd.model.inference.engine.sequence import Sequence
from logitd.model.inference.kernels.base import Collect, Launcher
from logitd.model.inference.sampling.results import SampleResult
from logitd.model.inference.sampling.sampler import sample_results
from logitd.model.inference.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A decode step that was launched, with a row for each of some sequences."""

    sequences: tuple[Sequence, ...]
    tokens: Collect

    def collect(self, sequences: Iterable[Sequence]) -> dict[Sequence, SampleResult]:
        """Wait for the results of these sequences; those of others are discarded."""
        results = dict(zip(self.sequences, sample_results(self.tokens()), strict=True))
        return {sequence: results[sequence] for sequence in sequences}


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """The next step could not be launched. It is the next plan that fails for it: the tokens of the
    step in flight are good."""

    error: Exception


class OverlapScheduler:
    """The decode steps of an engine, one plan after the other. Without a launcher nothing overlaps,
    and the caller computes every step."""

    def __init__(self, launcher: Launcher | None, sampling: SamplingState) -> None:
        self._launcher = launcher
        self._sampling = sampling
        self._next: InFlightStep | FailedLaunch | None = None

    def begin(self, plan: StepPlan) -> InFlightStep | None:
        """The decode of a plan, in flight; the next step is launched after it where it can be. None
        where the caller has to compute the decode.

        Raises what launching this step early raised, if a sequence is left to be told.
        """
        launcher = self._launcher
        if launcher is None:
            return None
        # 1) Take over what the call before launched for this plan.
        step, self._next = self._next, None
        if not plan.decode:
            return None  # every sequence in it has ended
        if isinstance(step, FailedLaunch):
            raise step.error
        # 2) Nothing was launched: launch this step now, if the next one can overlap with it.
        continuing = plan.continuing
        if step is None and continuing:
            step = self._launch(launcher, plan.decode)
        # 3) Launch the next step while this one computes.
        if step is not None and continuing:
            self._next = self._launch_next(launcher, step, continuing)
        return step

    def _launch(self, launcher: Launcher, sequences: tuple[Sequence, ...]) -> InFlightStep | None:
        """Launch the step of known tokens; None where a row needs logits processing."""
        slots, positions = _slots_and_positions(sequences, steps_ahead=0)
        sampling, processed = self._sampling.rows(slots, [position + 1 for position in positions])
        if processed:
            return None
        token_ids = [sequence.tokens[sequence.computed] for sequence in sequences]
        return InFlightStep(sequences, launcher.launch(token_ids, slots, positions, sampling))

    def _launch_next(
        self, launcher: Launcher, step: InFlightStep, sequences: tuple[Sequence, ...]
    ) -> InFlightStep | FailedLaunch:
        """Launch the step after one in flight, for some of its sequences."""
        row_of = {sequence: row for row, sequence in enumerate(step.sequences)}
        rows = [row_of[sequence] for sequence in sequences]
        slots, positions = _slots_and_positions(sequences, steps_ahead=1)
        sampling, _ = self._sampling.rows(slots, [position + 1 for position in positions])
        try:
            tokens = launcher.launch_next(rows, slots, positions, sampling)
        except Exception as error:  # told to the plan that this step belongs to
            return FailedLaunch(error)
        return InFlightStep(sequences, tokens)


def _slots_and_positions(
    sequences: tuple[Sequence, ...], *, steps_ahead: int
) -> tuple[list[int], list[int]]:
    """Slots and positions of decode rows, so many steps after what is computed."""
    slots = []
    for sequence in sequences:
        assert sequence.slot is not None
        slots.append(sequence.slot)
    return slots, [sequence.computed + steps_ahead for sequence in sequences]
