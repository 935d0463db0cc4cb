"""Value maps: trains value embeddings as linear maps of the tokens' embeddings.

A value embedding depends only on the token, so it can be a linear map of the token's embedding.
During training, each block has such a map instead of a table. A checkpoint has the tables, each of
which is the product of the embedding matrix and a map (`with_tables`). Training with maps
reaches a lower loss (in bits per byte) than training with tables, whose rows are trained separately
(benchmarks/LAB.md).

Shapes: C = d_model, R = padded_vocab_size rows, W = kv_width.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from logitd.model.transformer.gpt import GPT

MAP, TABLE = "value_embedding.map", "value_embedding.weight"
"""Names of the parameter with a block's value embeddings: MAP in the trainer, TABLE in a
checkpoint."""


class ValueMap(nn.Module):
    """The value embeddings of a block, as a map of the tokens' embeddings. It replaces the block's
    table."""

    def __init__(self, tokens: nn.Embedding, table: nn.Embedding) -> None:
        super().__init__()
        self._tokens = (tokens,)  # in a tuple, because it is a module of the GPT, not of this one
        self.map = nn.Parameter(torch.zeros(table.embedding_dim, tokens.embedding_dim))  # (W, C)

    def forward(self, token_ids: Tensor) -> Tensor:  # (B, T) to (B, T, W)
        (tokens,) = self._tokens
        if token_ids.numel() < tokens.num_embeddings:
            return F.linear(tokens(token_ids), self.map)
        # A product per row of the table is cheaper than one per token. The table is float32,
        # because the gradients of a frequent token are added up in its dtype.
        table = F.linear(tokens.weight, self.map).to(tokens.weight.dtype)
        return F.embedding(token_ids, table)


def map_values(gpt: GPT) -> None:
    """Replace the tables of value embeddings with maps, which start at zero."""
    for block in gpt.blocks:
        table = getattr(block, "value_embedding", None)
        if isinstance(table, nn.Embedding):
            block.add_module("value_embedding", ValueMap(gpt.token_embedding, table))


def with_tables(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace each map in the weights of a GPT with its table (R, W). Other weights are
    unchanged."""
    return dict(_tabled(name, tensor, weights) for name, tensor in weights.items())


def _tabled(name: str, tensor: Tensor, weights: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    if not name.endswith(MAP):
        return name, tensor
    tokens = weights["token_embedding.weight"]  # (R, C)
    return name.removesuffix(MAP) + TABLE, tokens @ tensor.T
