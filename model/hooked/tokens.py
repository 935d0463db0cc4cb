"""Texts and tokens of a hooked GPT, with TransformerLens' names and rules.

With `prepend_bos`, a text begins with the vocabulary's first token of BEGINNINGS, otherwise with
the end of a document, as in GPT-2. None means `cfg.default_prepend_bos`, which is true if the
vocabulary has such a token. Names of special tokens in a text become their ids. Shorter texts of a
list are padded on the right with the end of a document, or id 0.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from logitd.model.inference.errors import InvalidRequest
from logitd.model.text.tokenizer import Tokenizer

BEGINNINGS = ("<|bos|>", "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")


class Settings(Protocol):
    default_prepend_bos: bool
    n_ctx: int
    device: torch.device


class Tokens:
    """The vocabulary of a model, with the settings of its `cfg`."""

    def __init__(self, tokenizer: Tokenizer, cfg: Settings) -> None:
        self._tokenizer = tokenizer
        self._cfg = cfg

    def encode_all(self, texts: Sequence[str], prepend_bos: bool | None = None) -> list[list[int]]:
        """The ids of each text, cut to the context length."""
        prepend = self._cfg.default_prepend_bos if prepend_bos is None else prepend_bos
        first = beginning(self._tokenizer)
        if prepend and first is None:
            raise InvalidRequest("prepend_bos is True, but the vocabulary has no beginning of text")
        start = [first] if prepend and first is not None else []
        encode = self._tokenizer.encode
        return [[*start, *encode(text, special_ids=True)][: self._cfg.n_ctx] for text in texts]

    def pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Pad rows of ids to equal lengths: (rows, longest)."""
        padding = self._tokenizer.end_of_text or 0
        longest = max(map(len, rows))
        padded = [[*row, *[padding] * (longest - len(row))] for row in rows]
        return torch.tensor(padded, device=self._cfg.device)

    def to_tokens(self, input: str | Sequence[str], prepend_bos: bool | None = None) -> Tensor:
        """Ids (texts, tokens) of one or several texts."""
        texts = [input] if isinstance(input, str) else input
        return self.pad(self.encode_all(texts, prepend_bos))

    def to_string(self, tokens: Any) -> str | list[str]:
        """The text of ids (tokens,), or a list of texts for ids (texts, tokens)."""
        ids = torch.as_tensor(tokens)
        if ids.ndim == 2:
            return [self._tokenizer.decode(row) for row in ids.tolist()]
        return self._tokenizer.decode(ids.reshape(-1).tolist())

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> Any:
        """The text of each token of a text or of ids; for a list of texts, a list of lists."""
        if isinstance(input, list):
            return [self.to_str_tokens(each, prepend_bos) for each in input]
        if isinstance(input, str):
            (ids,) = self.encode_all([input], prepend_bos)
        else:
            ids = np.atleast_1d(np.asarray(input).squeeze()).tolist()
        return [self._tokenizer.token_text(token_id) for token_id in ids]

    def to_single_token(self, string: str) -> int:
        """The id of a text that is a single token."""
        (ids,) = self.encode_all([string], prepend_bos=False)
        if len(ids) != 1:
            raise InvalidRequest(f"{string[:80]!r} is {len(ids)} tokens, not a single one")
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        return self._tokenizer.token_text(int_token)

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
    ) -> int:
        """The first or last position of a token in a text or in ids."""
        ids = self.to_tokens(input, prepend_bos) if isinstance(input, str) else input
        found = single_token
        if isinstance(found, str):
            found = self.to_single_token(found)
        places = (ids.reshape(-1) == found).nonzero().flatten().tolist()
        if not places or mode not in ("first", "last"):
            raise InvalidRequest(
                f"token {single_token!r} is not in the prompt"
                if not places
                else f"mode is {mode!r}; it must be 'first' or 'last'"
            )
        return int(places[0 if mode == "first" else -1])


def beginning(tokenizer: Tokenizer) -> int | None:
    """The id that begins a text; None if the vocabulary has no such id."""
    special = tokenizer.special_tokens
    return next((special[name] for name in BEGINNINGS if name in special), tokenizer.end_of_text)
