"""GrowingText: the tokens of one sequence on their way to text, and the stop strings in it.

The caller handles other ends of a sequence.
"""

import codecs
from collections.abc import Collection, Sequence

from logitd.model.text.tokenizer import Tokenizer


class GrowingText:
    """Takes each token, then `finish` once. After `stopped_by` is set there is no more text.

    The joined pieces equal `Tokenizer.decode` of the tokens, without the stop token, and without
    the stop string and the text behind it. No piece ends inside a character. A stop string counts
    if a token after the first `min_tokens` completes it; text that may begin one is held back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Collection[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        self.stopped_by: str | None = None  # the stop string that was found
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stop_token_ids = stop_token_ids
        self._stop_finder = StopFinder(stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token_id: int) -> str:
        """The text that can be shown after one more token."""
        self._tokens += 1
        if token_id in self._stop_token_ids:
            return ""
        return self._find_stop(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self, *, cut: bool) -> str:
        """The text still held back, when there are no more tokens. An incomplete character becomes
        U+FFFD, or is dropped if the sequence was `cut` short."""
        text = self._find_stop("" if cut else self._decoder.decode(b"", final=True))
        return text if self.stopped_by is not None else text + self._stop_finder.finish()

    def _find_stop(self, text: str) -> str:
        counts = self._tokens > self._min_tokens
        text, self.stopped_by = self._stop_finder.push(text, counts=counts)
        return text


class StopFinder:
    """Feeds text through and finds stop strings in it. Holds back at most the longest stop string
    less one character."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string that ended it, if any.

        A stop string that this text completes is ignored, now and later, unless it `counts`. If the
        text has several, the one that begins first counts, then the one completed first, then the
        first listed.
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
        """The text still held back, when there is no more text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
