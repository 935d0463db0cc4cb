"""Drafts: guesses match a search through the text, and wrong ones become rare."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.inference.engine.ngram import (
    CANDIDATES,
    LONGEST,
    MOST_TOKENS,
    RETRY_TOKENS,
    SHORTEST,
    Draft,
    Drafter,
    Repeats,
    split_evenly,
    worthwhile,
)

tokens_of_a_text = st.lists(st.integers(0, 1) | st.integers(0, 3), max_size=90)


def searched(tokens: list[int]) -> tuple[int, int]:
    """The definition of `Repeats.find`. Of the latest earlier places where the last two tokens
    occur, take the one with the longest matching run; return the run's length and end."""
    ends = [end for end in range(len(tokens) - 1, 1, -1) if tokens[end - 2 : end] == tokens[-2:]]
    for length in range(LONGEST, SHORTEST - 1, -1):
        for end in ends[:CANDIDATES]:
            if length <= end and tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, 0


@given(tokens=tokens_of_a_text, looks=st.sets(st.integers(0, 89)))
def test_repeats_find_the_run_of_a_search(tokens: list[int], looks: set[int]) -> None:
    """The result does not depend on how often the growing text is searched."""
    text: list[int] = []
    repeats = Repeats(text)
    for place, token in enumerate(tokens):
        text.append(token)
        if place in looks:
            assert repeats.find() == searched(text)
    assert repeats.find() == searched(tokens)


@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30), data=st.data())
def test_continuation_reads_on_into_itself(tokens: list[int], data: st.DataObject) -> None:
    start, count = data.draw(st.integers(0, len(tokens) - 1)), data.draw(st.integers(0, 9))
    text = list(tokens)
    for place in range(start, start + count):
        text.append(text[place])
    assert Repeats(tokens).continuation(start, count) == text[len(tokens) :]


def drafts_over(text: list[int], known: int, sequences: int = 1) -> list[Draft]:
    """The drafts made while a text grows from its first `known` tokens, one draft per step."""
    tokens = text[:known]
    drafter, drafts = Drafter(tokens), []
    while len(tokens) < len(text):
        left = len(text) - len(tokens)
        draft = drafter.guess(left - 1, sequences)
        if draft is None:
            tokens.append(text[len(tokens)])
            continue
        right = text[len(tokens) : len(tokens) + len(draft.token_ids)]
        while draft.accepted < len(right) and (
            right[draft.accepted] == draft.token_ids[draft.accepted]
        ):
            draft.accepted += 1
        tokens += text[len(tokens) : len(tokens) + draft.accepted + 1]
        drafts.append(draft)
        drafter.learn(draft)
    return drafts


@pytest.mark.parametrize(
    ("sequences", "lengths"),
    [(1, [1, 2, 5, 7, 7, 7]), (2, [1, 1, 2, 5, 7, 7, 6]), (8, [1, 1, 1, 1, 1, 2, 5, 7, 7])],
)
def test_right_guesses_grow_fast(sequences: int, lengths: list[int]) -> None:
    """The fewer other sequences run, the sooner drafts grow."""
    drafts = drafts_over(list(range(20)) * 3, known=24, sequences=sequences)
    assert [len(draft.token_ids) for draft in drafts] == lengths
    assert all(draft.accepted == len(draft.token_ids) for draft in drafts)


@pytest.mark.parametrize(("sequences", "early"), [(1, [0, 1]), (2, [0]), (8, [0])])
def test_wrong_guesses_become_rare(sequences: int, early: list[int]) -> None:
    """The drawn token always differs from the draft."""
    text = [1] * 8
    drafter, steps = Drafter(text), []
    for step in range(400):
        draft = drafter.guess(5, sequences)
        text.append(1)
        if draft is not None:
            steps.append(step)
            assert len(draft.token_ids) == 1
            drafter.learn(draft)
    assert steps == [*early, *range(early[-1] + RETRY_TOKENS + 1, 400, RETRY_TOKENS + 1)]


def test_each_length_of_a_repetition_has_its_own_record() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 3, 4]
    drafter = Drafter(text)
    drafter.learn(Draft([9], 2))
    assert drafter.guess(1, 1) is None, "two tokens are no longer enough"
    text += [5, 6]
    assert drafter.guess(1, 1) == Draft([7], 4)
    drafter.learn(Draft([9, 9], 4, accepted=1))
    assert drafter.guess(9, 1) == Draft([7], 4), "right once, wrong once"
    drafter.learn(Draft([9], 4))
    drafter.learn(Draft([9], 4))
    assert drafter.guess(1, 1) is None


def test_right_guesses_follow_an_attempt_at_once() -> None:
    text = [1] * 8
    drafter = Drafter(text)
    for _ in range(10):
        drafter.learn(Draft([2], 4))
    assert drafter.guess(9, 1) is None
    text += [1] * RETRY_TOKENS
    for count in (1, 1, 1, 2):
        draft = drafter.guess(9, 1)
        assert draft == Draft([1] * count, 4)
        draft.accepted = count
        text += [1] * (count + 1)
        drafter.learn(draft)


def test_guess_is_at_most_the_requested_length() -> None:
    drafter = Drafter([1] * 20)
    drafter.learn(Draft([1] * 7, 4, accepted=7))
    assert [drafter.guess(most, 1) for most in (-1, 0)] == [None, None]
    guesses = [drafter.guess(most, 1) for most in (1, 6, 7, 8, 100)]
    assert guesses == [Draft([1] * count, 4) for count in (1, 6, 7, 7, 7)]
    assert MOST_TOKENS == 7


@given(st.floats(0, 1), st.integers(1, 16))
def test_draft_has_the_rows_that_pay(rate: float, sequences: int) -> None:
    count = worthwhile(rate, sequences)
    pays = sequences / (sequences + 2)
    assert all(rate**k > pays - 1e-9 for k in range(1, count + 1))
    assert count == MOST_TOKENS or rate ** (count + 1) < pays + 1e-9
    assert worthwhile(rate, sequences + 1) <= count


@pytest.mark.parametrize("sequences", [1, 8])
@pytest.mark.parametrize("alphabet", [10, 50, 500])
def test_random_text_has_few_wrong_rows(alphabet: int, sequences: int) -> None:
    """In a random text, runs of ids repeat often, but the id that follows a run is random."""
    rng = random.Random(alphabet)
    text = [rng.randrange(alphabet) for _ in range(4000)]
    drafts = drafts_over(text, known=100, sequences=sequences)
    assert drafts
    wrong = sum(len(draft.token_ids) - draft.accepted for draft in drafts)
    assert wrong <= 0.02 * 3900


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 20))
def test_split_is_even_and_within_the_total(wanted: list[int], room: int) -> None:
    granted = split_evenly(wanted, room)
    assert sum(granted) == min(room, sum(wanted))
    assert len(granted) == len(wanted)
    for index, (number, asked) in enumerate(zip(granted, wanted, strict=True)):
        assert 0 <= number <= asked
        if number < asked:
            assert number >= max(granted) - 1
            assert all(number >= later for later in granted[index + 1 :]), "the first ones first"
