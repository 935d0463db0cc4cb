"""Build: tensors by role and a computation as a GPTConfig and the weights that it wants.

Whatever this project's GPT does not do is done to the weights once, without changing what they
compute beyond float rounding:

- heads with tensors of their own, and fused matrices in another order: rows in this order;
- scores over sqrt(d_model), or over nothing: query rows times the difference;
- rotary positions on neighbouring channels: rows of query and key, even channels first;
- norms of query and key without weights: ones; with another eps: query and key rows scaled;
- no projection behind attention, no second matrix of the feed-forward: the identity;
- additive position tables of any kind: as learned positions;
- embeddings times sqrt(d_model): in the embedding, and the head a matrix of its own;
- biases that some parts have and others lack: zeros.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.tensor_map import MappedTensors, Part, Role
from logitd.model.convert.foreign import ConvertError
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import sinusoidal_table

PARTS: tuple[Part, ...] = ("weight", "bias")
QKV: tuple[Role, ...] = ("qkv", "query", "key", "value")


@dataclass(frozen=True)
class Built:
    """A model in this project's form. `folds` are the changes of weights, as sentences.

    rescaled   numbers were multiplied, so that a narrow dtype would round them once more
    """

    config: GPTConfig
    weights: Mapping[str, Tensor]
    folds: tuple[str, ...]
    rescaled: bool = False


@dataclass(frozen=True)
class HeadShape:
    """How many heads there are, and how wide."""

    n_head: int
    n_kv_head: int
    head_dim: int


def query_rows(tensors: MappedTensors) -> tuple[int, int]:
    """Rows of all queries, and of all keys. Raises ConvertError for a fused matrix that cannot be
    cut into three."""
    if not tensors.map.has("qkv"):
        return tensors.shape("query")[0], tensors.shape("key")[0]
    rows, width = tensors.shape("qkv")
    queries = tensors.shape("attention_out")[1] if tensors.map.has("attention_out") else width
    if rows < 3 or (rows - queries) % 2 or rows <= queries:
        raise ConvertError(
            f"{tensors.where}: the fused matrix of query, key and value has {rows} rows, and "
            f"attention's output takes {queries}: it cannot be cut into three"
        )
    return queries, (rows - queries) // 2


def head_shape(tensors: MappedTensors, n_head: int) -> HeadShape:
    """The heads when there are `n_head` of them. Raises ConvertError where they do not divide."""
    queries, keys = query_rows(tensors)
    if n_head < 1 or queries % n_head or keys % (queries // n_head):
        raise ConvertError(
            f"{tensors.where}: {queries} rows of queries and {keys} of keys cannot be divided "
            f"among {n_head} heads"
        )
    head_dim = queries // n_head
    return HeadShape(n_head, keys // head_dim, head_dim)


def _check_consistent(tensors: MappedTensors, how: Computation) -> None:
    """Raise ConvertError where a computation asks for tensors that are not there, or leaves some
    out."""
    mapped, gated = tensors.map, how.activation == "swiglu"
    has_gate = mapped.has("mlp_gate") or mapped.has("mlp_gate_up")
    norms: tuple[Role, ...] = ("attention_norm", "mlp_norm", "final_norm")
    wrong = [
        (how.norm == "rmsnorm" and any(mapped.has(role, "bias") for role in norms),
         "norm is rmsnorm, and norms have biases"),
        (how.final_norm and not mapped.has("final_norm"),
         "final_norm is true, and no tensor is the norm behind the layers"),
        (how.positions == "learned" and not mapped.has("positions"),
         "positions are learned, and no tensor is their table"),
        (how.qk_norm == "learned" and not mapped.has("query_norm"),
         "qk_norm is learned, and no tensors are norms of query and key"),
        (gated and not has_gate, "activation is swiglu, and the feed-forward has no gate"),
        (not gated and has_gate,
         f"activation is {how.activation}, and the feed-forward has a gate"),
    ]  # fmt: skip
    for contradicts, sentence in wrong:
        if contradicts:
            raise ConvertError(f"{tensors.where}: {sentence}")


def build(tensors: MappedTensors, how: Computation, *, dropout: float = 0.0) -> Built:
    """The model that computes what `how` says with these tensors. Raises ConvertError and
    ConfigError."""
    mapped, folds = tensors.map, list[str]()
    _check_consistent(tensors, how)
    rows, width = tensors.shape("token_embedding")
    heads = head_shape(tensors, how.n_head)
    weights: dict[str, Tensor] = {}
    _embeddings(tensors, how, weights, folds)
    for layer in range(mapped.n_layer):
        _attention(tensors, how, heads, layer, weights)
        _feed_forward(tensors, how, layer, weights)
        for role in ("attention_norm", "mlp_norm"):
            for part in PARTS:
                tensor = tensors.get(role, part, layer)
                if tensor is not None:
                    weights[f"blocks.{layer}.{role}.{part}"] = tensor
    if how.final_norm:
        for part in PARTS:
            if (tensor := tensors.get("final_norm", part)) is not None:
                weights[f"final_norm.{part}"] = tensor
    qkv_bias = any(mapped.has(role, "bias") for role in QKV)
    bias = any(
        mapped.has(role, "bias")
        for role in ("attention_out", "mlp_up", "mlp_gate", "mlp_gate_up", "mlp_down")
    ) or (how.norm == "layernorm" and _norm_bias(tensors, how))
    d_ff = len(weights["blocks.0.mlp_down.weight"][0])
    config = GPTConfig.from_dict(
        {
            "vocab_size": rows,
            "padded_vocab_size": rows,
            "context_length": how.context_length,
            "n_layer": mapped.n_layer,
            "n_head": heads.n_head,
            "n_kv_head": heads.n_kv_head,
            "head_dim": heads.head_dim,
            "d_model": width,
            "d_ff": d_ff,
            "norm": how.norm,
            "norm_position": how.norm_position,
            "norm_eps": how.norm_eps,
            "final_norm": how.final_norm,
            "residual": how.residual,
            "positions": how.positions if how.positions in ("rotary", "sinusoidal") else "learned",
            "rope_theta": how.rope_theta,
            "activation": how.activation,
            "bias": bias,
            "qkv_bias": qkv_bias,
            "qk_norm": how.qk_norm != "none",
            "tied_head": "head.weight" not in weights,
            "head_bias": mapped.has("head", "bias"),
            "value_embeddings": False,
            "dropout": dropout,
        }
    )
    _fill_biases(config, weights, folds)
    _note_folds(tensors, how, heads, folds)
    rescaled = (
        how.score_scale != "head_dim"
        or how.embedding_scale != "one"
        or (how.qk_norm != "none" and how.qk_norm_eps != how.norm_eps)
    )
    return Built(config, weights, tuple(folds), rescaled)


def _norm_bias(tensors: MappedTensors, how: Computation) -> bool:
    roles = ("attention_norm", "mlp_norm", *(("final_norm",) if how.final_norm else ()))
    return any(tensors.map.has(role, "bias") for role in roles)


def _embeddings(
    tensors: MappedTensors, how: Computation, weights: dict[str, Tensor], folds: list[str]
) -> None:
    """Token embedding, position table and head."""
    embedding = tensors.take("token_embedding")
    width = embedding.shape[1]
    head = tensors.get("head")
    if head is not None and not (head.shape == embedding.shape and torch.equal(head, embedding)):
        if head.shape != embedding.shape:
            raise ConvertError(
                f"{tensors.where}: the head is {list(head.shape)} and the token embedding "
                f"{list(embedding.shape)}; they have to be alike"
            )
        weights["head.weight"] = head
    if how.embedding_scale == "sqrt_d_model":
        weights.setdefault("head.weight", embedding)
        embedding = embedding * math.sqrt(width)
        folds.append(f"the embedding times sqrt({width}), as the source multiplies it")
    weights["token_embedding.weight"] = embedding
    if (bias := tensors.get("head", "bias")) is not None:
        weights["head.bias"] = bias
    if how.positions in ("learned", "sinusoidal_halves", "none"):
        weights["position_embedding.weight"] = _position_table(tensors, how, width)


def _position_table(tensors: MappedTensors, how: Computation, width: int) -> Tensor:
    length = how.context_length
    if how.positions == "learned":
        table = tensors.take("positions")
        if len(table) < length:
            raise ConvertError(
                f"{tensors.where}: {length} positions are asked for, and its table has {len(table)}"
            )
        return table[:length]
    if how.positions == "none":
        return torch.zeros(length, width)
    table = sinusoidal_table(length, width, torch.device("cpu"))
    return torch.cat((table[:, 0::2], table[:, 1::2]), dim=1)  # sines, then cosines


@dataclass(frozen=True)
class _Projection:
    """Rows of a matrix (R, C), and their biases (R,) if there are any."""

    weight: Tensor
    bias: Tensor | None

    def change(self, rows: Callable[[Tensor], Tensor]) -> "_Projection":
        """The same change of rows to both."""
        return _Projection(rows(self.weight), None if self.bias is None else rows(self.bias))

    def bias_or_zeros(self) -> Tensor:
        return self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias


def _attention(
    tensors: MappedTensors,
    how: Computation,
    heads: HeadShape,
    layer: int,
    weights: dict[str, Tensor],
) -> None:
    """Query, key and value as one matrix, their norms, and the projection behind them."""
    name = f"blocks.{layer}"
    query, key, value = _projections(tensors, how, heads, layer)
    width = query.weight.shape[1]
    scale = {
        "head_dim": 1.0,
        "d_model": math.sqrt(heads.head_dim / width),
        "none": math.sqrt(heads.head_dim),
    }[how.score_scale]
    if how.qk_norm == "none":
        query = query.change(lambda rows: rows * scale) if scale != 1.0 else query
    else:
        norms = _qk_norms(tensors, how, heads, layer)
        weights[f"{name}.query_norm.weight"] = norms[0] * scale
        weights[f"{name}.key_norm.weight"] = norms[1]
        # An eps of the source's own: rows times this, so that eps counts as much as there.
        stretch = math.sqrt(how.norm_eps / how.qk_norm_eps)
        if stretch != 1.0:
            query, key = (part.change(lambda rows: rows * stretch) for part in (query, key))
    if how.positions == "rotary" and how.rotary_layout == "interleaved":
        query, key = (
            part.change(lambda rows: _evens_first(rows, heads.head_dim)) for part in (query, key)
        )
    parts = query, key, value
    weights[f"{name}.qkv.weight"] = torch.cat([part.weight for part in parts])
    if any(part.bias is not None for part in parts):
        weights[f"{name}.qkv.bias"] = torch.cat([part.bias_or_zeros() for part in parts])
    if tensors.map.has("attention_out"):
        weights[f"{name}.attention_out.weight"] = tensors.take("attention_out", layer=layer)
    else:
        weights[f"{name}.attention_out.weight"] = torch.eye(width, heads.n_head * heads.head_dim)
    if (bias := tensors.get("attention_out", "bias", layer)) is not None:
        weights[f"{name}.attention_out.bias"] = bias


def _projections(
    tensors: MappedTensors, how: Computation, heads: HeadShape, layer: int
) -> tuple[_Projection, _Projection, _Projection]:
    """Query, key and value."""
    if tensors.map.has("qkv"):
        weights = _cut(tensors.take("qkv", layer=layer), how, heads)
        bias = tensors.get("qkv", "bias", layer)
        biases = dict.fromkeys("qkv") if bias is None else _cut(bias, how, heads)
        query, key, value = (_Projection(weights[letter], biases[letter]) for letter in "qkv")
        return query, key, value
    roles: tuple[Role, ...] = ("query", "key", "value")
    query, key, value = (
        _Projection(tensors.take(role, "weight", layer), tensors.get(role, "bias", layer))
        for role in roles
    )
    return query, key, value


def _cut(tensor: Tensor, how: Computation, heads: HeadShape) -> dict[str, Tensor]:
    """A fused matrix or bias as its three parts."""
    queries, keys = heads.n_head * heads.head_dim, heads.n_kv_head * heads.head_dim
    if how.qkv_layout == "per_head":
        if queries != keys:
            raise ConvertError(
                f"query, key and value lie head by head, and there are {heads.n_head} heads for "
                f"queries and {heads.n_kv_head} for keys; equal numbers can be imported"
            )
        # (H * 3 * D, ...) to three of (H * D, ...)
        parts = tensor.unflatten(0, (heads.n_head, 3, heads.head_dim)).unbind(1)
        return dict(zip("qkv", (part.flatten(0, 1) for part in parts), strict=True))
    sizes = {"q": queries, "k": keys, "v": keys}
    order = how.qkv_layout
    return dict(zip(order, tensor.split([sizes[letter] for letter in order]), strict=True))


def _qk_norms(
    tensors: MappedTensors, how: Computation, heads: HeadShape, layer: int
) -> tuple[Tensor, Tensor]:
    if how.qk_norm == "unit":
        return torch.ones(heads.head_dim), torch.ones(heads.head_dim)
    norms = []
    for role in ("query_norm", "key_norm"):
        weight = tensors.take(role, "weight", layer)
        if tensors.map.has(role, "bias") or len(weight) != heads.head_dim:
            raise ConvertError(
                f"{tensors.where}: {tensors.map.of(role, 'weight')[0]} has {len(weight)} elements"
                f"{' and a bias' if tensors.map.has(role, 'bias') else ''}; norms of queries and "
                f"keys are RMS norms of one head here, {heads.head_dim} elements without a bias"
            )
        if how.positions == "rotary" and how.rotary_layout == "interleaved":
            weight = torch.cat((weight[0::2], weight[1::2]))
        norms.append(weight)
    return norms[0], norms[1]


def _evens_first(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of each head in the order 0, 2, 4, ..., 1, 3, 5, ...: neighbours become halves."""
    by_head = tensor.unflatten(0, (-1, head_dim))  # (H, D, ...)
    return torch.cat((by_head[:, 0::2], by_head[:, 1::2]), dim=1).flatten(0, 1)


