"""Ahead: a decode step is launched before the tokens of the step in front of it are known.

A GPU whose steps are launched one at a time has nothing to do while tokens are read, booked and
told, and the next plan is made. But what the next step computes is known before: the same
sequences, a position further, with random numbers that depend on no other token. Only the tokens
are not, and these the device has itself. So while the tokens of one step are waited for, the step
behind it is in flight already.

A step in flight is the decode of the next plan, computed early; nobody's books know of it. Every
step decodes all who run, so whatever the next plan has besides, its decode is found in flight, and
a prompt that came meanwhile is computed behind it. What it computes for a sequence that has ended
meanwhile is dropped: it stands in the cache behind all that is shared of the slot, is noted there
as written, and lies in front of all that the slot's next owner gives the device to do.

Not in flight: a step behind one that computes prompts, that has drafts, or of which a row asks for
more than a draw (penalties, logprobs, a mask). Knows decoders by what `launch`
and `launch_behind` say, and no tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from model.inference.engine.scheduler import StepPlan
from model.inference.engine.sequence import Sequence
from model.inference.kernels.base import Collect, Launcher
from model.inference.sampling.results import SampleResult
from model.inference.sampling.sampler import sample_results
from model.inference.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Flight:
    """A decode step that was launched: a row for each of some sequences."""

    sequences: tuple[Sequence, ...]
    tokens: Collect

    def collect(self, sequences: Iterable[Sequence]) -> dict[Sequence, SampleResult]:
        """Wait for the results of these sequences; those of others are dropped."""
        results = dict(zip(self.sequences, sample_results(self.tokens()), strict=True))
        return {sequence: results[sequence] for sequence in sequences}


class StepsAhead:
    """The decode steps of an engine, one plan after the other. Without a launcher there are none
    ahead, and all of them are the caller's to compute."""

    def __init__(self, launcher: Launcher | None, sampling: SamplingState) -> None:
        self._launcher = launcher
        self._sampling = sampling
        self._next: Flight | Exception | None = None

    def begin(self, plan: StepPlan) -> Flight | None:
        """The decode of a plan, launched now or in the step before, and the step behind it launched
        as well if it may be. None where the caller has to compute it.

        Raises what launching it in the step before raised, if somebody is left to be told: the
        tokens of that step were none the worse for it.
        """
        launcher = self._launcher
        if launcher is None:
            return None
        flight, self._next = self._next, None
        if not plan.decode:
            return None  # whoever was in flight has ended
        if isinstance(flight, Exception):
            raise flight
        following = plan.following
        if flight is None and following:
            flight = self._launch(launcher, plan.decode)
        if flight is not None and following:
            try:
                self._next = self._launch_behind(launcher, flight, following)
            except Exception as error:
                self._next = error
        return flight

    def _launch(self, launcher: Launcher, sequences: tuple[Sequence, ...]) -> Flight | None:
        """Launch the step of known tokens; None where a row needs logits
        processing."""
        slots, positions = _places(sequences, 0)
        sampling, processed = self._sampling.rows(slots, [position + 1 for position in positions])
        if processed:
            return None
        token_ids = [sequence.tokens[sequence.computed] for sequence in sequences]
        return Flight(sequences, launcher.launch(token_ids, slots, positions, sampling))

    def _launch_behind(
        self, launcher: Launcher, flight: Flight, sequences: tuple[Sequence, ...]
    ) -> Flight:
        """Launch the step behind one in flight, for some of its sequences."""
        row_of = {sequence: row for row, sequence in enumerate(flight.sequences)}
        rows = [row_of[sequence] for sequence in sequences]
        slots, positions = _places(sequences, 1)
        sampling, _ = self._sampling.rows(slots, [position + 1 for position in positions])
        return Flight(sequences, launcher.launch_behind(rows, slots, positions, sampling))


def _places(sequences: tuple[Sequence, ...], behind: int) -> tuple[list[int], list[int]]:
    """Slots and positions of decode rows, so many steps behind what is booked."""
    slots = []
    for sequence in sequences:
        assert sequence.slot is not None
        slots.append(sequence.slot)
    return slots, [sequence.computed + behind for sequence in sequences]
