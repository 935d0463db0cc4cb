"""Vocabulary: learns the tokenizer of a training run from its text, and encodes texts with it.

rustbpe, an optional dependency of training, learns byte-level BPE. The result is an ordinary
`Tokenizer` (`model/text/tokenizer.py`).
"""

import hashlib
from collections.abc import Iterable, Iterator

from logitd.model.data.errors import DataError
from logitd.model.data.sources.document import PIECE
from logitd.model.extras import installation
from logitd.model.text.tokenizer import END_OF_TEXT, SPLIT_PATTERN, Tokenizer, TokenizerError

SMALLEST = 257
"""Size of the smallest vocabulary: the 256 bytes and END_OF_TEXT."""

LEARN_FROM = 256_000_000
"""Maximum number of characters from which a vocabulary is learned; more text hardly changes it."""


def learn(pieces: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a vocabulary of at most `vocab_size` ids, the 256 bytes and END_OF_TEXT included. A
    short text yields fewer ids. `pieces` have fewer than 2 * PIECE characters each. Raises
    DataError."""
    if vocab_size < SMALLEST:
        raise DataError(
            f"vocab_size {vocab_size} is below {SMALLEST}: each of the 256 bytes and {END_OF_TEXT} "
            "needs an id"
        )
    try:
        import rustbpe
    except ImportError as error:
        raise DataError(
            "learning a vocabulary needs rustbpe, which is not installed: use a published one, for "
            f"example --tokenizer gpt2, or install it: {installation('train')}"
        ) from error
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(_bounded(pieces), vocab_size - 1, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    return Tokenizer(ranks=ranks, pattern=SPLIT_PATTERN, special_tokens={END_OF_TEXT: len(ranks)})


def require_end_of_text(tokenizer: Tokenizer, name: str) -> None:
    """Raise DataError if a tokenizer has no end-of-text token to separate documents."""
    if tokenizer.end_of_text is None:
        raise DataError(
            f"{name} has no token to separate documents: add {END_OF_TEXT}, or a "
            "tokenizer_config.json next to it that names the eos_token"
        )


def require_vocabulary(tokenizer: Tokenizer, name: str) -> None:
    """Raise DataError for a model without a vocabulary, which has no loss on a text."""
    if not tokenizer.has_text:
        raise DataError(
            f"{name} has no vocabulary, so it has no loss on a text; POST /score and LLM.score "
            "(model/llm.py) return the logprobs of token ids"
        )


def encode(tokenizer: Tokenizer, piece: str, *, special_ids: bool = False) -> list[int]:
    """The ids of a piece of text. Raises DataError if the vocabulary cannot encode it."""
    try:
        return tokenizer.encode(piece, special_ids=special_ids)
    except TokenizerError as error:
        raise DataError(f"the text cannot be encoded: {error}") from error


def check(tokenizer: Tokenizer, piece: str) -> None:
    """Raise DataError unless decoding returns the encoded text. With a word-level vocabulary, white
    space is lost, so the decoded text only has to encode to the same ids."""
    ids = encode(tokenizer, piece)
    text = tokenizer.decode(ids)
    if encode(tokenizer, text) != ids if tokenizer.kind == "words" else text != piece:
        raise DataError(
            f"decoding does not return the text that begins {piece[:40]!r}: the tokenizer's split "
            f"pattern {tokenizer.pattern!r} leaves characters out"
        )


def tokenizer_sha256(tokenizer: Tokenizer) -> bytes:
    """The hash of a vocabulary: its ranks, pattern, kind, special and added tokens."""
    digest = hashlib.sha256(tokenizer.pattern.encode())
    if tokenizer.kind != "bpe":
        digest.update(f"{tokenizer.kind} {tokenizer.vocab_size}\n".encode())
    for token, rank in sorted(tokenizer.ranks.items(), key=lambda item: item[1]):
        digest.update(b"%d %s\n" % (rank, token.hex().encode()))
    for name, token_id in sorted((tokenizer.special_tokens | tokenizer.added_tokens).items()):
        digest.update(f"{token_id} {name}\n".encode())
    for name in sorted((*tokenizer.added_tokens, *tokenizer.added_flags)):
        digest.update(f"{name} {tokenizer.added_flags.get(name)}\n".encode())
    return digest.digest()


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    # A run of a million spaces makes rustbpe panic, which `except Exception` does not catch.
    total = 0
    for piece in pieces:
        assert len(piece) < 2 * PIECE, "readers bound the pieces, except for names at their borders"
        yield piece
        total += len(piece)
        if total >= LEARN_FROM:
            return
