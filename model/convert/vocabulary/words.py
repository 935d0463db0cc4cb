"""Words: builds tokenizers from vocabularies of characters or whole words, with special tokens.

Names of special tokens are recognized by their markup (`<unk>`, `[PAD]`, `__eos__`); names without
markup, such as `PAD`, are recognized only if they are in a short list. Ids without a text get a
generated name, so that every id up to the last one has a token.

Vocabularies of characters, as in nanoGPT's `meta.pkl`: the split pattern divides a text into
characters. A piece of the text that is a token is looked up without merging, so the parts of a
character of several bytes need no tokens. tiktoken needs all 256 bytes. Missing bytes get ranks
after the last id (see `Tokenizer`): they are never sampled, and a text that needs such a byte is
refused. A longer token, such as `<pad>` or a flag emoji of two code points, becomes a special
token, because `for c in text` never produces it.

Vocabularies of words: the split pattern is seldom known. A few patterns are tried. The first that
leaves every token whole is assumed, and a note says so. For texts whose words are all in the
vocabulary, the ids are the same as with `re.findall` or `str.split` and a dictionary. If white
space has tokens of its own, decoding concatenates tokens unchanged. Otherwise, white space only
separates words and has no ids; in the checkpoint, each token has one space before it (kind
"words").

A text with an unknown word is refused. Vocabularies of parts of words are not supported, because
the rules that divide words are unknown. Such vocabularies are recognized by marks of parts
(`##ing`, `</w>`), or because every letter of their words is also a token.
"""

import re
from collections.abc import Collection, Iterable, Mapping

from logitd.model.convert.foreign import ConvertError
from logitd.model.text.pieces import JOINED_CUTS, SPACED_CUTS, whole_first
from logitd.model.text.tokenizer import CHARACTERS, END_OF_TEXT, Tokenizer

WHOLE_TEXT = r"[\s\S]+"
"""Split pattern that matches the whole text, so the text is not split."""

PARTS = {
    "##": "WordPiece's mark of a continued word",
    "@@": "a mark of a continued word",
    "</w>": "a mark of the end of a word",
    "\u2581": "SentencePiece's mark of a space",
    "\u0120": "byte-level BPE's mark of a space",
}
"""Marks that show that a token is only a part of a word, with their meanings."""
WITHOUT_TEXT = "--tokenizer none imports the model without a vocabulary"

_LOOK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]|\{[^\s{}]+\}|__[^\W_]\w*__")
_BARE = frozenset(
    (
        *("PAD", "UNK", "BOS", "EOS", "SOS", "EOT", "EOF", "EOD"),
        *("CLS", "SEP", "MASK", "START", "END", "STOP"),
    )
)
_END_NAMES = (
    *(END_OF_TEXT, "<eos>", "<EOS>", "</s>", "[EOS]", "<|eos|>", "<|eot|>", "<eot>", "<EOT>"),
    *("[EOD]", "<eod>", "<END>", "<end>", "[END]", "EOS", "EOT", "EOD", "<|bos|>"),
)
"""Names of tokens that end a document, in order of preference. "<|bos|>" is included because it
begins the next document."""

MOST_NAMELESS = 8
"""Maximum number of ids without a text. A file with more such ids is considered damaged."""
MOST_LISTED = 10**6
"""Maximum number of ids without a text that `nameless` lists."""


def looks_special(text: str) -> bool:
    """True if a text is markup around one word, such as `<unk>`."""
    return len(text) > 2 and _LOOK.fullmatch(text) is not None


def is_bare_name(text: str) -> bool:
    return text in _BARE


def nameless(texts: Collection[int]) -> list[int]:
    """The ids below the largest id that have no text. Raises ConvertError if there are more than
    MOST_LISTED of them."""
    if (largest := max(texts)) > len(texts) + MOST_LISTED:
        raise ConvertError(
            f"a vocabulary of {len(texts):,} texts has ids up to {largest:,}: it is damaged, or "
            "not a vocabulary"
        )
    return sorted(set(range(largest + 1)).difference(texts))


def special_names(names: Mapping[int, str], ordinary: Collection[int]) -> dict[str, int]:
    """The ids of special tokens, by name. An id that is neither in `names` nor in `ordinary`
    becomes a special token with a generated name."""
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


def with_all_bytes(ranks: Mapping[bytes, int], size: int) -> dict[bytes, int]:
    """The ranks, and additional ranks for the bytes that the vocabulary lacks. The additional ranks
    begin at `size` (see `Tokenizer`)."""
    missing = (byte for byte in map(bytes, zip(range(256))) if byte not in ranks)
    return {**ranks, **{byte: size + index for index, byte in enumerate(missing)}}


