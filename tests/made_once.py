"""Cached objects that take tens of milliseconds to make and that hundreds of tests need.

These are compiled vocabularies (20 ms per opened checkpoint, 40 ms more for constraints) and the
certificates that httpx reads for each client (40 ms, for plain HTTP too). With equal arguments,
tests get the same object, which is a real one and is never modified. Processes that tests start are
unaffected.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import certifi
import llguidance
from tiktoken import _tiktoken  # type: ignore[attr-defined]  # compiled, without a stub

VOCABULARIES = 64
"""Number of vocabularies to keep. Tests use about twenty, plus random ones."""

END_OF_CERTIFICATE = "-----END CERTIFICATE-----\n"

compile_vocabulary = _tiktoken.CoreBPE
compile_for_constraints = llguidance.LLTokenizer.from_tiktoken  # type: ignore[attr-defined]


def share_vocabularies() -> None:
    """Have tiktoken and llguidance compile each vocabulary once in this process."""
    _tiktoken.CoreBPE = _shared
    llguidance.LLTokenizer = SharedForConstraints  # type: ignore[assignment,misc]


class SharedForConstraints:
    """Replaces `llguidance.LLTokenizer`, with only the method that a `Compiler` uses."""

    @staticmethod
    def from_tiktoken(
        *,
        encoder: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
        pattern: str,
        eos_token: int,
        n_vocab: int,
    ) -> llguidance.LLTokenizer:
        """Return the same object for equal vocabularies. Errors are not cached."""
        assert not special_tokens
        return _compiled_for_constraints(frozenset(encoder.items()), pattern, eos_token, n_vocab)


def share_certificates(path: Path) -> None:
    """Let httpx trust a single certificate authority, whose certificate is written to `path`. No
    test needs more, because all servers are local."""
    authorities = Path(certifi.where()).read_text(encoding="utf-8")
    first = authorities.partition(END_OF_CERTIFICATE)[0] + END_OF_CERTIFICATE
    path.write_text(first, encoding="utf-8")
    certifi.where = lambda: str(path)


def _shared(ranks: Mapping[bytes, int], special_tokens: Mapping[str, int], pattern: str) -> Any:
    """Take the arguments of `CoreBPE`, and return the same encoding for equal ones. Errors are not
    cached."""
    return _compiled(frozenset(ranks.items()), frozenset(special_tokens.items()), pattern)


@lru_cache(VOCABULARIES)
def _compiled(
    ranks: frozenset[tuple[bytes, int]], special_tokens: frozenset[tuple[str, int]], pattern: str
) -> Any:
    return compile_vocabulary(dict(ranks), dict(special_tokens), pattern)


@lru_cache(VOCABULARIES)
def _compiled_for_constraints(
    encoder: frozenset[tuple[bytes, int]], pattern: str, eos_token: int, n_vocab: int
) -> llguidance.LLTokenizer:
    return compile_for_constraints(
        encoder=dict(encoder),
        special_tokens={},
        pattern=pattern,
        eos_token=eos_token,
        n_vocab=n_vocab,
    )
