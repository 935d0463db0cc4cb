"""GrowingText: decodes the tokens of one sequence as they are generated, and finds stop strings.

The caller handles all other ways in which a sequence can end.
"""

import codecs
from bisect import bisect_right
from collections.abc import Collection, Sequence

from logitd.model.text.tokenizer import Tokenizer


class GrowingText:
    """The text of one sequence. The caller calls `push` with all tokens in order, then `finish`
    once. After `stopped_by` is set, there is no more text.

    The returned pieces together are the decoded tokens without the stop token, or, if a stop string
    was found, the text before it. A piece never ends within a character. A stop string counts only
    if it is completed after the first `min_tokens` tokens. Text that may be the beginning of a stop
    string is held back.
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

    def push(self, *token_ids: int) -> str:
        """Add tokens. Returns the new text that can be shown. With stop strings, add one token at a
        time: a stop string is assumed to be completed by the last added token."""
        self._tokens += len(token_ids)
        shown = [token_id for token_id in token_ids if token_id not in self._stop_token_ids]
        return self._find_stop(self._decoder.decode(self._tokenizer.decode_bytes(shown)))

    def finish(self, *, cut: bool) -> str:
        """End the text. Returns the part that was held back. An incomplete character becomes
        U+FFFD, or is dropped if the sequence was `cut` short."""
        text = self._find_stop("" if cut else self._decoder.decode(b"", final=True))
        return text if self.stopped_by is not None else text + self._stop_finder.finish()

    def _find_stop(self, text: str) -> str:
        counts = self._tokens > self._min_tokens
        text, self.stopped_by = self._stop_finder.push(text, counts=counts)
        return text


class StopFinder:
    """Finds stop strings in a text that arrives in parts. It holds back text that may be the
    beginning of a stop string: at most one character less than the longest stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._sorted = sorted(stop)
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Add text. Returns the text that may be shown, and the stop string that ended it, if any.

        If `counts` is False, stop strings completed by this text are ignored. Among several stop
        strings, the one that begins first wins. If several begin there, the one that ends first
        wins, then the one listed first.
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
        if keep := self._overlap(text):
            text, self._held = text[:-keep], text[-keep:]
        return text, None

    def finish(self) -> str:
        """End the text. Returns the part that was held back."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest end of the text with which a longer stop string begins. Every end
        that is tried and is too long is shown, so the time is linear in the characters."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            at = bisect_right(self._sorted, end)  # strings that begin with `end` follow it
            if at < len(self._sorted) and self._sorted[at].startswith(end):
                return length
        return 0
