"""Made once: what takes tens of milliseconds, and what tests make by the hundred.

Covers the compiled forms of a vocabulary (20 ms for each checkpoint that is opened, 40 ms more for
what constraints need of it) and the certificates that httpx reads for each client (40 ms, of plain
HTTP too). What was made of the same arguments is given again, as it only answers and never changes;
nothing stands in for it. Does not cover processes that tests start, which do as they do everywhere.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import certifi
import llguidance
from tiktoken import _tiktoken  # type: ignore[attr-defined]  # compiled, without a stub

VOCABULARIES = 64
"""So many are kept. Tests have about twenty, beside those that are drawn at random."""

END_OF_CERTIFICATE = "-----END CERTIFICATE-----\n"

compile_vocabulary = _tiktoken.CoreBPE
compile_for_constraints = llguidance.LLTokenizer.from_tiktoken  # type: ignore[attr-defined]


def share_vocabularies() -> None:
    """Have tiktoken and llguidance compile each vocabulary once in this process."""
    _tiktoken.CoreBPE = _shared
    llguidance.LLTokenizer = SharedForConstraints  # type: ignore[assignment,misc]


class SharedForConstraints:
    """Part of `llguidance.LLTokenizer` that a `Compiler` uses."""

    @staticmethod
    def from_tiktoken(
        *,
        encoder: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
        pattern: str,
        eos_token: int,
        n_vocab: int,
    ) -> llguidance.LLTokenizer:
        """The same object for the same vocabulary. An error is raised again each time."""
        assert not special_tokens
        return _compiled_for_constraints(frozenset(encoder.items()), pattern, eos_token, n_vocab)


def share_certificates(path: Path) -> None:
    """Have httpx in this process trust one authority, written to `path`: reading all takes long,
    and no test asks a remote server."""
    authorities = Path(certifi.where()).read_text(encoding="utf-8")
    first = authorities.partition(END_OF_CERTIFICATE)[0] + END_OF_CERTIFICATE
    path.write_text(first, encoding="utf-8")
    certifi.where = lambda: str(path)


def _shared(ranks: Mapping[bytes, int], special_tokens: Mapping[str, int], pattern: str) -> Any:
    """Encoding by the arguments of `CoreBPE`. An error is raised again each time."""
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
