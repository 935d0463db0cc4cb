"""Stop strings: found in a growing text, before any of their characters are shown.

Text that may be the beginning of a stop string is held back until it is clear. Knows text only,
not tokens.
"""

from collections.abc import Sequence


class StopFinder:
    """Feeds text through; holds back at most the longest stop string less one character."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string that ended it, if one did.

        Unless this text `counts`, a stop string that it completes ends nothing, now or later. If
        several end up in the text, the one that begins first counts; of those that begin at the
        same place, the one that was completed first, then the first listed.
        """
        if not self._stop:
            return text, None
        held = len(self._held)
        text, self._held = self._held + text, ""
        matches = [
            (start, start + len(stop), rank)
            for rank, stop in enumerate(self._stop)
            if counts and (start := text.find(stop, max(0, held - len(stop) + 1))) >= 0
        ]
        if matches:
            start, _, rank = min(matches)
            return text[:start], self._stop[rank]
        keep = max(_overlap(text, stop) for stop in self._stop)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text, None

    def finish(self) -> str:
        """The text still held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
