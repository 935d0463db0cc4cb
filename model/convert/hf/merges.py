"""Ranks and merges: converts between two notations of the same byte pair encoding.

tiktoken repeatedly merges the adjacent parts whose joined bytes have the lowest rank. A list of
merges names the pairs to join, in order of priority.

As long as no merge crosses the ends of a token, the merges inside it do not depend on the text
around it. So a token is always formed by the same last pair (`last_pair`). A list of merges encodes
as the ranks do if it contains that pair for every token, ordered by the tokens' ranks. A token that
cannot be formed from its bytes is used only for a whole piece of the text: tiktoken looks up whole
pieces first, and so does Hugging Face if `ignore_merges` is set.

Merges and `tokenizer.json` spell bytes as GPT-2 does: printable ones as themselves, the others as
characters from U+0100 on.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

Pair = tuple[bytes, bytes]


def last_pair(token: bytes, ranks: Mapping[bytes, int]) -> Pair | None:
    """The pair whose merge completes a token, starting from its bytes; None if merges do not form
    it."""
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
    """The list of merges that encodes as these ranks do, and the tokens that no merge forms."""
    merges, alone = [], []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        pair = last_pair(token, ranks)
        if pair is None or pair[0] not in ranks or pair[1] not in ranks:
            alone.append(token)
        else:
            merges.append(pair)
    return merges, alone


def merge_piece(piece: Iterable[str], merges: Mapping[tuple[str, str], int]) -> list[str]:
    """Merge the parts of a piece by the plain, slow definition. `merges` has the priority of each
    pair."""
    parts = list(piece)
    while len(parts) > 1:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: merges.get(pair, len(merges)))
        if best not in merges:
            break
        place = pairs.index(best)
        parts[place : place + 2] = ["".join(best)]
    return parts


def byte_characters() -> dict[int, str]:
    """The character that spells each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


def written(token: bytes, characters: Mapping[int, str]) -> str:
    """The spelling of a token in `tokenizer.json` and GGUF. `characters` is `byte_characters()`."""
    return "".join(map(characters.__getitem__, token))