def _feed_forward(
    tensors: MappedTensors, how: Computation, layer: int, weights: dict[str, Tensor]
) -> None:
    name, mapped = f"blocks.{layer}", tensors.map
    if mapped.has("mlp_gate"):
        for part in PARTS:
            halves = [tensors.get(role, part, layer) for role in ("mlp_gate", "mlp_up")]
            known = next((half for half in halves if half is not None), None)
            if known is not None:
                whole = [torch.zeros_like(known) if half is None else half for half in halves]
                weights[f"{name}.mlp_up.{part}"] = torch.cat(_gate_first(whole, how))
    elif mapped.has("mlp_gate_up"):
        for part in PARTS:
            if (both := tensors.get("mlp_gate_up", part, layer)) is not None:
                weights[f"{name}.mlp_up.{part}"] = torch.cat(_gate_first(list(both.chunk(2)), how))
    else:
        weights[f"{name}.mlp_up.weight"] = tensors.take("mlp_up", layer=layer)
        if (bias := tensors.get("mlp_up", "bias", layer)) is not None:
            weights[f"{name}.mlp_up.bias"] = bias
    if mapped.has("mlp_down"):
        weights[f"{name}.mlp_down.weight"] = tensors.take("mlp_down", layer=layer)
    else:
        size = tensors.shape("mlp_up")[0]
        width = tensors.shape("token_embedding")[1]
        if size != width:
            raise ConvertError(
                f"{tensors.where}: the feed-forward has one matrix of {size} rows, and the "
                f"residual stream is {width} wide: name the second matrix with --map"
            )
        weights[f"{name}.mlp_down.weight"] = torch.eye(size)
    if (bias := tensors.get("mlp_down", "bias", layer)) is not None:
        weights[f"{name}.mlp_down.bias"] = bias


