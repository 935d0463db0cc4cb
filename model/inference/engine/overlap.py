"""Overlap: launches the next decode steps before the tokens of the current ones are read.

If steps are launched one by one, a GPU is idle while the host reads tokens, makes events and plans.
But the next step is known in advance: the same sequences, one position further, with random numbers
that depend on no token. Only the tokens are unknown to the host, and they are on the device
already. So the host launches N + 1 while N runs, and then waits for N:

    host     plan N | launch N + 1 | wait for N | events of N | plan N + 1 | launch N + 2 | wait ...
    device   N ...........................| N + 1 .............................| N + 2 ...........

With few rows, the device computes a step faster than the host prepares one, so one launch covers
several steps. For each plan, `begin` returns the steps that were launched early for it and launches
the next ones. Then the runner computes the prompts of the plan and collects the tokens.

The scheduler is not aware of this. Each plan decodes all running sequences, so the early steps
always fit the next plan, and new prompts are computed after them. If a sequence ends, its later
rows are discarded. That is safe: the keys of these rows are after the part of the slot that may be
shared, and the rows are computed before the steps of the slot's next owner.

Nothing is launched early if a plan computes prompts, verifies drafts, or has a row that needs
logits processing (penalties, logprobs, a mask). This module uses decoders only through `Launcher`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from logitd.model.inference.engine.scheduler import StepPlan
from logitd.model.inference.engine.sequence import Sequence
from logitd.model.inference.kernels.base import Collect, Launcher
from logitd.model.inference.sampling.results import SampleResult
from logitd.model.inference.sampling.sample import SamplingRows, SamplingState
from logitd.model.inference.sampling.sampler import sample_results


@dataclass(frozen=True, slots=True)
class InFlight:
    """Launched decode steps. Each of the sequences has one row in every step."""

    sequences: tuple[Sequence, ...]
    steps: int
    tokens: Collect

    def collect(self, sequences: Iterable[Sequence]) -> dict[Sequence, list[SampleResult]]:
        """Wait for the steps, and return the results of these sequences only, in order."""
        by_step = [sample_results(token_ids) for token_ids in self.tokens()]
        results = dict(zip(self.sequences, map(list, zip(*by_step, strict=True)), strict=True))
        return {sequence: results[sequence] for sequence in sequences}


class OverlapScheduler:
    """Launches the decode steps of an engine. Without a launcher the caller computes every step."""

    def __init__(self, launcher: Launcher | None, sampling: SamplingState) -> None:
        self._launcher = launcher
        self._sampling = sampling
        # An error of the early launch is raised with the next plan; the steps in flight are
        # unaffected.
        self._next: InFlight | Exception | None = None

    def begin(self, plan: StepPlan) -> InFlight | None:
        """Return the launched decode steps of a plan, and launch the next steps if possible.
        Returns None if the caller has to compute the decode step. If the early launch of these
        steps failed, raises its error."""
        launcher = self._launcher
        if launcher is None:
            return None
        # 1) Take the steps that the previous call launched for this plan.
        current, self._next = self._next, None
        if not plan.decode:
            return None  # every sequence in them has ended
        if isinstance(current, Exception):
            raise current
        # 2) Otherwise, if the next step can overlap, launch the first ones now.
        if current is None and plan.decoding_after(1):
            current = self._launch(launcher, plan.decode)
        # 3) Launch the next ones while these compute.
        if current is not None and (continuing := plan.decoding_after(current.steps)):
            try:
                self._next = self._launch_next(launcher, current, continuing)
            except Exception as error:
                self._next = error
        return current

    def _launch(self, launcher: Launcher, sequences: tuple[Sequence, ...]) -> InFlight | None:
        """Launch steps from known tokens. Returns None if a row needs logits processing."""
        steps = _steps(launcher, sequences, 0)
        slots, positions, sampling, processed = self._rows(sequences, 0, steps)
        if processed:
            return None
        token_ids = [sequence.tokens[sequence.computed] for sequence in sequences]
        tokens = launcher.launch(token_ids, slots, positions, sampling)
        return InFlight(sequences, steps, tokens)

    def _launch_next(
        self, launcher: Launcher, current: InFlight, sequences: tuple[Sequence, ...]
    ) -> InFlight:
        """Launch the steps that follow `current`. `sequences` are the sequences of `current` that
        continue."""
        row_of = {sequence: row for row, sequence in enumerate(current.sequences)}
        steps = _steps(launcher, sequences, current.steps)
        slots, positions, sampling, _ = self._rows(sequences, current.steps, steps)
        rows = [row_of[sequence] for sequence in sequences]
        tokens = launcher.launch_next(rows, slots, positions, sampling)
        return InFlight(sequences, steps, tokens)

    def _rows(
        self, sequences: tuple[Sequence, ...], done: int, steps: int
    ) -> tuple[list[int], list[int], SamplingRows, tuple[int, ...]]:
        """The slots of the rows, their positions after `done` steps, the sampling rows of the next
        `steps` steps, and the indices of the rows that need logits processing."""
        slots = [sequence.held_slot for sequence in sequences]
        positions = [sequence.computed + done for sequence in sequences]
        sampled = [position + step + 1 for step in range(steps) for position in positions]
        return slots, positions, *self._sampling.rows(slots * steps, sampled)


def _steps(launcher: Launcher, sequences: tuple[Sequence, ...], done: int) -> int:
    """The number of steps to launch after the first `done` steps: a power of 2, and at most the
    largest number of tokens that a sequence may still generate."""
    left = max(sequence.tokens_left for sequence in sequences) - done
    return min(launcher.most_steps(len(sequences)), 1 << (left.bit_length() - 1))