def character_tokenizer(texts: Mapping[int, str]) -> Tokenizer:
    """Build a tokenizer of characters. Ids without a text become special tokens."""
    size = max(texts) + 1
    names = {token_id: text for token_id, text in texts.items() if len(text) > 1}
    special = special_names(names, texts)
    ranks = {text.encode(): token_id for token_id, text in texts.items() if len(text) == 1}
    return Tokenizer(
        ranks=with_all_bytes(ranks, size),
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
    stored: str | None = None,
    end_of_text: str | None = None,
    added_tokens: Mapping[str, int] | None = None,
    added_flags: Mapping[str, Collection[str]] | None = None,
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Build a tokenizer of words, with notes about assumptions. Raises ConvertError.

    named_special  texts that are special tokens, although they may not look special
    cut            split pattern, if it is known
    stored         split pattern of the source's vocabulary, which is used if no token is split
    end_of_text    special token that ends a document, if it is known
    added_tokens   texts that are matched before a text is split; `added_flags` are their flags
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
    if cut is None and stored is not None and _leaves_whole(stored, words.values()):
        cut = stored
    assumed, pattern = "", cut
    if pattern is None:
        pattern = (_joined_cut if joined else _spaced_cut)(words.values(), where)
        shown = pattern if len(pattern) < 60 else f"{pattern[:57]}..."
        reason = "is not stored" if stored is None else f"{stored!r} splits tokens"
        assumed = (
            f"the split pattern {reason}; {shown} is assumed (as for re.findall), by which each "
            "token is one piece; "
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
    between = "white space only separates words, and decoding puts one space before each"
    if joined:
        between = "white space is part of the text"
    return tokenizer, (
        f"tokens are whole words; {assumed}{between}",
        "a text with an unknown word is refused here; in training the word may have become a "
        "token for unknown words. Texts are not converted to lower case or changed otherwise",
    )


def _joined_cut(words: Collection[str], where: str) -> str:
    for cut in JOINED_CUTS:
        if not (torn := _torn(cut, words)):
            return cut
    raise ConvertError(
        f"{where} has words and white space among its tokens, but none of the usual split "
        f"patterns leaves all of them whole: each splits {torn[0]!r}. {WITHOUT_TEXT}"
    )


def _spaced_cut(words: Collection[str], where: str) -> str:
    single = [word for word in words if len(word.split()) == 1]
    several = [word for word in words if len(word.split()) > 1]
    cut = next(cut for cut in SPACED_CUTS if not _torn(cut, single))
    if several:
        _refuse_ambiguous(words, where)
    return f"{whole_first(several)}{cut}"


def _leaves_whole(cut: str, words: Iterable[str]) -> bool:
    try:
        return not _torn(cut, words)
    except re.error:
        return False


def _torn(cut: str, words: Iterable[str]) -> list[str]:
    pattern = re.compile(cut)
    return [word for word in words if pattern.findall(word) != [word]]


def _refuse_ambiguous(words: Collection[str], where: str) -> None:
    """Raise ConvertError if some text could be encoded in two ways. This can happen if a token of
    several words begins with a shorter token, and the next word of the longer token is also the
    first word of some token."""
    split = sorted(tuple(word.split(" ")) for word in words)
    known, firsts = set(split), {parts[0] for parts in split}
    for parts in split:
        for length in range(1, len(parts)):
            if parts[:length] in known and parts[length] in firsts:
                raise ConvertError(
                    f"{where}: the token {' '.join(parts)!r} begins with the token "
                    f"{' '.join(parts[:length])!r}, and another token begins with "
                    f"{parts[length]!r}, so some texts could be encoded in two ways. {WITHOUT_TEXT}"
                )


def _refuse_parts(words: Collection[str], where: str) -> None:
    for mark, meaning in PARTS.items():
        marked = [w for w in words if w != mark and (w.startswith(mark) or w.endswith(mark))]
        if 2 * len(marked) > len(words) or (mark in ("##", "</w>") and marked):
            raise ConvertError(
                f"{where} has tokens that are parts of words ({marked[0]!r}: {meaning}), but not "
                "the rules that divide words. Give its tokenizer.json if it is byte-level BPE; "
                f"{WITHOUT_TEXT}"
            )
    longer = [word for word in words if len(word) > 1 and word.isalpha()]
    letters = {letter for word in longer for letter in word}
    if longer and letters <= set(words):
        raise ConvertError(
            f"{where}: each letter of its longer tokens, such as {longer[0]!r}, is also a token, "
            "so its tokens are parts of words. The rules that divide words are missing: give a "
            f"tokenizer.json, which has the tokens and the rules; {WITHOUT_TEXT}"
        )