def _gate_first(halves: list[Tensor], how: Computation) -> list[Tensor]:
    return halves if how.gate_order == "gate_first" else halves[::-1]


def _fill_biases(config: GPTConfig, weights: dict[str, Tensor], folds: list[str]) -> None:
    """Zeros for the biases that some parts have and others lack."""
    filled = set()
    for layer in range(config.n_layer):
        parts = [("attention_out", config.bias), ("mlp_up", config.bias), ("mlp_down", config.bias)]
        if config.norm == "layernorm":
            parts += [("attention_norm", config.bias), ("mlp_norm", config.bias)]
        for part, wanted in parts:
            name = f"blocks.{layer}.{part}"
            if wanted and f"{name}.bias" not in weights:
                weights[f"{name}.bias"] = torch.zeros(len(weights[f"{name}.weight"]))
                filled.add(part)
    centred = config.final_norm and config.norm == "layernorm" and config.bias
    if centred and "final_norm.bias" not in weights:
        weights["final_norm.bias"] = torch.zeros(config.d_model)
        filled.add("final_norm")
    if filled:
        folds.append(
            f"biases of zeros, which the source does not have: {', '.join(sorted(filled))}"
        )


def _note_folds(
    tensors: MappedTensors, how: Computation, heads: HeadShape, folds: list[str]
) -> None:
    """A sentence for each change that is not mere renaming."""
    mapped = tensors.map
    if mapped.n_head:
        folds.append(f"query, key and value of {mapped.n_head} heads stacked into one matrix")
    if how.score_scale != "head_dim" and heads.head_dim != tensors.shape("token_embedding")[1]:
        what = "sqrt(d_model)" if how.score_scale == "d_model" else "nothing"
        folds.append(f"query rows scaled: the source divides scores by {what}")
    if how.positions == "rotary" and how.rotary_layout == "interleaved":
        folds.append("rows of query and key reordered: the source turns neighbouring channels")
    if how.qk_norm == "unit":
        folds.append("norms of query and key of ones: the source's have no weights")
    if how.qk_norm != "none" and how.qk_norm_eps != how.norm_eps:
        folds.append(
            f"query and key rows scaled: their norms have eps {how.qk_norm_eps:g} in the source, "
            f"the other norms {how.norm_eps:g}"
        )
    if not mapped.has("attention_out"):
        folds.append("the identity behind attention: the source has no output projection")
    if not mapped.has("mlp_down"):
        folds.append("the identity as second matrix of the feed-forward: the source has none")
    if mapped.names.get(("attention_norm", "weight")) == mapped.names.get(("mlp_norm", "weight")):
        folds.append("one norm for attention and feed-forward: stored twice")
    if how.positions == "sinusoidal_halves":
        folds.append("the sinusoidal table (sines, then cosines) stored as learned positions")
    if how.positions == "none":
        folds.append("positions of zeros: the source has none")
    if how.qkv_layout != "qkv":
        folds.append(f"rows of the fused query, key and value reordered from {how.qkv_layout}")
