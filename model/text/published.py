"""Published vocabularies: a published encoding by its name, or a ranks file by its path.

A ranks file says neither how text is cut nor which special tokens there are: published ones are
known by their hash. Does not learn a vocabulary (`model/data/vocabulary.py`) and does not read
other formats (`model/convert/`).
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from logitd.model.files import VOCABULARY_BYTES, read_regular
from logitd.model.text.tokenizer import (
    CL100K_PATTERN,
    END_OF_TEXT,
    GPT2_PATTERN,
    PUBLISHED,
    Tokenizer,
    TokenizerError,
)

_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}

KNOWN_FILES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": (  # gpt2, r50k_base
        GPT2_PATTERN,
        {END_OF_TEXT: 50256},
    ),
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": (  # cl100k_base
        CL100K_PATTERN,
        {END_OF_TEXT: 100257, **_FIM, "<|endofprompt|>": 100276},
    ),
}
"""Published ranks files by sha256: a ranks file holds neither its pattern nor special tokens."""


def published_tokenizer(name: str) -> Tokenizer:
    """A published encoding by name, or a ranks file by path. Raises TokenizerError."""
    return Tokenizer.named(name) if name in PUBLISHED else _from_file(Path(name))


def _from_file(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TokenizerError(
            f"the tokenizer {str(path)!r} is neither 'own' nor one of {', '.join(PUBLISHED)} nor "
            "a ranks file or a tokenizer.json"
        )
    try:
        raw = read_regular(path, VOCABULARY_BYTES)
    except OSError as error:
        raise TokenizerError(str(error)) from error
    known = KNOWN_FILES.get(hashlib.sha256(raw).hexdigest())
    if known is None:
        return Tokenizer.parse_ranks(raw, name=path.name)
    return Tokenizer.parse_ranks(raw, name=path.name, pattern=known[0], special_tokens=known[1])
