"""The plan: each token is counted once, and no window is too long."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logitd.model.data.sources.document import PIECE, Document, text_document
from logitd.model.extraction.errors import ExtractionError
from logitd.model.extraction.plan import (
    DataReader,
    Unit,
    Windows,
    choose_windows,
    document_units,
    shards_of,
    survey,
    units_of,
)
from tests.model.factories import byte_tokenizer, chat_tokenizer

TOKENIZER = byte_tokenizer()
WINDOWS = st.integers(1, 12).flatmap(
    lambda length: st.builds(Windows, st.just(length), st.integers(1, length))
)
TEXTS = st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=5)


def documents(texts: list[str]) -> list[Document]:
    return [text_document(f"text {index}", text) for index, text in enumerate(texts)]


def planned(texts: list[str], windows: Windows, begin: tuple[int, int] = (0, 0)) -> list[Unit]:
    return list(units_of(DataReader(documents(texts)), TOKENIZER, windows, begin))


@given(TEXTS, WINDOWS)
@example(["a" * 8], Windows(4, 4))
@example(["a" * 5], Windows(4, 1))
def test_token_is_counted_once_and_in_order(texts: list[str], windows: Windows) -> None:
    places = []
    for unit in planned(texts, windows):
        raw = texts[unit.document].encode()
        assert unit.source == f"text {unit.document}"
        assert bytes(unit.token_ids) == raw[unit.start : unit.start + len(unit.token_ids)]
        places += [(unit.document, at) for at in range(unit.place[1], unit.end[1])]
    assert places == [(index, at) for index, text in enumerate(texts) for at in range(len(text))]


@given(TEXTS, WINDOWS)
def test_unit_fits_the_context_and_has_the_promised_part_of_it(
    texts: list[str], windows: Windows
) -> None:
    for unit in planned(texts, windows):
        assert 1 <= unit.counted <= len(unit.token_ids) <= windows.length
        first = unit.start == 0
        assert unit.context == (0 if first else windows.length - windows.stride)
        assert first or unit.counted <= windows.stride


@given(TEXTS, WINDOWS, st.integers(1, 30))
def test_shards_are_the_units_in_order_and_bounded(
    texts: list[str], windows: Windows, shard_tokens: int
) -> None:
    units = planned(texts, windows)
    shards = list(shards_of(units, shard_tokens))
    assert [unit for shard in shards for unit in shard] == units
    for shard in shards:
        assert len(shard) == 1 or sum(unit.counted for unit in shard) <= shard_tokens


@given(TEXTS, WINDOWS, st.data())
def test_plan_continues_after_any_unit(
    texts: list[str], windows: Windows, data: st.DataObject
) -> None:
    units = planned(texts, windows)
    done = data.draw(st.integers(1, len(units)))
    assert planned(texts, windows, units[done - 1].end) == units[done:]


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=6), WINDOWS)
def test_units_do_not_depend_on_parts(parts: list[list[int]], windows: Windows) -> None:
    whole = [token_id for part in parts for token_id in part]
    assert list(document_units(0, "d", parts, windows)) == list(
        document_units(0, "d", [whole], windows)
    )


@pytest.mark.parametrize(
    ("stride", "predicts", "message"),
    [(8, True, "stride.*8.*1 to 7"), (9, False, "stride.*9.*1 to 8"), (0, False, "stride.*0")],
)
def test_stride_that_leaves_tokens_out_is_refused(
    stride: int, predicts: bool, message: str
) -> None:
    with pytest.raises(ExtractionError, match=message):
        choose_windows(8, stride, predicts=predicts)


def test_default_stride_is_the_widest() -> None:
    assert choose_windows(8, None, predicts=True) == Windows(8, 7)
    assert choose_windows(8, None, predicts=False) == Windows(8, 8)


def test_document_with_too_many_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitd.model.extraction.plan.MOST_POSITIONS", 10)
    assert list(document_units(0, "d", [[1] * 10], Windows(4, 4)))
    with pytest.raises(ExtractionError, match=r"d .*10"):
        list(document_units(0, "d", [[1] * 10, [1]], Windows(4, 4)))


def test_survey_depends_on_names_contents_and_borders() -> None:
    def known(*named: tuple[str, str]) -> str:
        return survey([text_document(name, text) for name, text in named]).sha256

    different = [
        known(("a", "bc")),
        known(("ab", "c")),
        known(("a", "b"), ("a", "c")),
        known(("a", "c"), ("a", "b")),
        known(("b", "bc")),
        known(("a", "b"), ("c", "d")),
        known(("a", "b\0c\0d")),
    ]
    assert len(set(different)) == len(different)
    whole = survey([text_document("a", "bç"), text_document("b", "d")])
    assert (whole.documents, whole.bytes) == (2, 4)


def test_name_at_a_border_of_pieces_is_one_token() -> None:
    text = "x" * (PIECE - 6) + "<|im_end|>"
    reader = DataReader([text_document("a", text)])
    units = units_of(reader, chat_tokenizer(), Windows(PIECE, PIECE), special_ids=True)
    assert [token for unit in units for token in unit.token_ids][PIECE - 6 :] == [258]
