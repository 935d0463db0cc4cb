"""Weights of a hooked GPT with TransformerLens' names, shapes and orientation.

Matrices multiply from the right: `x @ W_in`. Key and value heads shared by several query heads are
repeated, so every head has its own. Blocks are nested as in TransformerLens:
`model.blocks[0].attn.W_Q`, `model.blocks[0].attn.hook_z`.

Shapes: L = n_layer, H = n_head, K = n_kv_head, D = head_dim, C = d_model, M = d_ff, V = vocab_size.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from logitd.model.hooked.factored import FactoredMatrix, composition_scores
from logitd.model.hooked.network import Norm, Points, Unembed, blocks
from logitd.model.hooked.tap import channel_order, inverse_order
from logitd.model.inference.errors import InvalidRequest
from logitd.model.transformer.gpt import GPT, Block

OF_ATTENTION = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
OF_MLP = ("W_in", "W_gate", "W_out", "b_in", "b_out")


class HookedWeights:
    """The weights of a hooked copy, for all blocks together and for each block."""

    NAMES = frozenset(
        (
            *("embed", "pos_embed", "unembed", "blocks", "ln_final", "tl_parameters"),
            *("tl_named_parameters", "W_E", "W_pos", "W_E_pos", "W_U", "b_U", *OF_ATTENTION),
            *(*OF_MLP, "QK", "OV", "accumulated_bias", "all_composition_scores"),
            *("all_head_labels", "attn_head_labels"),
        )
    )

    def __init__(self, gpt: GPT, unembed: Unembed, points: Points) -> None:
        self._gpt = gpt
        self.unembed = unembed
        self.blocks = [_nested(block, points) for block in blocks(gpt)]
        """The blocks, with weights and points as attributes: `blocks[0].attn.W_Q`."""

    @property
    def ln_final(self) -> Norm | None:
        """The final norm, a function of the stream; None if the model has no final norm."""
        norm = self._gpt.final_norm
        return norm if isinstance(norm, Norm) else None

    @property
    def W_E(self) -> Tensor:
        """Token embeddings (V, C)."""
        return self._gpt.token_embedding.weight[: self._gpt.config.vocab_size]

    @property
    def W_pos(self) -> Tensor:
        """Position embeddings (n_ctx, C)."""
        return self._gpt.position_embedding.weight

    @property
    def W_E_pos(self) -> Tensor:
        """Token and position embeddings (V + n_ctx, C)."""
        return torch.cat((self.W_E, self.W_pos))

    @property
    def W_U(self) -> Tensor:
        """The matrix of the head (C, V)."""
        return self.unembed.W_U

    @property
    def b_U(self) -> Tensor:
        return self.unembed.b_U

    @property
    def embed(self) -> SimpleNamespace:
        return SimpleNamespace(W_E=self.W_E)

    @property
    def pos_embed(self) -> SimpleNamespace:
        return SimpleNamespace(W_pos=self.W_pos)

    def __getattr__(self, name: str) -> Tensor:
        """The weights of all blocks, stacked: `W_Q` (L, H, C, D)."""
        if name in OF_ATTENTION:
            return torch.stack([getattr(block.attn, name) for block in self.blocks])
        if name in OF_MLP:
            return torch.stack([getattr(block.mlp, name) for block in self.blocks])
        raise AttributeError(f"the model has no weight {name!r}")

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of each head (L, H, C, C)."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of each head (L, H, C, C)."""
        return FactoredMatrix(self.W_V, self.W_O)

    def tl_parameters(self) -> dict[str, Tensor]:
        """The weights, keyed by TransformerLens' full names, such as `blocks.0.attn.W_Q`."""
        return dict(self.tl_named_parameters())

    def tl_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights, in the order of the forward pass."""
        yield "embed.W_E", self.W_E
        if self._gpt.config.positions == "learned":
            yield "pos_embed.W_pos", self.W_pos
        for layer, block in enumerate(self.blocks):
            for part, names in (
                ("ln1", ("w", "b")),
                ("attn", OF_ATTENTION),
                ("ln2", ("w", "b")),
                ("mlp", OF_MLP),
            ):
                for name in names:
                    if (value := getattr(getattr(block, part), name, None)) is not None:
                        yield f"blocks.{layer}.{part}.{name}", value
        for name in ("w", "b"):
            if (value := getattr(self.ln_final, name, None)) is not None:
                yield f"ln_final.{name}", value
        yield "unembed.W_U", self.W_U
        yield "unembed.b_U", self.b_U

    def accumulated_bias(
        self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
    ) -> Tensor:
        """The sum (C,) of the biases that the attention layers and MLPs before a layer add to the
        stream."""
        before = self.blocks[:layer]
        added = [block.attn.b_O for block in self.blocks[: layer + mlp_input]]
        added += [block.mlp.b_out for block in before] if include_mlp_biases else []
        return sum(added, torch.zeros_like(self.W_E[0]))

    def all_composition_scores(self, mode: Literal["Q", "K", "V"]) -> Tensor:
        """Scores (L, H, L, H) of the composition of each head's output with each later head's
        queries, keys or values; see `factored.composition_scores`."""
        readers = {"Q": self.QK, "K": self.QK.T, "V": self.OV}
        if mode not in readers:
            raise InvalidRequest(f"mode is {mode!r}; it must be 'Q', 'K' or 'V'")
        return composition_scores(self.OV, readers[mode])

    @property
    def all_head_labels(self) -> list[str]:
        """The labels of all heads: L0H0, L0H1 and so on."""
        config = self._gpt.config
        return [
            f"L{layer}H{head}" for layer in range(config.n_layer) for head in range(config.n_head)
        ]

    @property
    def attn_head_labels(self) -> list[str]:
        """The labels of all heads, in the order of `all_composition_scores`."""
        return self.all_head_labels


def _nested(block: Block, points: Points) -> SimpleNamespace:
    start = f"blocks.{block.layer}."
    parts: dict[str, dict[str, object]] = {
        "": {},
        "attn": dict(_attention(block)),
        "mlp": dict(_mlp(block)),
    }
    for name, point in points.items():
        part, _, last = name.removeprefix(start).rpartition(".")
        if name.startswith(start) and part in parts:
            parts[part][last] = point
    return SimpleNamespace(
        **parts[""],
        attn=SimpleNamespace(**parts["attn"]),
        mlp=SimpleNamespace(**parts["mlp"]),
        ln1=block.attention_norm,
        ln2=block.mlp_norm,
    )


def _attention(block: Block) -> dict[str, Tensor]:
    config, weight = block.config, block.qkv.weight  # ((H + 2K) * D, C)
    bias = weight.new_zeros(len(weight)) if block.qkv.bias is None else block.qkv.bias
    heads = [config.n_head, config.n_kv_head, config.n_kv_head]
    group = config.n_head // config.n_kv_head
    order = channel_order(config)
    found: dict[str, Tensor] = {}
    for name, rows, of_rows in zip(
        "QKV",
        weight.unflatten(0, (-1, config.head_dim)).split(heads),
        bias.unflatten(0, (-1, config.head_dim)).split(heads),
        strict=True,
    ):
        if name != "Q":
            rows, of_rows = (each.repeat_interleave(group, dim=0) for each in (rows, of_rows))
        if name != "V" and order is not None:
            rows, of_rows = (each[:, inverse_order(order)] for each in (rows, of_rows))
        found |= {f"W_{name}": rows.transpose(1, 2), f"b_{name}": of_rows}  # (H, C, D), (H, D)
    out = block.attention_out
    found["W_O"] = out.weight.T.unflatten(0, (config.n_head, config.head_dim))  # (H, D, C)
    found["b_O"] = _bias(out)
    return found


def _mlp(block: Block) -> dict[str, Tensor]:
    up, down = block.mlp_up, block.mlp_down
    found = {"W_out": down.weight.T, "b_out": _bias(down)}  # (M, C), (C,)
    if block.config.activation != "swiglu":
        return found | {"W_in": up.weight.T, "b_in": _bias(up)}  # (C, M), (M,)
    gate, linear = up.weight.chunk(2)
    _, bias = _bias(up).chunk(2)
    return found | {"W_gate": gate.T, "W_in": linear.T, "b_in": bias}


def _bias(layer: torch.nn.Linear) -> Tensor:
    return layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias
