"""GrowingText: the tokens of one sequence on their way to text.

Gives whole characters only. Leaves out the stop token, and the stop string with whatever follows
it. A stop string counts if a token after the first `min_tokens` completes it. Does not decide what
else ends a sequence.
"""

from collections.abc import Collection, Sequence

from logitd.model.text.stop_strings import StopFinder
from logitd.model.text.tokenizer import Tokenizer


class GrowingText:
    """Feed it each token, then `finish` once. After `stopped_by` is set there is no more text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_token_ids: Collection[int],
        stop: Sequence[str],
        min_tokens: int = 0,
    ) -> None:
        self.stopped_by: str | None = None  # the stop string that was found
        self._detokenizer = tokenizer.detokenizer()
        self._stop_token_ids = stop_token_ids
        self._stop_finder = StopFinder(stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token_id: int) -> str:
        """The text that one more token lets us show."""
        self._tokens += 1
        if token_id in self._stop_token_ids:
            return ""
        return self._find_stop(self._detokenizer.push(token_id))

    def finish(self, *, cut: bool) -> str:
        """The text still held back, when no more tokens come. An incomplete character becomes
        U+FFFD, or stays held back if the sequence was `cut` short."""
        text = self._find_stop("" if cut else self._detokenizer.finish())
        return text if self.stopped_by is not None else text + self._stop_finder.finish()

    def _find_stop(self, text: str) -> str:
        counts = self._tokens > self._min_tokens
        text, self.stopped_by = self._stop_finder.push(text, counts=counts)
        return text
