"""Drafts: guess the next tokens of a text from its own repetitions.

If the last tokens of a text occurred before, the tokens that followed them are a good guess (prompt
lookup decoding: Saxena, 2023; LLMA: Yang et al., 2023). A decode step verifies a guess: each
guessed token costs a row, and each correct guess saves a step. Every token is still sampled as it
would be without drafts, so a wrong guess costs its rows but changes no reply.

Each sequence records how often its guesses were right, by the length of the repetition. It drafts
as many tokens as are worth their rows; if none is, it tries a single token from time to time. The
scheduler limits the rows of all drafts, and the engine verifies them
(`model/inference/engine/engine.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

SHORTEST, LONGEST = 2, 4
"""Shortest and longest repetition to search for, in tokens."""
CANDIDATES = 16
"""Number of earlier occurrences compared with the end of a text, the latest first."""
TOKEN_BITS = 32
"""Bits of a token id. A pair of ids is packed into one integer, which is faster to look up than a
tuple."""
MOST_TOKENS = 7
"""Longest draft. Together with the last token it makes 8 rows, for which native matrix products
read the weights once (`STREAM_ROWS` in kernels/cpu/native/linear.h)."""
FIXED_ROWS = 2
"""Fixed cost of a step, in rows. With one sequence a guess pays off if it is right once in 1 +
FIXED_ROWS times; with more sequences it must be right more often. The value is below the fixed cost
of every measured model, to avoid doubtful guesses."""
FIRST_RATES = {2: 0.3, 3: 0.4, 4: 0.5}
"""Initial rates of correct guesses, by the length of the repetition."""
RATE_STEP = 0.3
"""Weight of the newest verified token in the rate of correct guesses, a moving average."""
RETRY_TOKENS = 64
"""While guesses are wrong, a sequence tries one only after this many tokens. These attempts add at
most 1.6 % to the number of rows."""
SEARCH_INTERVAL = 4
"""After a search finds no repetition, the next search waits for this many tokens, unless guesses
have been right often enough to be worth their rows. Cache misses take most of the time of a search,
because a forward pass evicts everything else from the CPU's caches."""


@dataclass(slots=True)
class Draft:
    """Guessed tokens, the length of the repetition they come from, and the number of accepted
    tokens, which the verification sets."""

    token_ids: list[int]
    repeated: int
    accepted: int = 0


class Repeats:
    """Finds earlier occurrences of the end of a growing text.

    The occurrences of each pair of tokens form a chain, latest first. To find a longer run, `find`
    compares only the latest occurrences of its last pair. So a search takes one look-up if the last
    pair is new, and at most CANDIDATES more otherwise, however long the text is. Between two calls,
    `tokens` may only grow at its end.
    """

    __slots__ = ("_before", "_last", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._last: dict[int, int] = {}  # pair of tokens -> position after its last occurrence
        self._before: list[int] = [0] * SHORTEST  # end of a pair -> end of the one before, or 0

    def find(self) -> tuple[int, int]:
        """Find the longest run of SHORTEST to LONGEST tokens at the end of the text that occurred
        before. Returns its length and the position after its latest occurrence; (0, 0) if there is
        none. Compares only the last CANDIDATES occurrences of the final pair."""
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
        """The next `count` tokens if the text continues as it did from `start` on."""
        guess = self._tokens[start : start + count]
        period = len(self._tokens) - start
        while len(guess) < count:  # the repetition reaches the end and continues itself
            guess.append(guess[-period])
        return guess

    def _enter(self) -> None:
        tokens, last, before = self._tokens, self._last, self._before
        for end in range(len(before), len(tokens) + 1):
            pair = tokens[end - 2] << TOKEN_BITS | tokens[end - 1]
            before.append(last.get(pair, 0))
            last[pair] = end

    def _repeated(self, end: int) -> int:
        """Number of tokens before `end`, up to LONGEST, that equal the last tokens of the text. The
        caller knows that the last two are equal."""
        tokens, length = self._tokens, SHORTEST
        while length < min(LONGEST, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length


class Drafter:
    """Makes guesses for one sequence, and records how often they were right. `tokens` is the
    sequence's growing list."""

    __slots__ = ("_attempt_at", "_best", "_rates", "_repeats", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._repeats = Repeats(tokens)
        self._rates = dict(FIRST_RATES)
        self._best = max(FIRST_RATES.values())
        self._attempt_at = 0  # length of the text from which a doubtful guess may be tried

    def guess(self, most: int, sequences: int) -> Draft | None:
        """A draft of up to `most` tokens for a step with this number of sequences; None if the text
        has no repetition or no guess is worth its rows."""
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
        """Record a verified draft. The text already holds the accepted tokens."""
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
    """Lowest probability at which a guessed token is worth its row, in a step with this number of
    sequences."""
    return sequences / (sequences + FIXED_ROWS)


def worthwhile(rate: float, sequences: int) -> int:
    """Number of guessed tokens that are worth their rows. `rate` is the probability that a token is
    right if all tokens before it are."""
    needed = needed_rate(sequences)
    likely, count = rate, 0
    while count < MOST_TOKENS and likely >= needed:
        likely, count = likely * rate, count + 1
    return count


def split_evenly(counts: Sequence[int], total: int) -> list[int]:
    """Reduce the counts as evenly as possible until their sum is at most `total`. The first counts
    get the remainder."""
    if sum(counts) <= total:
        return list(counts)
    granted = [0] * len(counts)
    while total:
        for index, count in enumerate(counts):
            if granted[index] < count and total:
                granted[index] += 1
                total -= 1
    return granted
