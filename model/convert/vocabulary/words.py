"""Vocabularies of whole pieces as tokenizers: characters and words, with special tokens.

The name of a special token is recognised by its markup (`<unk>`, `[PAD]`, `__eos__`) or, without
markup, by a short list. Ids without a text get a name, so that every id below the last has one.

Characters, as in nanoGPT's `meta.pkl`: the pattern cuts a text into characters, and a piece that is
a token is never merged, so a character of several bytes needs no tokens in between. tiktoken needs
all 256 bytes; the missing ones get ranks after the last id (see `Tokenizer`): they are never
sampled, and a text that needs one is rejected. A longer text, `<pad>` or a flag of two code points,
is a special token: `for c in text` never produces one either.

Words: the way to cut a text is seldom known. The cut is the first of a few that leaves each token
whole, and the notes say that it is assumed. It has the same result as `re.findall` or `str.split`
and a dictionary for every text whose words the vocabulary has.

with white space among the tokens   tokens are written one after the other, as they are
without                             white space separates words and has no ids: here each token has
                                    one space before it (kind "words")

A word that the vocabulary lacks is rejected. Vocabularies of parts of words are refused, because
the parts of a word cannot be known: tokens with marks for parts (`##ing`, `</w>`), and vocabularies
with a token for every letter of their words.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from logitd.model.convert.foreign import ConvertError
from logitd.model.text.pieces import JOINED_CUTS, SPACED_CUTS, whole_first
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer

CHARACTERS = r"[\s\S]"
"""Pattern of single characters, line breaks included."""
WHOLE_TEXT = r"[\s\S]+"
"""Pattern that does not cut a text."""

PARTS = {
    "##": "WordPiece's mark of a continued word",
    "@@": "a mark of a continued word",
    "</w>": "a mark of the end of a word",
    "\u2581": "SentencePiece's mark of a space",
    "\u0120": "byte-level BPE's mark of a space",
}
"""Marks of tokens that are parts of words."""
WITHOUT_TEXT = "--tokenizer none imports the model for token ids alone"

_LOOK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]|\{[^\s{}]+\}|__[^\W_]\w*__")
_BARE = frozenset(
    (
        *("PAD", "UNK", "BOS", "EOS", "SOS", "EOT", "EOF", "EOD"),
        *("CLS", "SEP", "MASK", "START", "END", "STOP"),
    )
)
_END_NAMES = (
    *(END_OF_TEXT, "<eos>", "<EOS>", "</s>", "[EOS]", "<|eos|>", "<|eot|>", "<eot>", "<EOT>"),
    *("[EOD]", "<eod>", "<END>", "<end>", "[END]", "EOS", "EOT", "EOD"),
)
"""Names of tokens that end a document, by precedence."""

MOST_NAMELESS = 8
"""Most ids without a text that get a name; more of them mean a damaged file."""
MOST_LISTED = 10**6
"""Most ids without a text that are listed."""


def looks_special(text: str) -> bool:
    """True for markup around one word."""
    return len(text) > 2 and _LOOK.fullmatch(text) is not None


def is_bare_name(text: str) -> bool:
    return text in _BARE


def nameless(texts: Collection[int]) -> list[int]:
    """Ids below the largest that have no text. Raises ConvertError for more than MOST_LISTED."""
    if (largest := max(texts)) > len(texts) + MOST_LISTED:
        raise ConvertError(
            f"a vocabulary of {len(texts):,} texts has ids up to {largest:,}: it is damaged, or "
            "not a vocabulary"
        )
    return sorted(set(range(largest + 1)).difference(texts))


def special_names(names: Mapping[int, str], ordinary: Collection[int]) -> dict[str, int]:
    """Names and ids of special tokens: those of `names`, and made-up ones for ids that are in
    neither."""
    special = {name: token_id for token_id, name in names.items()}
    for token_id in nameless({*names, *ordinary}):
        name = f"<|extra_{token_id}|>"
        while name in special:
            name = f"<{name}>"
        special[name] = token_id
    return special


def end_name(special: Collection[str]) -> str:
    """The name of the special token that ends a document; END_OF_TEXT if there is none."""
    return next((name for name in _END_NAMES if name in special), END_OF_TEXT)


def character_tokenizer(texts: Mapping[int, str]) -> Tokenizer:
    """A tokenizer with these ids; ids without a text become special tokens."""
    size = max(texts) + 1
    names = {token_id: text for token_id, text in texts.items() if len(text) > 1}
    special = special_names(names, texts)
    ranks = {text.encode(): token_id for token_id, text in texts.items() if len(text) == 1}
    missing = [byte for byte in map(bytes, zip(range(256))) if byte not in ranks]
    ranks |= {byte: size + index for index, byte in enumerate(missing)}
    return Tokenizer(
        ranks=ranks,
        pattern=CHARACTERS,
        special_tokens=special,
        vocab_size=size,
        end_of_text_name=end_name(special),
    )


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
    """A tokenizer with these ids, and notes on assumptions. Raises ConvertError.

    named_special  special tokens among the texts that do not look so
    cut            the regular expression that cuts texts, if it is known
    end_of_text    the special token that ends a document, if it is known
    added_tokens   texts that are split off before a text is cut, and their flags
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
    assumed, pattern = "", cut
    if pattern is None:
        pattern = (_joined_cut if joined else _spaced_cut)(words.values(), where)
        shown = pattern if len(pattern) < 60 else f"{pattern[:57]}..."
        assumed = (
            f"how texts were cut is not written down; assumed is {shown} (as re.findall cuts), by "
            "which each token is one piece; "
        )
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
        kind="pieces" if joined else "words",
    )
    between = "white space only separates words, and decoding writes one space before each"
    if joined:
        between = "white space is part of the text"
    return tokenizer, (
        f"tokens are whole words; {assumed}{between}",
        "a word that the vocabulary lacks is rejected here; where it was trained it may have "
        "become a token for the unknown. Texts are not put into lower case or changed otherwise",
    )


