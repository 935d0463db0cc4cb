"""Overlap: launch the next decode step before the tokens of the current one are read.

If steps are launched one by one, a GPU is idle while the host reads tokens, makes events and plans.
But the next step is known in advance: the same sequences, one position further, with random numbers
that depend on no token. Only the tokens are unknown to the host, and they are on the device
already. So the host launches step N + 1 while step N runs, and then waits for N:

    host     plan N | launch N + 1 | wait for N | events of N | plan N + 1 | launch N + 2 | wait ...
    device   N ...........................| N + 1 .............................| N + 2 ...........

For each plan, `begin` returns the step that was launched early for it and launches the next one.
Then the runner computes the prompts of the plan and collects the tokens.

The scheduler is not aware of this. Each step decodes all running sequences, so the early step
always fits the next plan, and new prompts are computed after it. If a sequence ends in step N, its
row in N + 1 is discarded. That is safe: the row's key lies after the part of the slot that may be
shared, the cache counts it as written, and the row runs before the slot's next owner.

A step is not launched early if the step before it computes prompts, verifies drafts, or has a row
that needs logits processing (penalties, logprobs, a mask). Decoders are known only as `Launcher`.
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
    """A launched decode step, with one row for each of its sequences."""

    sequences: tuple[Sequence, ...]
    tokens: Collect

    def collect(self, sequences: Iterable[Sequence]) -> dict[Sequence, SampleResult]:
        """Wait for the step, and return the results of these sequences only."""
        results = dict(zip(self.sequences, sample_results(self.tokens()), strict=True))
        return {sequence: results[sequence] for sequence in sequences}


class OverlapScheduler:
    """Launches the decode steps of an engine. Without a launcher the caller computes every step."""

    def __init__(self, launcher: Launcher | None, sampling: SamplingState) -> None:
        self._launcher = launcher
        self._sampling = sampling
        # An error of the early launch is raised with the next plan; the step in flight is
        # unaffected.
        self._next: InFlightStep | Exception | None = None

    def begin(self, plan: StepPlan) -> InFlightStep | None:
        """Return the decode step of a plan, in flight, and launch the next step if possible.
        Returns None if the caller has to compute the decode. Raises the error of this step's early
        launch, if there was one."""
        launcher = self._launcher
        if launcher is None:
            return None
        # 1) Take the step that the previous call launched for this plan.
        step, self._next = self._next, None
        if not plan.decode:
            return None  # every sequence in it has ended
        if isinstance(step, Exception):
            raise step
        # 2) Otherwise, if the next step can overlap, launch this step now.
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
        """Launch the step that follows `step`, for those of its sequences that continue."""
        row_of = {sequence: row for row, sequence in enumerate(step.sequences)}
        rows = [row_of[sequence] for sequence in sequences]
        slots = [sequence.held_slot for sequence in sequences]
        positions = [sequence.computed + 1 for sequence in sequences]
        sampling, _ = self._sampling.rows(slots, [position + 1 for position in positions])
        return InFlightStep(sequences, launcher.launch_next(rows, slots, positions, sampling))
