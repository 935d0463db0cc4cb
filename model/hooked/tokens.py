"""Texts and tokens of a hooked GPT, with TransformerLens' names and rules.

With `prepend_bos`, each text begins with the beginning-of-text id: the id of one of BEGINNINGS or,
as in GPT-2, the end-of-document id. None means `cfg.default_prepend_bos`, which is True if the
vocabulary has such an id. Names of special tokens in a text become their ids. Shorter texts of
a list are padded with the end-of-document id, or with 0 if the vocabulary has no such id. Padding
is on the right unless `padding_side` or `cfg.default_padding_side` is "left".

Shapes: B sequences, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logitd.model.hooked.config import HookedConfig, PaddingSide
from logitd.model.inference.errors import ContextLengthExceeded, InvalidRequest
from logitd.model.text.tokenizer import Tokenizer

BEGINNINGS = ("<|bos|>", "<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")


Input = str | Sequence[str] | Tensor | Sequence[int] | Any
"""A string, strings, or ids (B, T) or (T,)."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Ids (B, T), and the mask `real` (B, T), which is False for padding."""

    ids: Tensor
    real: Tensor

    @property
    def hidden_padding(self) -> Tensor | None:
        """`real` if any token follows padding. Otherwise None, because causal attention alone
        hides all padding."""
        trailing = torch.equal(self.real.cumprod(dim=1).bool(), self.real)
        return None if trailing else self.real


class Tokens:
    """The vocabulary of a model, with the settings of its `cfg`."""

    def __init__(self, tokenizer: Tokenizer, cfg: HookedConfig) -> None:
        self._tokenizer = tokenizer
        self._cfg = cfg

    def encode_all(self, texts: Sequence[str], prepend_bos: bool | None = None) -> list[list[int]]:
        """The ids of each text, truncated to the context length."""
        prepend = self.prepends(prepend_bos)
        first = beginning(self._tokenizer)
        if prepend and first is None:
            raise InvalidRequest(
                "prepend_bos is True, but the vocabulary has no beginning-of-text token"
            )
        start = [first] if prepend and first is not None else []
        encode = self._tokenizer.encode
        return [[*start, *encode(text, special_ids=True)][: self._cfg.n_ctx] for text in texts]

    def batch(
        self,
        input: Input,
        prepend_bos: bool | None,
        padding_side: PaddingSide | None = None,
        attention_mask: Tensor | None = None,
    ) -> Batch:
        """The ids of an input. Shorter texts are padded. For rows of ids, 0 in `attention_mask`
        (B, T) marks padding; without a mask, the padding ids at the beginning of a row count as
        padding if `padding_side` is "left".

        Raises InvalidRequest for an empty input, for ids outside the vocabulary, and for a mask
        whose shape differs from that of the ids. Also raises ContextLengthExceeded for a row
        longer than the context.
        """
        texts = [input] if isinstance(input, str) else input
        if isinstance(texts, list | tuple) and texts and isinstance(texts[0], str):
            batch = self._padded(self.encode_all(texts, prepend_bos), padding_side)
        else:
            ids = torch.as_tensor(input, device=self._cfg.device)
            batch = self._of_ids(ids[None] if ids.ndim == 1 else ids, prepend_bos, padding_side)
        self._check(batch.ids)
        if attention_mask is None:
            return batch
        if attention_mask.shape != batch.ids.shape:
            raise InvalidRequest(
                f"attention_mask has the shape {list(attention_mask.shape)}, but the ids "
                f"have the shape {list(batch.ids.shape)}"
            )
        return Batch(batch.ids, attention_mask.to(self._cfg.device).bool())

    def _padded(self, rows: Sequence[Sequence[int]], side: PaddingSide | None) -> Batch:
        longest = max(map(len, rows))
        lacking = torch.tensor([longest - len(row) for row in rows])[:, None]
        places = torch.arange(longest)
        left = self._side(side) == "left"
        real = places >= lacking if left else places < longest - lacking
        ids = torch.full(real.shape, self._padding)
        ids[real] = torch.tensor([each for row in rows for each in row])
        return Batch(ids.to(self._cfg.device), real.to(self._cfg.device))

    def _of_ids(self, ids: Tensor, prepend_bos: bool | None, side: PaddingSide | None) -> Batch:
        if self._side(side) == "right":
            return Batch(ids, torch.ones_like(ids, dtype=torch.bool))
        padded = (ids == self._padding).cumprod(dim=-1).bool()
        if self.prepends(prepend_bos) and beginning(self._tokenizer) == self._padding:
            padded &= padded.roll(-1, dims=-1)  # the last of them begins the text
            padded[..., -1:] = False
        return Batch(ids, ~padded)

    def _check(self, ids: Tensor) -> None:
        cfg = self._cfg
        if ids.ndim != 2 or not ids.numel():
            raise InvalidRequest("the input is empty; give a text, texts, or ids (B, T) or (T,)")
        if ids.shape[1] > cfg.n_ctx:
            raise ContextLengthExceeded(
                f"the input has {ids.shape[1]} tokens; the model's context is {cfg.n_ctx}"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= cfg.d_vocab:
            raise InvalidRequest(
                f"the input has ids from {low} to {high}, but the vocabulary only has the ids "
                f"0 to {cfg.d_vocab - 1}"
            )

    @property
    def _padding(self) -> int:
        return self._tokenizer.end_of_text or 0

    def _side(self, side: PaddingSide | None) -> PaddingSide:
        chosen = side or self._cfg.default_padding_side
        if chosen not in ("left", "right"):
            raise InvalidRequest(f"padding_side is {chosen!r}; it must be 'left' or 'right'")
        return chosen

    def prepends(self, prepend_bos: bool | None) -> bool:
        """True if a beginning-of-text id is prepended to texts."""
        return self._cfg.default_prepend_bos if prepend_bos is None else prepend_bos

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
    ) -> Tensor:
        """Ids (texts, tokens) of a string or strings."""
        texts = [input] if isinstance(input, str) else input
        return self._padded(self.encode_all(texts, prepend_bos), padding_side).ids

    def to_string(self, tokens: Any) -> str | list[str]:
        """The text of ids (tokens,), or a list of texts for ids (texts, tokens)."""
        ids = torch.as_tensor(tokens)
        if ids.ndim == 2:
            return [self._tokenizer.decode(row) for row in ids.tolist()]
        return self._tokenizer.decode(ids.reshape(-1).tolist())

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> Any:
        """The text of each token in a text or in ids. For a list of texts, returns a list of
        lists."""
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
            raise InvalidRequest(f"{string[:80]!r} is {len(ids)} tokens, not a single token")
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
