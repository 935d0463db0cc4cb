"""Drafts: tokens that may come next in a text, guessed from the text itself.

Where a text repeats itself, what followed the last time is a good guess at what follows now (prompt
lookup decoding: Saxena, 2023; LLMA: Yang et al., 2023). A decode step verifies a guess: each token
of it is one row more, and each that is right is one step less. A wrong guess costs its rows and
nothing else, because every token is still sampled as without drafts: nothing here can change an
answer.

So a row has to be worth its cost. Each sequence keeps a record of how often its guesses were right,
by the length of the repetition that they came from, and drafts as many tokens as are likely enough
to be right together; where none is, it tries a single one from time to time. How many rows a step
has for all drafts is decided by the scheduler.

Token ids only. Not here: whether a guess was right (`model/inference/engine/engine.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST, LONGEST = 2, 4
"""Tokens that have to be repeated before what followed them is guessed again."""
CANDIDATES = 16
"""Earlier occurrences that are compared with the end of a text, the latest first."""
TOKEN_BITS = 32
"""A pair of token ids is one integer, which is looked up faster than a tuple."""
MOST_TOKENS = 7
"""Of one draft. With the row of the last token that makes 8, which the native products read their
weights once for (`STREAM_ROWS` in kernels/cpu/native/linear.h)."""
FIXED_ROWS = 2
"""What a step costs however many rows it has, in rows. With one sequence a guess pays when it is
right once in 1 + FIXED_ROWS times; with more sequences more often, down to where rows are all that
a step costs. Less than measured of any model: a doubtful guess is not made."""
FIRST_RATES = {2: 0.3, 3: 0.4, 4: 0.5}
"""How often guesses are taken to be right at first, by the tokens that were repeated."""
RATE_STEP = 0.3
"""How far one verified token moves its rate."""
RETRY_TOKENS = 64
"""Tokens between two attempts where guesses are wrong: at most 1.6 % of the rows."""
SEARCH_INTERVAL = 4
"""Tokens between two searches of a text that repeated nothing, while a guess would be doubtful: the
cost of a search is mostly cache misses, since a forward pass leaves the CPU caches cold."""


@dataclass(slots=True)
class Draft:
    """Tokens guessed to follow a sequence, the length of the repetition that they come from, and,
    when verified, how many were accepted."""

    token_ids: list[int]
    repeated: int
    accepted: int = 0


class Repeats:
    """Earlier occurrences of what a growing text ends with now.

    The ends of each pair of tokens are chained, the latest first, and a longer run is sought among
    the latest ends of the pair that closes it. So a token that repeats nothing costs one look into
    one table, however long the text is, and one that does at most CANDIDATES more. Each token is
    entered once, when it is first needed. `tokens` may grow at its end between two calls, and not
    change otherwise.
    """

    __slots__ = ("_before", "_last", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._last: dict[int, int] = {}  # pair of tokens -> position after its last occurrence
        self._before: list[int] = [0] * SHORTEST  # by end of a pair: its end before that one, or 0

    def find(self) -> tuple[int, int]:
        """The length of the longest run, of SHORTEST to LONGEST tokens, that the text ends with and
        had before, and the position after its most recent occurrence; (0, 0) when there is none.
        Of the pair that the text ends with, its CANDIDATES last occurrences are looked at."""
        self._enter()
        end, length, best = self._before[-1], 0, 0
        if not end:
            return length, best
        for _ in range(CANDIDATES):
            repeated = self._repeated(end)
            if repeated > length:
                length, best = repeated, end
            end = self._before[end]
            if not end or length == LONGEST:
                break
        return length, best

    def continuation(self, start: int, count: int) -> list[int]:
        """`count` tokens that follow if the text goes on as it did from `start` on."""
        guess = self._tokens[start : start + count]
        period = len(self._tokens) - start
        while len(guess) < count:  # the repetition reaches the end, and goes on from itself
            guess.append(guess[-period])
        return guess

    def _enter(self) -> None:
        """Chain the pairs that came since the last time to those before them."""
        tokens, last, before = self._tokens, self._last, self._before
        for end in range(len(before), len(tokens) + 1):
            pair = tokens[end - 2] << TOKEN_BITS | tokens[end - 1]
            before.append(last.get(pair, 0))
            last[pair] = end

    def _repeated(self, end: int) -> int:
        """How many tokens before `end` are the text's last ones, LONGEST at most; the pair is."""
        tokens, length = self._tokens, SHORTEST
        while length < min(LONGEST, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length


class Drafter:
    """The guesses of one sequence, and its record. `tokens` is its text, which grows at its end."""

    __slots__ = ("_attempt_at", "_best", "_rates", "_repeats", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._repeats = Repeats(tokens)
        self._rates = dict(FIRST_RATES)
        self._best = max(FIRST_RATES.values())
        self._attempt_at = 0  # length of the text from which on a doubtful guess is tried

    def guess(self, most: int, sequences: int) -> Draft | None:
        """Up to `most` tokens that may follow, in a step of so many sequences; None when the text
        repeats nothing, or when guesses are not worth their rows."""
        may_attempt = len(self._tokens) >= self._attempt_at
        doubtful = self._best < needed_rate(sequences)
        if most < 1 or (doubtful and not may_attempt):
            return None
        length, start = self._repeats.find()
        if not length:
            if doubtful:
                self._attempt_at = len(self._tokens) + SEARCH_INTERVAL
            return None
        count = worthwhile(self._rates[length], sequences) or int(may_attempt)
        if not count:
            return None
        return Draft(self._repeats.continuation(start, min(count, most)), repeated=length)

    def learn(self, draft: Draft) -> None:
        """Enter a verified draft into the record; the text holds what came of it."""
        rate = self._rates[draft.repeated]
        for _ in range(draft.accepted):
            rate += (1 - rate) * RATE_STEP
        if draft.accepted < len(draft.token_ids):
            rate -= rate * RATE_STEP
        self._rates[draft.repeated] = rate
        self._best = max(self._rates.values())
        if not draft.accepted:
            self._attempt_at = len(self._tokens) + RETRY_TOKENS


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


def split_evenly(counts: Sequence[int], total: int) -> list[int]:
    """The counts, lowered as evenly as possible until they are `total` at most together; the first
    ones get what is left over."""
    if sum(counts) <= total:
        return list(counts)
    granted = [0] * len(counts)
    while total:
        for index, count in enumerate(counts):
            if granted[index] < count and total:
                granted[index] += 1
                total -= 1
    return granted
