"""What a recipe does about a text that is passed often."""

import math

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.training.configuration.repetition import (
    DROPOUT,
    FEW,
    SMALL_VOCABULARY,
    bytes_per_token,
    dropout_of,
    enough_bytes,
    passes,
    regularisation,
)

VOCABULARIES = st.integers(257, 200_000)
TOKENS = st.floats(1, 1e12)
BYTES = st.floats(1, 1e12)


@given(VOCABULARIES, VOCABULARIES)
def test_tokens_of_a_larger_vocabulary_stand_for_more(one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    assert 1 <= bytes_per_token(smaller) <= bytes_per_token(larger) <= 5


def test_between_the_sizes_that_were_measured_it_goes_by_the_logarithm() -> None:
    assert [bytes_per_token(size) for size in (257, 512, 1024, 16_384)] == [1, 2.05, 2.65, 4.4]
    assert math.isclose(bytes_per_token(round(1024 * math.sqrt(2))), (2.65 + 3.2) / 2, rel_tol=1e-3)


@given(TOKENS, BYTES, VOCABULARIES, st.booleans())
def test_a_text_that_is_passed_few_times_changes_nothing(
    tokens: float, text_bytes: float, vocab_size: int, may_learn: bool
) -> None:
    wanted = regularisation(tokens, text_bytes, vocab_size, may_learn=may_learn)
    assert (wanted is None) is (passes(tokens, text_bytes, vocab_size) <= FEW)


@given(TOKENS, BYTES, VOCABULARIES)
def test_bytes_that_are_enough_are_passed_few_times(
    tokens: float, text_bytes: float, vocab_size: int
) -> None:
    enough = enough_bytes(tokens, vocab_size)
    if text_bytes > 1.001 * enough:
        assert regularisation(tokens, text_bytes, vocab_size, may_learn=True) is None
    elif text_bytes < 0.999 * enough:
        assert regularisation(tokens, text_bytes, vocab_size, may_learn=True) is not None


@given(TOKENS, BYTES, VOCABULARIES, st.booleans(), st.floats(1, 1000))
def test_more_passes_never_get_less(
    tokens: float, text_bytes: float, vocab_size: int, may_learn: bool, times: float
) -> None:
    few = regularisation(tokens, text_bytes, vocab_size, may_learn=may_learn)
    many = regularisation(times * tokens, text_bytes, vocab_size, may_learn=may_learn)
    if few is None:
        return
    assert many is not None
    assert many.dropout >= few.dropout
    assert many.vocab_size == few.vocab_size <= vocab_size


@given(TOKENS, BYTES, VOCABULARIES)
def test_a_vocabulary_that_is_ready_made_stays(
    tokens: float, text_bytes: float, vocab_size: int
) -> None:
    wanted = regularisation(tokens, text_bytes, vocab_size, may_learn=False)
    if wanted is not None:
        assert wanted.vocab_size == vocab_size
        often = passes(tokens, text_bytes, vocab_size)
        assert wanted.dropout == dropout_of(often, vocab_size)
        assert wanted.dropout > 0 or vocab_size <= SMALL_VOCABULARY
    learned = regularisation(tokens, text_bytes, vocab_size, may_learn=True)
    if learned is not None:
        assert learned.vocab_size == min(vocab_size, SMALL_VOCABULARY)


def test_dropout_goes_by_passes_and_begins_earlier_with_a_large_vocabulary() -> None:
    for index, (least, share) in enumerate(DROPOUT):
        assert dropout_of(least * 1.01, 512) == dropout_of(least * 1.01, 1024) == share
        assert dropout_of(least, 512) == (DROPOUT[index - 1][1] if index else 0)
    assert dropout_of(FEW, 1024) == 0
    assert dropout_of(FEW * 1.01, 1024) == DROPOUT[0][1]
    assert dropout_of(1e9, 512) == DROPOUT[-1][1] < 0.5
