"""llama2.c's `tokenizer.bin`: SentencePiece's byte pairs with scores.

llama2.c starts from whole characters and repeatedly merges the two neighbors whose joined text has
the highest score. A character without a token is encoded as one token per byte. For single-byte
characters, tiktoken's algorithm gives the same result if the ids are ordered by score. The imported
split pattern makes each multi-byte character a separate piece. This gives the same ids unless a
longer token contains such a character; in that case, the vocabulary is refused.
"""

import re
import struct
from itertools import pairwise

from logitd.model.convert.foreign import ConvertError, ForeignTokenizer, naming
from logitd.model.convert.vocabulary.words import WITHOUT_TEXT, special_names, with_all_bytes
from logitd.model.text.tokenizer import Tokenizer

PATTERN = r"[^\x00-\x7F]|[\x00-\x7F]+"
FIRST_PIECE = 3
"""First id of the ordinary tokens. Lower ids are the unknown token, the beginning of a text and the
end of a text."""
_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")
_Entry = tuple[float, bytes]


def llama2c_tokenizer(raw: bytes, where: str) -> ForeignTokenizer:
    """Build a tokenizer from the contents of a `tokenizer.bin`. Raises ConvertError if the contents
    have another format or if encoding with ranks would give different ids."""
    entries = _entries(raw, where)
    pieces = {
        token_id: text
        for token_id, (_, text) in enumerate(entries)
        if token_id >= FIRST_PIECE and _BYTE.fullmatch(text) is None
    }
    _check_mergeable(entries, pieces, where)
    known = set(pieces.values())
    names = {i: f"<|{name}|>" for i, name in enumerate(("unk", "bos", "eos"))}
    ranks = {text: token_id for token_id, text in pieces.items()}
    for token_id, (_, text) in enumerate(entries):
        if token_id >= FIRST_PIECE and (match := _BYTE.fullmatch(text)) is not None:
            byte = bytes.fromhex(match[1].decode())
            if byte in known:  # never used, because the character has a token
                names[token_id] = text.decode()
            else:
                ranks[byte] = token_id
    size = len(entries)
    ranks = with_all_bytes(ranks, size)
    with naming(where):
        tokenizer = Tokenizer(
            ranks=ranks,
            pattern=PATTERN,
            special_tokens=special_names(names, pieces.keys() | set(ranks.values())),
            vocab_size=size,
            end_of_text_name=names[1],
        )
    note = (
        "llama2.c puts <|bos|> and a space before every text: begin prompts with a space to get "
        "its ids"
    )
    return ForeignTokenizer(tokenizer=tokenizer, notes=(note,), end_known=True)


def _entries(raw: bytes, where: str) -> list[_Entry]:
    """The tokens with their scores. The file begins with the length of the longest token. Then,
    it has the score, the length and the bytes of each token."""
    incomplete = ConvertError(f"{where} is not llama2.c's tokenizer.bin, or is incomplete")
    entries: list[_Entry] = []
    at = 4
    while at < len(raw):
        if at + 8 > len(raw):
            raise incomplete
        score, length = struct.unpack_from("<fi", raw, at)
        at += 8 + length
        if not 0 < length <= 1024 or at > len(raw):
            raise incomplete
        entries.append((score, raw[at - length : at]))
    longest = max((len(text) for _, text in entries), default=0)
    if len(entries) <= FIRST_PIECE or int.from_bytes(raw[:4], "little") < longest:
        raise incomplete
    return entries


def _check_mergeable(entries: list[_Entry], pieces: dict[int, bytes], where: str) -> None:
    merged = {i: text for i, text in pieces.items() if len(text.decode(errors="replace")) > 1}
    if mixed := [text for text in merged.values() if not text.isascii()]:
        raise ConvertError(
            f"{where}: the token {mixed[0].decode(errors='replace')!r} joins a "
            "multi-byte character with other characters, which byte-level ranks cannot express. "
            f"{WITHOUT_TEXT}"
        )
    scores = [entries[token_id][0] for token_id in merged]
    falling = all(before > after for before, after in pairwise(scores))
    if not falling or len(set(pieces.values())) < len(pieces):
        raise ConvertError(
            f"{where}: its ids are not in the order of its scores, or some scores are equal, so "
            f"with ranks, different pairs would be merged. {WITHOUT_TEXT}"
        )
