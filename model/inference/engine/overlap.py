"""Overlap: launch the next decode step before the tokens of the present one are read.

Launched one at a time, steps leave a GPU idle while the host reads tokens, makes events and plans.
But the next step is known before: the same sequences, one position further, with random numbers
that depend on no other token. Only the tokens are unknown to the host, and the device has those. So
with step N in flight the host launches N + 1, and then waits:

    host     plan N | launch N + 1 | wait for N | events of N | plan N + 1 | launch N + 2 | wait ...
    device   N ...........................| N + 1 .............................| N + 2 ...........

`begin`, called once for each plan, takes over the step that was launched for it and launches the
next one. Then the runner computes the prompts of the plan and collects the tokens.

The scheduler does not know. Every step decodes all running sequences, so the decode of the next
plan is in flight in any case, and a new prompt is computed after it. The row in N + 1 of a sequence
that ended in N is discarded: it wrote its key behind the part of the slot that may be shared, the
cache notes it as written, and it runs before the slot's next owner.

Not overlapped: a step after one that computes prompts or verifies drafts, or has a row that needs
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
    """A launched decode step, with a row for each of some sequences."""

    sequences: tuple[Sequence, ...]
    tokens: Collect

    def collect(self, sequences: Iterable[Sequence]) -> dict[Sequence, SampleResult]:
        """Wait for the results of these sequences; discard those of others."""
        results = dict(zip(self.sequences, sample_results(self.tokens()), strict=True))
        return {sequence: results[sequence] for sequence in sequences}


class OverlapScheduler:
    """The decode steps of an engine. Without a launcher nothing overlaps, and the caller computes
    every step."""

    def __init__(self, launcher: Launcher | None, sampling: SamplingState) -> None:
        self._launcher = launcher
        self._sampling = sampling
        # The error of a failed launch belongs to the next plan: the step in flight is good.
        self._next: InFlightStep | Exception | None = None

    def begin(self, plan: StepPlan) -> InFlightStep | None:
        """The decode of a plan, in flight, with the next step launched after it if possible. None
        if the caller has to compute the decode. Raises the error of an early launch of this
        step."""
        launcher = self._launcher
        if launcher is None:
            return None
        # 1) Take over the step that the call before launched for this plan.
        step, self._next = self._next, None
        if not plan.decode:
            return None  # every sequence in it has ended
        if isinstance(step, Exception):
            raise step
        # 2) If there is none, launch this step now, if the next one can overlap with it.
        continuing = plan.continuing
        if step is None and continuing:
            step = self._launch(launcher, plan.decode)
        # 3) Launch the next step while this one computes.
        if step is not None and continuing:
            try:
                self._next = self._launch_next(launcher, step, continuing)
            except Exception as error:
                self._next = error
        return step

    def _launch(self, launcher: Launcher, sequences: tuple[Sequence, ...]) -> InFlightStep | None:
        """Launch a step of known tokens; None if a row needs logits processing."""
        slots = [sequence.held_slot for sequence in sequences]
        positions = [sequence.computed for sequence in sequences]
        sampling, processed = self._sampling.rows(slots, [position + 1 for position in positions])
        if processed:
            return None
        token_ids = [sequence.tokens[sequence.computed] for sequence in sequences]
        return InFlightStep(sequences, launcher.launch(token_ids, slots, positions, sampling))

    def _launch_next(
        self, launcher: Launcher, step: InFlightStep, sequences: tuple[Sequence, ...]
    ) -> InFlightStep:
        """Launch the step after one in flight, for some of its sequences."""
        row_of = {sequence: row for row, sequence in enumerate(step.sequences)}
        rows = [row_of[sequence] for sequence in sequences]
        slots = [sequence.held_slot for sequence in sequences]
        positions = [sequence.computed + 1 for sequence in sequences]
        sampling, _ = self._sampling.rows(slots, [position + 1 for position in positions])
        return InFlightStep(sequences, launcher.launch_next(rows, slots, positions, sampling))