def _joined_cut(words: Collection[str], where: str) -> str:
    for cut in JOINED_CUTS:
        if not (torn := _torn(cut, words)):
            return cut
    raise ConvertError(
        f"{where} has words and white space among its tokens, and none of the usual ways to cut a "
        f"text makes each of them one piece: {torn[0]!r} is cut by all. {WITHOUT_TEXT}"
    )


def _spaced_cut(words: Collection[str], where: str) -> str:
    single = [word for word in words if len(word.split()) == 1]
    several = [word for word in words if len(word.split()) > 1]
    cut = next(cut for cut in SPACED_CUTS if not _torn(cut, single))
    if several:
        _refuse_ambiguous(words, where)
    return f"{whole_first(several)}{cut}"


def _torn(cut: str, words: Iterable[str]) -> list[str]:
    pattern = re.compile(cut)
    return [word for word in words if pattern.findall(word) != [word]]


def _refuse_ambiguous(words: Collection[str], where: str) -> None:
    """Raise ConvertError if a text could be two rows of tokens: a token of several words begins
    with another token, and the rest of it agrees with the beginning of a third."""
    split = sorted(tuple(word.split(" ")) for word in words)
    known, firsts = set(split), {parts[0] for parts in split}
    for parts in split:
        for length in range(1, len(parts)):
            if parts[:length] in known and parts[length] in firsts:
                raise ConvertError(
                    f"{where}: the token {' '.join(parts)!r} begins with the token "
                    f"{' '.join(parts[:length])!r}, and {parts[length]!r} begins one as well, so a "
                    f"text would be ambiguous. {WITHOUT_TEXT}"
                )


def _refuse_parts(words: Collection[str], where: str) -> None:
    for mark, meaning in PARTS.items():
        marked = [w for w in words if w != mark and (w.startswith(mark) or w.endswith(mark))]
        if 2 * len(marked) > len(words) or (mark in ("##", "</w>") and marked):
            raise ConvertError(
                f"{where} has tokens that are parts of words ({marked[0]!r}: {meaning}), and not "
                "the merges that define how a word is cut. Give a tokenizer.json, which has both; "
                f"{WITHOUT_TEXT}"
            )
    longer = [word for word in words if len(word) > 1 and word.isalpha()]
    letters = {letter for word in longer for letter in word}
    if longer and letters <= set(words):
        raise ConvertError(
            f"{where} has every letter of its words as a token of its own, so its tokens are parts "
            f"of words ({longer[0]!r}), and how a word is cut is not written down. Give a "
            f"tokenizer.json, which says it; {WITHOUT_TEXT}"
        )
