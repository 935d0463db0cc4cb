"""Which documents are held out, and which part of one: never the same text on both sides."""

import hashlib
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from logitd.model.data.sources.document import PIECE, Document, text_document
from logitd.model.data.split import MANY, are_many, lot, sides


def held_out(documents: list[Document], fraction: float = 0.1) -> set[str]:
    return {
        document.name
        for document in documents
        if [side for side, _ in sides(document, fraction, many=True)] == ["val"]
    }


@given(st.text(max_size=300), st.floats(0.01, 0.5))
def test_the_end_of_a_single_document_is_held_out(text: str, fraction: float) -> None:
    text = text.encode(errors="replace").decode()
    parts = list(sides(text_document("a", text), fraction, many=False))
    assert "".join(piece for _, piece in parts) == text
    order = [side for side, _ in parts]
    assert order == sorted(order), "train comes before val"


def test_a_document_is_cut_behind_a_lines_end() -> None:
    parts = list(sides(text_document("a", "one\ntwo\nthree\nfour\n"), 0.4, many=False))
    assert parts == [("train", "one\ntwo\nthree\n"), ("val", "four\n")]


def test_a_document_of_unknown_size_is_cut_at_the_same_place() -> None:
    known = text_document("a", "some words\n" * 30_000)
    unknown = Document("a", known.pieces)
    assert list(sides(known, 0.3, many=False)) == list(sides(unknown, 0.3, many=False))


def test_of_many_documents_some_are_held_out_whole_and_adding_others_moves_none() -> None:
    documents = [text_document(f"file{index}", f"text {index}") for index in range(1000)]
    every = held_out(documents)
    assert 60 < len(every) < 140
    assert held_out(documents[:300]) == {d.name for d in documents[:300]} & every


@given(st.lists(st.text("ab \n", min_size=1, max_size=4), min_size=MANY), st.floats(0.05, 0.5))
def test_no_text_is_on_both_sides_whatever_its_names_are(texts: list[str], fraction: float) -> None:
    """Short texts of four characters repeat: under other names, and by chance."""
    names_of: dict[str, set[str]] = {"train": set(), "val": set()}
    for number, text in enumerate(texts):
        for side, piece in sides(text_document(f"{number}", text), fraction, many=True):
            names_of[side].add(piece)
    assert not names_of["train"] & names_of["val"]


def test_a_long_document_draws_by_all_of_its_content() -> None:
    begin = "x" * (2 * PIECE)
    lots = {lot(text_document("a", begin + end)) for end in "abc"}
    assert len(lots) == 3
    whole = hashlib.sha256((begin + "a").encode()).digest()
    assert lot(text_document("b", begin + "a")) == int.from_bytes(whole[:8])


def test_pythons_own_text_is_drawn_by_names() -> None:
    """As the bundled checkpoint's was: another Python's other content moves no module."""
    documents = [
        text_document(f"module{index}.py", "same", drawn_by_name=True) for index in range(200)
    ]
    names = held_out(documents)
    expected = {
        document.name
        for document in documents
        if int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8]) < 0.1 * 2**64
    }
    assert names == expected
    assert 5 < len(names) < 40


def test_what_is_held_out_first_is_what_is_held_out() -> None:
    documents = [text_document(f"{index}", f"text {index}") for index in range(100)]
    expected = held_out(documents)
    first = sorted(documents, key=lot)[: len(expected)]
    assert {document.name for document in first} == expected


def test_only_so_many_documents_are_counted_as_needed() -> None:
    def documents(count: int) -> Iterator[Document]:
        yield from (text_document(f"{number}", "x") for number in range(count))

    every = documents(2 * MANY)
    assert are_many(every)
    assert next(every).name == f"{MANY}", "the others were not looked at"
    assert not are_many(documents(MANY - 1))
