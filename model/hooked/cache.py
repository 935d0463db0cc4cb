"""ActivationCache: the tensors of a run, by the names of their hook points.

The methods have the names, arguments and results of TransformerLens' class: they decompose the
residual stream, divide the parts by the cached scale of a norm, and compute the parts'
contributions to logits.

Shapes: B sequences, T positions, C = d_model, O = number of directions. Stacks of parts are
(parts, B, T, C).
"""

from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from logitd.model.hooked.names import find_name, usual_name

if TYPE_CHECKING:
    from logitd.model.hooked.model import HookedGPT

Labeled = Tensor | tuple[Tensor, list[str]]
Where = int | tuple[int | None, ...] | slice | Sequence[int] | Tensor | None
"""A selection along an axis: one index, which removes the axis; a tuple of arguments for `slice`;
several indices; or None, which selects everything."""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Division by the scale of a norm, and projection onto directions. Both are linear, so a unit's
    row of W_out is projected once and then multiplied by the unit's value at each position. The
    vectors (C,) that the units write at each position are never computed.

    scale     (..., 1); None: no norm
    centered  True if the norm subtracts the mean
    onto      directions (C,) or (C, O); None: no projection
    """

    scale: Tensor | None
    centered: bool
    onto: Tensor | None

    def __call__(self, parts: Tensor) -> Tensor:
        """Apply the reading to parts of the stream (..., C). The result is (..., C), (...,) or
        (..., O)."""
        return self.scaled(self.vectors(parts))

    def vectors(self, vectors: Tensor) -> Tensor:
        """Vectors (..., C), centered and projected: (..., C), (..., 1) or (..., O)."""
        if self.centered:
            vectors = vectors - vectors.mean(dim=-1, keepdim=True)
        if self.onto is None:
            return vectors
        return vectors @ (self.onto[:, None] if self.onto.ndim == 1 else self.onto)

    def scaled(self, read: Tensor) -> Tensor:
        """Results of `vectors`, divided by the scale. For a single direction (C,), the result has
        no axis of directions."""
        if self.scale is not None:
            read = read / self.scale
        return read[..., 0] if self.onto is not None and self.onto.ndim == 1 else read


class ActivationCache:
    """Tensors by name. Short names work too: `cache["pattern", 3]`, `cache["scale"]`. Negative
    layers count from the end."""

    def __init__(
        self, cache_dict: dict[str, Tensor], model: "HookedGPT", has_batch_dim: bool = True
    ) -> None:
        self.cache_dict = cache_dict
        self.model = model
        self.has_batch_dim = has_batch_dim

    def __getitem__(self, key: Any) -> Tensor:
        """The tensor of a hook point, given by its full name or a short name. A short name is a
        string or a tuple (name, layer, layer type)."""
        name = usual_name(key) if isinstance(key, str) else None
        if name in self.cache_dict:
            return self.cache_dict[name]
        parts = (key,) if isinstance(key, str) else tuple(key)
        if len(parts) > 1 and parts[1] is not None and parts[1] < 0:
            parts = (parts[0], self.model.cfg.n_layers + parts[1], *parts[2:])
        return self.cache_dict[find_name(self.cache_dict, *parts)]

    def __contains__(self, key: object) -> bool:
        return key in self.cache_dict

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __repr__(self) -> str:
        return f"ActivationCache with keys {list(self.cache_dict)}"

    def keys(self) -> KeysView[str]:
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Tensor]:
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self.cache_dict.items()

    def to(self, device: str | torch.device) -> Self:
        """Move all tensors to a device."""
        self.cache_dict = {name: value.to(device) for name, value in self.items()}
        return self

    def toggle_autodiff(self, mode: bool = False) -> None:
        """Turn torch's gradients on or off globally."""
        torch.set_grad_enabled(mode)

    def remove_batch_dim(self) -> Self:
        """Remove the first axis of all tensors. Raises ValueError for a batch of several
        sequences."""
        if self.has_batch_dim:
            sizes = {len(value) for value in self.values()}
            if sizes - {1}:
                raise ValueError(
                    f"the batch has {max(sizes)} sequences; the batch dimension can be removed "
                    "only from a batch of one"
                )
            self.cache_dict = {name: value[0] for name, value in self.items()}
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Where) -> "ActivationCache":
        """A cache of the chosen sequences; a single index removes the batch axis."""
        if not self.has_batch_dim:
            raise ValueError("the cache has no batch dimension to slice")
        chosen = {name: take(value, batch_slice, 0) for name, value in self.items()}
        return ActivationCache(chosen, self.model, not isinstance(batch_slice, int))

    # The residual stream

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Where = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """The residual stream before each block up to `layer` (None or -1: the end). With
        `apply_ln`, the norm that reads the last of these streams is applied to all of them. The
        final norm uses each stream's own statistics; any other norm uses its cached scale."""
        last, end = self._layer(layer), self.model.cfg.n_layers
        names: list[tuple[str, tuple[str, int]]] = []
        for at in range(min(last, end - 1) + 1):
            names.append((f"{at}_pre", ("resid_pre", at)))
            if (incl_mid and at < last) or (mlp_input and at == last):
                names.append((f"{at}_mid", ("resid_mid", at)))
        if last == end:
            names.append(("final_post", ("resid_post", end - 1)))
        stack = torch.stack([take(self[key], pos_slice, -2) for _, key in names])
        if apply_ln:
            stack = self.apply_ln_to_stack(
                stack, last, mlp_input, pos_slice, recompute_ln=last == end
            )
        return _labeled(stack, [label for label, _ in names], return_labels)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Where = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """The parts whose sum is the input of `layer`: embeddings, and the outputs of attention
        layers and MLPs."""
        last = self._layer(layer)
        names: list[tuple[str, Any]] = []
        if incl_embeds:
            names += [
                (name, name) for name in ("embed", "pos_embed") if f"hook_{name}" in self.cache_dict
            ]
        for at in range(last + (mlp_input and mode != "mlp")):
            if mode != "mlp":
                names.append((f"{at}_attn_out", ("attn_out", at)))
            if mode != "attn" and at < last:
                names.append((f"{at}_mlp_out", ("mlp_out", at)))
        stack = torch.stack([take(self[key], pos_slice, -2) for _, key in names])
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, last, mlp_input, pos_slice)
        return _labeled(stack, [label for label, _ in names], return_labels)

    def compute_head_results(self) -> None:
        """Cache `attn.hook_result`, the output of each head, for all blocks. The output of a
        block's attention is the sum of its heads' outputs and its bias."""
        for layer in range(self.model.cfg.n_layers):
            name = f"blocks.{layer}.attn.hook_result"
            if name not in self.cache_dict:
                z = self["z", layer]  # (..., H, D)
                self.cache_dict[name] = torch.einsum("...hd,hdc->...hc", z, self.model.W_O[layer])

    def stack_head_results(
        self,
        layer: int | None = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Where = None,
        apply_ln: bool = False,
    ) -> Any:
        """The outputs (heads, B, T, C) of all heads in the blocks before `layer`, labeled L0H0 and
        so on. `incl_remainder` appends the rest of the stream."""
        last, heads = self._layer(layer), self.model.cfg.n_heads
        self.compute_head_results()
        parts = [take(self["result", at], pos_slice, -3).movedim(-2, 0) for at in range(last)]
        labels = [f"L{at}H{head}" for at in range(last) for head in range(heads)]
        of_stream = take(self._stream_before(last), pos_slice, -2)
        stack = torch.cat([of_stream.new_zeros(0, *of_stream.shape), *parts])
        if incl_remainder:
            stack = torch.cat([stack, (of_stream - stack.sum(dim=0))[None]])
            labels.append("remainder")
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, last, pos_slice=pos_slice)
        return _labeled(stack, labels, return_labels)

    def stack_activation(
        self, activation_name: str, layer: int | None = None, sublayer_type: str | None = None
    ) -> Tensor:
        """The tensors of a hook point in all blocks before `layer`, stacked."""
        layers = range(self._layer(layer))
        return torch.stack([self[activation_name, at, sublayer_type] for at in layers])

    def get_neuron_results(
        self,
        layer: int,
        neuron_slice: Where = None,
        pos_slice: Where = None,
        project_output_onto: Tensor | None = None,
    ) -> Tensor:
        """The vectors (B, T, units, C) that the units of a block's MLP write to the stream, or
        their projections onto directions (C,) or (C, O)."""
        reading = Reading(None, False, project_output_onto)
        return reading.scaled(self._neurons(layer, neuron_slice, pos_slice, reading))

    def stack_neuron_results(
        self,
        layer: int | None,
        pos_slice: Where = None,
        neuron_slice: Where = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """The vectors (units, B, T, C) that all units before `layer` write to the stream, labeled
        L0N0 and so on, or their projections onto directions (C,) or (C, O). `incl_remainder`
        appends the rest of the stream."""
        last = self._layer(layer)
        chosen = [neuron_slice] if isinstance(neuron_slice, int) else neuron_slice
        reading = self._reading(last, False, pos_slice, apply_ln, project_output_onto)
        parts, labels = self._neurons_before(last, chosen, pos_slice, reading)
        whole = reading(take(self._stream_before(last), pos_slice, -2))
        stack = torch.cat([whole.new_zeros(0, *whole.shape), *parts])
        if incl_remainder:
            stack = torch.cat([stack, (whole - stack.sum(dim=0))[None]])
            labels.append("remainder")
        return _labeled(stack, labels, return_labels)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Where = None,
        return_labels: bool = False,
        project_output_onto: Tensor | None = None,
    ) -> Any:
        """The smallest parts whose sum is the input of `layer` (parts, B, T, C): heads, units (or
        MLPs), embeddings and the sum of biases; or their projections onto directions (C,) or
        (C, O)."""
        last = self._layer(layer)
        reading = self._reading(last, mlp_input, pos_slice, apply_ln, project_output_onto)
        heads, labels = self.stack_head_results(
            last + mlp_input, return_labels=True, pos_slice=pos_slice
        )
        parts = [reading(heads)]
        if last and expand_neurons:
            units, names = self._neurons_before(last, None, pos_slice, reading)
            parts += units
            labels += names
        elif last:
            of_layers, names = self.decompose_resid(
                last, mode="mlp", incl_embeds=False, pos_slice=pos_slice, return_labels=True
            )
            parts.append(reading(of_layers))
            labels += names
        for name in ("embed", "pos_embed"):
            if f"hook_{name}" in self.cache_dict:
                parts.append(reading(take(self[name], pos_slice, -2)[None]))
                labels.append(name)
        bias = self.model.accumulated_bias(last, mlp_input, include_mlp_biases=expand_neurons)
        parts.append(reading(bias.expand(1, *heads.shape[1:])))
        return _labeled(torch.cat(parts), [*labels, "bias"], return_labels)

    def _neurons_before(
        self, last: int, chosen: Where, pos_slice: Where, reading: Reading
    ) -> tuple[list[Tensor], list[str]]:
        """The vectors that the units of the MLPs before a layer write to the stream, with `reading`
        applied to them, and the labels of the units."""
        parts = [
            reading.scaled(self._neurons(at, chosen, pos_slice, reading).movedim(-2, 0))
            for at in range(last)
        ]
        units = take(torch.arange(self.model.cfg.d_mlp), chosen, 0).tolist()
        return parts, [f"L{at}N{unit}" for at in range(last) for unit in units]

    def _neurons(
        self, layer: int, neuron_slice: Where, pos_slice: Where, reading: Reading
    ) -> Tensor:
        units = take(take(self["post", layer], pos_slice, -2), neuron_slice, -1)
        rows = take(self.model.blocks[layer].mlp.W_out, neuron_slice, 0)
        return units[..., None] * reading.vectors(rows)

    def _stream_before(self, layer: int) -> Tensor:
        return self["resid_post", layer - 1] if layer else self["resid_pre", 0]

    def _reading(
        self, layer: int, mlp_input: bool, pos_slice: Where, apply_ln: bool, onto: Tensor | None
    ) -> Reading:
        if not apply_ln or (layer == self.model.cfg.n_layers and self.model.ln_final is None):
            return Reading(None, False, onto)
        centered = self.model.cfg.normalization_type.startswith("LN")
        return Reading(take(self._scale(layer, mlp_input), pos_slice, -2), centered, onto)

    def _scale(self, layer: int, mlp_input: bool) -> Tensor:
        """The cached scale of the norm at the input of a layer."""
        final = layer == self.model.cfg.n_layers
        norm = "ln_final" if final else f"blocks.{layer}.ln{2 if mlp_input else 1}"
        return self[f"{norm}.hook_scale"]

    def apply_ln_to_stack(
        self,
        residual_stack: Tensor,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Where = None,
        batch_slice: Where = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Tensor:
        """Parts of the stream, divided by the cached scale of the norm before `layer` (None or -1:
        the final norm), and centered if it is a LayerNorm. The norm's weights are not applied; they
        must be folded (`enable_compatibility_mode`). With `recompute_ln`, the final norm is applied
        to each part with its own statistics, weights included."""
        if has_batch_dim:
            residual_stack = take(residual_stack, batch_slice, 1)
        last, cfg = self._layer(layer), self.model.cfg
        final = last == cfg.n_layers
        if final and self.model.ln_final is None:
            return residual_stack
        if final and recompute_ln:
            assert self.model.ln_final is not None
            return self.model.ln_final(residual_stack)
        scale = take(self._scale(last, mlp_input), pos_slice, -2)
        scale = take(scale, batch_slice, 0) if self.has_batch_dim else scale
        return Reading(scale, cfg.normalization_type.startswith("LN"), None)(residual_stack)

    def logit_attrs(
        self,
        residual_stack: Tensor,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Where = None,
        batch_slice: Where = None,
        has_batch_dim: bool = True,
    ) -> Tensor:
        """The contribution of each part of the stream to the logits of `tokens`, minus its
        contribution to the logits of `incorrect_tokens` (direct logit attribution). The model's
        weights must be folded."""
        directions: Callable[[Any], Tensor] = self.model.tokens_to_residual_directions
        direction = directions(tokens)
        if incorrect_tokens is not None:
            other = directions(incorrect_tokens)
            if other.shape != direction.shape:
                raise ValueError(
                    f"tokens has the shape {list(direction.shape[:-1])} and incorrect_tokens "
                    f"{list(other.shape[:-1])}; give one incorrect token for each token"
                )
            direction = direction - other
        scaled = self.apply_ln_to_stack(
            residual_stack, -1, False, pos_slice, batch_slice, has_batch_dim
        )
        return (scaled * direction).sum(dim=-1)

    def _layer(self, layer: int | None) -> int:
        """The number of a layer. None and -1 mean the end: the number of blocks."""
        return self.model.cfg.n_layers if layer is None or layer == -1 else layer


def _labeled(stack: Tensor, labels: list[str], wanted: bool) -> Labeled:
    return (stack, labels) if wanted else stack


def take(tensor: Tensor, where: Where, axis: int) -> Tensor:
    """Select along an axis; see `Where`."""
    if where is None:
        return tensor
    index: list[Any] = [slice(None)] * tensor.ndim
    index[axis] = slice(*where) if isinstance(where, tuple) else where
    return tensor[tuple(index)]
