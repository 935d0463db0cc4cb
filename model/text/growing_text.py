"""GrowingText: the tokens of one sequence on their way to text.

Gives whole characters only. Leaves out the stop token, and the stop string with whatever follows
it. Does not decide what else ends a sequence.
"""

from collections.abc import Collection, Sequence

from logitd.model.text.stop_strings import StopFinder
from logitd.model.text.tokenizer import Tokenizer


class GrowingText:
    """Feed it each token, then `finish` once. After `stopped_by` is set there is no more text."""

    def __init__(
        self, tokenizer: Tokenizer, *, stop_token_ids: Collection[int], stop: Sequence[str]
    ) -> None:
        self.stopped_by: str | None = None  # the stop string that was found
        self._detokenizer = tokenizer.detokenizer()
        self._stop_token_ids = stop_token_ids
        self._stop_finder = StopFinder(stop)

    def push(self, token_id: int) -> str:
        """The text that one more token lets us show."""
        if token_id in self._stop_token_ids:
            return ""
        text, self.stopped_by = self._stop_finder.push(self._detokenizer.push(token_id))
        return text

    def finish(self) -> str:
        """The text still held back, when no more tokens come."""
        text, self.stopped_by = self._stop_finder.push(self._detokenizer.finish())
        return text if self.stopped_by is not None else text + self._stop_finder.finish()
