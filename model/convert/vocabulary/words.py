"""Vocabularies of whole words as tokenizers: how a text is cut, and where spaces go.

The source's ids and words are known, its way to cut a text seldom is. So the cut is the first of a
few by which each token is one piece as a whole (the same as `re.findall` or `str.split` and a
dictionary, for every text whose words the vocabulary has), and the notes say that it is assumed.

with white space among the tokens   tokens are written one after the other, as they are
without                             words have white space between them, which is not in the ids:
                                    each token has one space before it here (kind "words")

A word that the vocabulary lacks is rejected. Refused is what is made of parts of words, because
which parts cannot be known: tokens with marks for it (`##ing`, `</w>`), and vocabularies that have
every letter of their words by itself.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.vocabulary.special import end_name, looks_special, special_names
from logitd.model.text.pieces import JOINED_CUTS, SPACED_CUTS, whole_first
from logitd.model.text.tokenizer import Tokenizer, TokenizerKind

PARTS = {
    "##": "WordPiece's sign that a word goes on",
    "@@": "a sign that a word goes on",
    "</w>": "a sign that a word ends",
    "\u2581": "SentencePiece's sign for a space",
    "\u0120": "byte-level BPE's sign for a space",
}
"""Marks of vocabularies whose tokens are parts of words."""


def word_tokenizer(
    texts: Mapping[int, str],
    where: str,
    named_special: Collection[str] = (),
    *,
    cut: str | None = None,
    end_of_text: str | None = None,
    added_tokens: Mapping[str, int] | None = None,
    added_flags: Mapping[str, Collection[str]] | None = None,
) -> tuple[Tokenizer, tuple[str, ...]]:
    """A tokenizer with these ids, and what is assumed. Raises ConvertError.

    named_special  which of the texts are special tokens, besides those that look so
    cut            the regular expression that cuts texts, where it is known
    end_of_text    the special token that ends a document, where it is known
    added_tokens   which of the texts are split off before a text is cut, and their flags
    """
    added_tokens = added_tokens or {}
    names = {
        i: text
        for i, text in texts.items()
        if text in named_special or (looks_special(text) and text not in added_tokens)
    }
    words = {i: text for i, text in texts.items() if i not in names}
    _refuse_parts(words.values(), where)
    joined = any(text != text.strip() for text in words.values())
    kind: TokenizerKind = "pieces" if joined else "words"
    find_cut = _joined_cut if joined else _spaced_cut
    pattern = find_cut(words.values(), where) if cut is None else cut
    special = special_names(names, words)
    space = "" if joined else " "
    tokenizer = Tokenizer(
        ranks={f"{space}{text}".encode(): token_id for token_id, text in words.items()},
        pattern=pattern,
        special_tokens=special,
        added_tokens=added_tokens,
        added_flags=added_flags,
        vocab_size=max(texts) + 1,
        end_of_text_name=end_name(special) if end_of_text is None else end_of_text,
        kind=kind,
    )
    between = (
        "white space is part of the text"
        if joined
        else "white space only separates words, and decoding writes one space before each"
    )
    shown = pattern if len(pattern) < 60 else f"{pattern[:57]}..."
    assumed = (
        f"how texts were cut is not written down; assumed is {shown} (as re.findall cuts), by "
        f"which each token is one piece; "
    )
    return tokenizer, (
        f"tokens are whole words; {assumed if cut is None else ''}{between}",
        "a word that the vocabulary lacks is rejected here; where it was trained it may have "
        "become a token for the unknown. Texts are not put into lower case or changed otherwise",
    )


def _joined_cut(words: Collection[str], where: str) -> str:
    for cut in JOINED_CUTS:
        if not _torn(cut, words):
            return cut
    torn = _torn(JOINED_CUTS[-1], words)
    raise ConvertError(
        f"{where} has words and white space among its tokens, and none of the usual ways to cut a "
        f"text makes each of them one piece: {torn[0]!r} is cut by all. --tokenizer none imports "
        "the model for token ids alone"
    )


def _spaced_cut(words: Collection[str], where: str) -> str:
    """The first cut that holds; before it tokens of several words, longest first."""
    single = [word for word in words if len(word.split()) == 1]
    several = [word for word in words if len(word.split()) > 1]
    cut = next(cut for cut in SPACED_CUTS if not _torn(cut, single))
    if not several:
        return cut
    _refuse_ambiguous(words, where)
    return f"{whole_first(several)}{cut}"


def _torn(cut: str, words: Iterable[str]) -> list[str]:
    """The words that a cut does not leave whole."""
    pattern = re.compile(cut)
    return [word for word in words if pattern.findall(word) != [word]]


def _refuse_ambiguous(words: Collection[str], where: str) -> None:
    """Raise ConvertError where a text could be two rows of tokens: a token of several words begins
    with another token, and what is left of it agrees with the beginning of a third."""
    split = sorted(tuple(word.split(" ")) for word in words)
    known, firsts = set(split), {parts[0] for parts in split}
    for parts in split:
        for length in range(1, len(parts)):
            if parts[:length] in known and parts[length] in firsts:
                raise ConvertError(
                    f"{where}: the token {' '.join(parts)!r} begins with the token "
                    f"{' '.join(parts[:length])!r}, and {parts[length]!r} begins one as well, so a "
                    "text would not say which is meant. --tokenizer none imports the model for "
                    "token ids alone"
                )


def _refuse_parts(words: Collection[str], where: str) -> None:
    for mark, meaning in PARTS.items():
        marked = [
            word
            for word in words
            if word != mark and (word.startswith(mark) or word.endswith(mark))
        ]
        if 2 * len(marked) > len(words) or (mark in ("##", "</w>") and marked):
            raise ConvertError(
                f"{where} has tokens that are parts of words ({marked[0]!r}: {meaning}), and not "
                "the merges that would say how a word is cut. A tokenizer.json says all of it; "
                "--tokenizer none imports the model for token ids alone"
            )
    longer = [word for word in words if len(word) > 1 and word.isalpha()]
    letters = {letter for word in longer for letter in word}
    if longer and letters <= set(words):
        raise ConvertError(
            f"{where} has every letter of its words as a token of its own, so its tokens are parts "
            f"of words ({longer[0]!r}), and how a word is cut is not written down. A "
            "tokenizer.json says all of it; --tokenizer none imports the model for token ids alone"
        )
