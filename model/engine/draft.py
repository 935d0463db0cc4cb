"""Draft: what may come next in a text, guessed from the text itself.

Where a text repeats itself, what followed the last time is a good guess at what follows now (prompt
lookup decoding: Saxena, 2023; LLMA: Yang et al., 2023). A decode step verifies a guess: each token
of it is one row more, and each that is right is one step less. A wrong guess costs its rows and
nothing else, because every token is still drawn by the sampler: nothing here can change an answer.

So a row has to be worth its price. Each sequence keeps record of how often guesses were right, by
how long the repetition was that they came from, and guesses as many tokens as are likely enough to
be right together; where none is, it tries a single one from time to time. How many rows a step has
for all of them is the scheduler's business.

Token ids only. Not here: whether a guess was right (`model/engine/engine.py`).
"""

from collections.abc import Sequence as Numbers
from dataclasses import dataclass

SHORTEST, LONGEST = 2, 4
"""Tokens that have to be repeated before what followed them is guessed again."""
MOST_TOKENS = 7
"""Of one draft. With the row of the last token that makes 8, which the native products read their
weights once for (`STREAM_ROWS` in native/linear.h)."""
FIXED_ROWS = 2
"""What a step costs however many rows it has, in rows. With one sequence a guess pays when it is
right once in 1 + FIXED_ROWS times; with more sequences more often, down to where rows are all that
a step costs. Less than measured of any model: a doubtful guess is not made."""
FIRST_RATES = {2: 0.3, 3: 0.4, 4: 0.5}
"""How often guesses are taken to be right at first, by the tokens that were repeated."""
NEWS = 0.3
"""How much one token's verification moves its rate."""
PATIENCE = 64
"""Tokens between two attempts where guesses are wrong: at most 1.6 % of the rows."""


@dataclass(slots=True)
class Draft:
    """Tokens guessed to follow a sequence, how many repeated ones they were guessed from, and, when
    verified, how many were of use."""

    token_ids: list[int]
    repeated: int
    accepted: int = 0


class Repeats:
    """Where each run of SHORTEST to LONGEST tokens of a growing text ended last.

    Looking up takes the same time however long the text is; each token is entered once, when it is
    first needed. `tokens` may grow at its end between two calls, and not change otherwise.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._ends: dict[tuple[int, ...], int] = {}
        self._next_end = SHORTEST

    def find(self) -> tuple[int, int]:
        """The length of the longest run that the text ends with and had before, and the position
        after its most recent occurrence; (0, 0) when there is none."""
        self._enter()
        run, ends, found = tuple(self._tokens[-LONGEST:]), self._ends, (0, 0)
        # From the shortest run: where that is new, so are those that end with it.
        for length in range(SHORTEST, len(run) + 1):
            end = ends.get(run[-length:])
            if end is None:
                break
            found = length, end
        return found

    def continuation(self, start: int, count: int) -> list[int]:
        """`count` tokens that follow if the text goes on as it did from `start` on."""
        guess = self._tokens[start : start + count]
        period = len(self._tokens) - start
        while len(guess) < count:  # the repetition reaches the end, and goes on from itself
            guess.append(guess[-period])
        return guess

    def _enter(self) -> None:
        """Take in all runs that a token follows; those at the very end are not among them."""
        tokens, ends = self._tokens, self._ends
        for end in range(self._next_end, len(tokens)):
            run = tuple(tokens[max(0, end - LONGEST) : end])
            for skipped in range(len(run) - SHORTEST + 1):
                ends[run[skipped:]] = end
        self._next_end = max(self._next_end, len(tokens))


class Drafter:
    """The guesses of one sequence, and its record. `tokens` is its text, which grows at its end."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._repeats = Repeats(tokens)
        self._rates = dict(FIRST_RATES)
        self._best = max(FIRST_RATES.values())
        self._retry_at = 0  # length of the text

    def guess(self, most: int, sequences: int) -> Draft | None:
        """Up to `most` tokens that may follow, in a step of so many sequences; None when the text
        repeats nothing, or when guesses are not worth their rows."""
        patient = len(self._tokens) < self._retry_at
        if most < 1 or (patient and self._best < needed_rate(sequences)):
            return None
        length, start = self._repeats.find()
        if not length:
            return None
        count = worthwhile(self._rates[length], sequences)
        if not count:
            if patient:
                return None
            count = 1
        return Draft(self._repeats.continuation(start, min(count, most)), repeated=length)

    def learn(self, draft: Draft) -> None:
        """Enter a verified draft into the record; the text holds what came of it."""
        rate = self._rates[draft.repeated]
        for _ in range(draft.accepted):
            rate += (1 - rate) * NEWS
        if draft.accepted < len(draft.token_ids):
            rate -= rate * NEWS
        self._rates[draft.repeated] = rate
        self._best = max(self._rates.values())
        if not draft.accepted:
            self._retry_at = len(self._tokens) + PATIENCE


def needed_rate(sequences: int) -> float:
    """How likely a token has to be so that its row, in a step of so many sequences, is worth it."""
    return sequences / (sequences + FIXED_ROWS)


def worthwhile(rate: float, sequences: int) -> int:
    """How many tokens of a guess are worth their rows, when each is right at this rate after those
    before it were."""
    needed = needed_rate(sequences)
    likely, count = rate, 0
    while count < MOST_TOKENS and likely >= needed:
        likely, count = likely * rate, count + 1
    return count


def shares(wanted: Numbers[int], room: int) -> list[int]:
    """How many of `wanted` each may have so that they are at most `room` together: as even as it
    goes, the first ones first."""
    if sum(wanted) <= room:
        return list(wanted)
    granted = [0] * len(wanted)
    while room:
        for index, number in enumerate(wanted):
            if granted[index] < number and room:
                granted[index] += 1
                room -= 1
    return granted
