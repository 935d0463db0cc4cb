"""Ranks and merges: converts between two ways to write the same byte pair encoding.

tiktoken repeatedly merges the adjacent parts whose joined bytes have the lowest rank. A list of
merges names the pairs to join, in order of priority.

As long as no merge crosses a boundary of a token, the merges inside the token do not depend on the
text around it. So the last merge that forms a token always joins the same pair (`last_pair`). A
list of merges gives the same encoding as the ranks if it contains this pair for every token, in the
order of the tokens' ranks. A token that merges cannot form from its bytes is used only for a whole
piece of the text: tiktoken looks up whole pieces first, and so does Hugging Face's library if
`ignore_merges` is set.

Merges and `tokenizer.json` spell bytes as GPT-2 does: printable bytes as themselves, all other
bytes as the characters from U+0100 to U+0143.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from logitd.model.convert.foreign import ConvertError
from logitd.model.text.tokenizer import CHARACTERS

Pair = tuple[bytes, bytes]

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(256)).difference(_PRINTABLE))
BYTE_CHARACTERS: Mapping[int, str] = {
    **{byte: chr(byte) for byte in _PRINTABLE},
    **{byte: chr(0x100 + index) for index, byte in enumerate(_OTHERS)},
}
"""The character that spells each byte."""
_BYTES = {character: byte for byte, character in BYTE_CHARACTERS.items()}


def last_pair(token: bytes, ranks: Mapping[bytes, int]) -> Pair | None:
    """The pair that the last merge joins to form a token from its bytes; None if merges do not form
    the token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        best, place = None, -1
        for index, pair in enumerate(pairwise(parts)):
            rank = ranks.get(pair[0] + pair[1])
            if rank is not None and (best is None or rank < best):
                best, place = rank, index
        if best is None:
            return None
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def merges_of(ranks: Mapping[bytes, int]) -> tuple[list[Pair], list[bytes]]:
    """The list of merges that gives the same encoding as these ranks, and the tokens that no merge
    forms."""
    merges, alone = [], []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        pair = last_pair(token, ranks)
        if pair is None or pair[0] not in ranks or pair[1] not in ranks:
            alone.append(token)
        else:
            merges.append(pair)
    return merges, alone


def merge_piece(piece: Iterable[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """Encode a piece of text by following the definition of BPE. This is slow. `merges` maps each
    pair to its index in the list of merges; pairs with lower indices are merged first."""
    parts = list(piece)
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: merges.get(pair, len(merges)))
        if best not in merges:
            break
        place = pairs.index(best)
        parts[place : place + 2] = ["".join(best)]
    return parts


def written(token: bytes) -> str:
    """The spelling of a token in `tokenizer.json` and GGUF."""
    return "".join(map(BYTE_CHARACTERS.__getitem__, token))


def unwritten(spelled: str) -> bytes:
    """The token with this spelling. Raises KeyError if a character does not represent a byte."""
    return bytes(map(_BYTES.__getitem__, spelled))


def check_merges(
    model: Mapping[str, Any],
    places: Mapping[tuple[str, str], int],
    ranks: Mapping[bytes, int],
    pattern: str,
    path: Path,
) -> None:
    """Raise ConvertError unless the merges of a `tokenizer.json`'s `model`, with their places in
    the list, give the same encoding as the ranks."""
    pairs, last = set(), -1
    for left, right in places:
        try:
            pair = (unwritten(left), unwritten(right))
            rank = ranks[pair[0] + pair[1]]
        except KeyError as error:
            raise ConvertError(
                f"{path}: the merge of {left!r} and {right!r} forms no token of the vocabulary"
            ) from error
        if rank < last:
            raise ConvertError(
                f"{path}: the merge of {left!r} and {right!r} is out of order; merges can be "
                "converted to ranks only if they are in the order of the ids that they create"
            )
        last = rank
        pairs.add(pair)
    if pattern == CHARACTERS and model.get("ignore_merges") is True and not pairs:
        return  # whole characters are looked up
    for token in ranks:
        if len(token) == 1:
            continue
        pair_of = last_pair(token, ranks)
        if pair_of is None and model.get("ignore_merges") is not True:
            raise ConvertError(
                f"{path}: no merges form the token {token!r}, but with ranks it would be used for "
                "a whole word"
            )
        if pair_of is not None and pair_of not in pairs:
            raise ConvertError(
                f"{path}: with ranks, the token {token!r} would be merged from {pair_of[0]!r} "
                f"and {pair_of[1]!r}, which is not one of its merges"
            )
