"""Split: the held-out share is measured in bytes, and no text is on both sides."""

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.sources.document import PIECE, Document, text_document
from logitd.model.data.split import Side, Split, lot, plan_split, sides, split_text


def parts_of(documents: Sequence[Document], fraction: float) -> list[list[tuple[Side, str]]]:
    split = split_text(documents, fraction)
    return [list(sides(document, split)) for document in documents]


def held_out(documents: Sequence[Document], fraction: float = 0.1) -> set[str]:
    """Names of the documents that are held out whole."""
    every = zip(documents, parts_of(documents, fraction), strict=True)
    return {document.name for document, parts in every if {side for side, _ in parts} == {"val"}}


def share_of(documents: Sequence[Document], fraction: float) -> float:
    """Held-out share of the bytes."""
    pieces = [piece for parts in parts_of(documents, fraction) for piece in parts]
    size = {
        name: sum(len(p.encode()) for side, p in pieces if side == name)
        for name in ("train", "val")
    }
    return size["val"] / sum(size.values())


def words(number: int, size: int) -> str:
    """A text of about `size` bytes without a line break."""
    return f"{number} " + "red blue cat dog sun sea " * (size // 25)


@pytest.mark.parametrize(
    ("texts", "least", "most"),
    [
        pytest.param([words(n, 900) for n in range(20)], 0.1, 0.1, id="20 documents"),
        pytest.param([words(n, 900) for n in range(19)], 0.1, 0.106, id="19 documents"),
        pytest.param([words(n, 900) for n in range(5)], 0.095, 0.1, id="few documents"),
        pytest.param([words(n, 90_000) for n in range(8)], 0.095, 0.1, id="long documents"),
        pytest.param([words(n, 900) for n in range(8)], 0.125, 0.125, id="short documents"),
        pytest.param([words(n, 900) for n in range(15)], 0.06, 0.07, id="15 documents"),
        pytest.param(
            [words(0, 90_000), *(words(n, 200) for n in range(1, 30))], 0.095, 0.105,
            id="one of 94 %",
        ),
        pytest.param([words(n % 8, 90) for n in range(3000)], 0.12, 0.13, id="8 texts repeated"),
        pytest.param([words(n % 2, 900) for n in range(3000)], 0.09, 0.11, id="2 texts repeated"),
        pytest.param([words(0, 20_000) + "\n"], 0.09, 0.1, id="a line"),
        pytest.param([words(n, 20_000) + "\n" for n in range(15)], 0.06, 0.07, id="lines"),
        pytest.param(["x" * 5000], 0.1, 0.1, id="no white space"),
    ],
)  # fmt: skip
def test_share_is_measured_in_bytes(texts: list[str], least: float, most: float) -> None:
    documents = [text_document(f"{number}", text) for number, text in enumerate(texts)]
    assert least <= round(share_of(documents, 0.1), 3) <= most


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 1000)), min_size=1), st.floats(0.001, 0.5)
)
def test_share_is_near_the_fraction(documents: list[tuple[int, int]], fraction: float) -> None:
    documents = [(lot, 1 + (size * (lot + 1)) % 997) for lot, size in documents]
    documents = [
        (lot, dict(documents)[lot]) for lot, _ in documents
    ]  # every lot belongs to one size
    split = plan_split(documents, fraction)
    total = sum(size for _, size in documents)
    out = sum(size - split.trained(lot, size) for lot, size in documents)
    assert 0 < out <= 2 * fraction * total + len(documents)


@pytest.mark.parametrize(
    ("count", "size", "fraction", "ends", "shortest"),
    [(2000, 250, 0.0001, 1, 25), (20, 5000, 0.02, 2, 500), (300, 222, 0.001, 1, 33)],
)
def test_few_documents_are_divided_if_ends_would_be_short(
    count: int, size: int, fraction: float, ends: int, shortest: int
) -> None:
    documents = [text_document(f"{n}", words(n, size)) for n in range(count)]
    parts = parts_of(documents, fraction)
    held_out = [piece for part in parts for side, piece in part if side == "val"]
    assert len(held_out) == ends
    assert all(shortest <= len(piece) for piece in held_out)
    assert not any(piece.startswith(("ed", "lue", "at")) for piece in held_out), "inside a word"
    assert fraction / 2 <= share_of(documents, fraction) <= fraction * 1.1


def test_split_is_read_as_described() -> None:
    documents = [text_document(f"{n}", words(n, 5000 + 90 * n)) for n in range(20)]
    lots = {lot(document) for document in documents}
    for fraction in (0.001, 0.02, 0.1, 0.5):
        split = split_text(documents, fraction)
        assert Split.described(fraction, split.description(fraction, lots)) == split


@given(st.text(max_size=300), st.floats(0.01, 0.5))
def test_end_of_a_single_document_is_held_out(text: str, fraction: float) -> None:
    text = text.encode(errors="replace").decode()
    (parts,) = parts_of([text_document("a", text)], fraction)
    assert "".join(piece for _, piece in parts) == text
    order = [side for side, _ in parts]
    assert order == sorted(order), "the training part comes first"


def test_document_is_cut_after_a_line_break() -> None:
    (parts,) = parts_of([text_document("a", "one\ntwo\nthree\nfour\n")], 0.4)
    assert parts == [("train", "one\ntwo\nthree\n"), ("val", "four\n")]


def test_document_of_unknown_size_is_cut_at_the_same_place() -> None:
    known = text_document("a", "some words\n" * 30_000)
    assert parts_of([known], 0.3) == parts_of([Document("a", known.pieces)], 0.3)


def test_adding_documents_moves_few_between_sides() -> None:
    documents = [text_document(f"file{index}", f"text {index:04}") for index in range(1000)]
    every = held_out(documents)
    assert len(every) == 100
    before, now = held_out(documents[:500]), {d.name for d in documents[:500]} & every
    assert len(before ^ now) < 15


@given(st.lists(st.text("ab \n", min_size=1, max_size=4), min_size=20), st.floats(0.05, 0.5))
def test_text_is_on_one_side_under_any_names(texts: list[str], fraction: float) -> None:
    """The random texts have at most four characters, so some of them are equal."""
    names_of: dict[str, set[str]] = {"train": set(), "val": set()}
    documents = [text_document(f"{number}", text) for number, text in enumerate(texts)]
    for parts, text in zip(parts_of(documents, fraction), texts, strict=True):
        for side, piece in parts:
            if piece == text:
                names_of[side].add(piece)
    assert not names_of["train"] & names_of["val"]


def test_lot_depends_on_the_whole_content() -> None:
    begin = "x" * (2 * PIECE)
    lots = {lot(text_document("a", begin + end)) for end in "abc"}
    assert len(lots) == 3
    whole = hashlib.sha256((begin + "a").encode()).digest()
    assert lot(text_document("b", begin + "a")) == int.from_bytes(whole[:8])


def test_own_text_of_python_is_drawn_by_names() -> None:
    """The bundled checkpoint depends on this: a module stays on the same side even if its contents
    differ in another version of Python."""
    documents = [
        text_document(f"module{index}.py", "same", drawn_by_name=True) for index in range(200)
    ]
    lots = {d.name: hashlib.sha256(d.name.encode()).digest() for d in documents}
    assert held_out(documents) == set(sorted(lots, key=lambda name: lots[name])[:20])


def test_lowest_lots_are_held_out() -> None:
    documents = [text_document(f"{index}", f"text {index}") for index in range(100)]
    expected = held_out(documents)
    first = sorted(documents, key=lot)[: len(expected)]
    assert {document.name for document in first} == expected
