"""Character vocabularies, as nanoGPT's `meta.pkl` has them, as tokenizers of this project.

The id of a character is its rank, unchanged: the pattern cuts a text into characters, and a piece
that is a token as a whole is never merged, so a character of several bytes needs no steps between.
tiktoken needs all 256 bytes; those that are not characters of the vocabulary get the ranks after
the last id (see `Tokenizer`): they are never sampled, and a text that needs one is rejected.
"""

from pathlib import Path
from typing import Any

from model.convert.foreign import ConvertError, ForeignTokenizer
from model.convert.pt_file import read_plain_pickle
from model.text.tokenizer import Tokenizer

CHARACTER_PATTERN = r"[\s\S]"
"""Every character by itself, line breaks too."""


def read_meta(path: Path) -> ForeignTokenizer:
    """The vocabulary of a `meta.pkl`: `stoi`, from characters to ids. Raises ConvertError."""
    meta = read_plain_pickle(path)
    stoi = meta.get("stoi") if isinstance(meta, dict) else None
    if not isinstance(stoi, dict):
        raise ConvertError(f"{path} has no dictionary 'stoi' from characters to ids")
    itos = meta.get("itos")
    if itos is not None and itos != {token_id: text for text, token_id in stoi.items()}:
        raise ConvertError(f"{path}: 'itos' is not 'stoi' the other way round")
    return ForeignTokenizer(tokenizer=character_tokenizer(stoi, str(path)))


def character_tokenizer(stoi: dict[Any, Any], where: str) -> Tokenizer:
    """A tokenizer whose ids are those of `stoi`. Raises ConvertError."""
    for text in stoi:
        if not isinstance(text, str) or len(text) != 1 or "\ud800" <= text <= "\udfff":
            raise ConvertError(f"{where}: {text!r} is not one character")
    ids = sorted(token_id for token_id in stoi.values() if type(token_id) is int)
    if ids != list(range(len(stoi))):
        raise ConvertError(
            f"{where}: the ids of the {len(stoi)} characters are not the numbers 0 to "
            f"{len(stoi) - 1}"
        )
    ranks = {text.encode(): token_id for text, token_id in stoi.items()}
    missing = [byte for byte in map(bytes, zip(range(256))) if byte not in ranks]
    ranks |= {byte: len(stoi) + index for index, byte in enumerate(missing)}
    return Tokenizer(
        ranks=ranks, pattern=CHARACTER_PATTERN, special_tokens={}, vocab_size=len(stoi)
    )
