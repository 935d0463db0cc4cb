"""Usage: what one HTTP request had the engine compute, and when, summed over its sequences.

For the log, `Server-Timing` and the timings of a reply. Belongs to the event loop.
"""

import math
from dataclasses import dataclass

from model.inference.engine.events import FinishEvent


@dataclass(slots=True)
class Usage:
    """Of the sequences that have ended. Moments are on the engine's clock, in seconds; infinite
    where no sequence got there.

    arrived    of the first sequence
    admitted   of the first that got a slot
    prefilled  of the first whose prompt was computed
    finished   of the last
    """

    sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    arrived: float = math.inf
    admitted: float = math.inf
    prefilled: float = math.inf
    finished: float = 0.0

    def add(self, event: FinishEvent) -> None:
        """Count a sequence that has ended."""
        times = event.times
        self.sequences += 1
        if event.index == 0:  # the others have the same prompt
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
        self.completion_tokens += event.completion_tokens
        self.arrived = min(self.arrived, times.arrived)
        self.finished = max(self.finished, times.finished)
        if times.admitted is not None:
            self.admitted = min(self.admitted, times.admitted)
        if times.prefilled is not None:
            self.prefilled = min(self.prefilled, times.prefilled)

    def milliseconds(self) -> dict[str, float]:
        """The phases of a request of at least one sequence: to the first admission (queue), from
        there to the first computed prompt (prefill), from there to the last end (decode). What was
        not reached takes until the end."""
        admitted = min(self.admitted, self.finished)
        prefilled = min(self.prefilled, self.finished)
        return {
            "queue": 1e3 * (admitted - self.arrived),
            "prefill": 1e3 * (prefilled - admitted),
            "decode": 1e3 * (self.finished - prefilled),
        }
