"""Build: turns tensors with known roles and a computation into a GPTConfig and its weights.

If the source computes something that this project's GPT does not compute, the weights are changed
to make up for the difference. The results change only by floating-point rounding:

- separate tensors for heads, or a different order in fused matrices: rows are reordered;
- scores divided by sqrt(d_model) or not at all: query rows are scaled;
- rotary positions on adjacent channels: rows of query and key are reordered, even channels first;
- rotary positions that rotate backward: the halves of each head of queries and keys are exchanged;
- query and key norms without weights get weights of 1; if the eps of these norms differs from the
  other norms' eps, the rows of query and key are scaled;
- norms without weights, and such a norm behind the layers, get weights of 1;
- if attention's output projection or the feed-forward's second matrix is missing, an identity
  matrix takes its place;
- position tables of any type that are added to the embedding are stored as learned positions;
- embeddings multiplied by sqrt(d_model): the embedding is scaled, and the head is stored
  separately;
- if only some parts have biases, the others get biases of zero.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from logitd.model.convert.by_role.computation import Computation
from logitd.model.convert.by_role.tensor_map import (
    QKV,
    SEPARATE,
    MappedTensors,
    Part,
    Role,
    TensorMap,
)
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.layouts import backwards, evens_first, fill_biases, source_rows
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import sinusoidal_table

PARTS: tuple[Part, ...] = ("weight", "bias")
COPIED = ("context_length", "norm", "norm_position", "norm_eps", "final_norm", "residual",
          "rope_theta")  # fmt: skip
"""Fields of Computation that are copied to the GPTConfig."""
UP: tuple[Role, ...] = ("mlp_up", "mlp_gate", "mlp_gate_up")


@dataclass(frozen=True)
class Built:
    """A model in this project's form.

    folds      descriptions of the changes to weights
    rescaled   True if some weights were scaled, so saving them in 16 bits would round them again
    """

    config: GPTConfig
    weights: Mapping[str, Tensor]
    folds: tuple[str, ...]
    rescaled: bool = False


@dataclass(frozen=True)
class HeadShape:
    n_head: int
    n_kv_head: int
    head_dim: int


def query_rows(tensors: MappedTensors) -> tuple[int, int]:
    """The numbers of query rows and key rows. Raises ConvertError if the fused matrix cannot be
    divided into query, key and value."""
    if not tensors.map.has("qkv"):
        return tensors.shape("query")[0], tensors.shape("key")[0]
    rows, width = tensors.shape("qkv")
    queries = tensors.shape("attention_out")[1] if tensors.map.has("attention_out") else width
    if rows < 3 or (rows - queries) % 2 or rows <= queries:
        raise ConvertError(
            f"{tensors.where}: the fused matrix of query, key and value has {rows} rows, but "
            f"attention's output has {queries} columns: it cannot be divided into query, key and "
            "value"
        )
    return queries, (rows - queries) // 2


def head_shape(tensors: MappedTensors, n_head: int) -> HeadShape:
    """The shape of the heads, given their number. Raises ConvertError if the rows cannot be divided
    equally among the heads."""
    queries, keys = query_rows(tensors)
    if n_head < 1 or queries % n_head or keys % (queries // n_head):
        raise ConvertError(
            f"{tensors.where}: {queries} query rows and {keys} key rows cannot be divided "
            f"among {n_head} heads"
        )
    head_dim = queries // n_head
    return HeadShape(n_head, keys // head_dim, head_dim)


def qk_norms_commute(tensors: MappedTensors) -> bool:
    """True if norms of queries and keys give the same result before and after rotary positions:
    each norm has equal weights in all channels, or none."""
    roles: tuple[Role, ...] = ("query_norm", "key_norm")
    weights = [
        tensor
        for role in roles
        for layer in range(tensors.map.n_layer)
        if (tensor := tensors.get(role, "weight", layer)) is not None
    ]
    return all(bool((weight == weight[0]).all()) for weight in weights)


def _check_consistent(tensors: MappedTensors, how: Computation) -> None:
    mapped, found = tensors.map, list[str]()
    if how.positions == "learned" and not mapped.has("positions"):
        found.append("positions are learned, but no tensor is their table")
    if how.qk_norm == "learned" and not mapped.has("query_norm"):
        found.append("qk_norm is learned, but no tensor is such a norm")
    if how.qk_norm_position == "after_rotary" and not qk_norms_commute(tensors):
        found.append(
            "qk_norm_position is after_rotary, but a GPTConfig has norms of queries and keys only "
            "before. Serve the owner's class with --code FILE:NAME --run-code"
        )
    if how.norm == "rmsnorm" and mapped.has_bias("attention_norm", "mlp_norm", "final_norm"):
        found.append("norm is rmsnorm, but norms have biases")
    gated = ("swiglu", "silu") if mapped.has_gate else ("swiglu",)
    if mapped.has_gate != (how.activation in gated):
        gate = "a" if mapped.has_gate else "no"
        found.append(f"activation is {how.activation}, but the feed-forward has {gate} gate")
    if found:
        raise ConvertError(f"{tensors.where}: {'; '.join(found)}")


def build(tensors: MappedTensors, how: Computation, *, dropout: float = 0.0) -> Built:
    """Build the model from the tensors and the computation `how`. Raises ConvertError or
    ConfigError if they do not fit together."""
    _check_consistent(tensors, how)
    mapped, heads = tensors.map, head_shape(tensors, how.n_head)
    weights = _outside(tensors, how)
    for layer in range(mapped.n_layer):
        for name, tensor in _layer(tensors, how, heads, layer).items():
            weights[f"blocks.{layer}.{name}"] = tensor
    norm_bias = mapped.has_bias("attention_norm", "mlp_norm") or (
        how.final_norm and mapped.has_bias("final_norm")
    )
    rows, width = tensors.shape("token_embedding")
    config = GPTConfig.from_dict(
        {
            "vocab_size": rows,
            "padded_vocab_size": rows,
            "n_layer": mapped.n_layer,
            **asdict(heads),
            "d_model": width,
            "d_ff": weights["blocks.0.mlp_down.weight"].shape[1],
            **{name: getattr(how, name) for name in COPIED},
            "activation": "swiglu" if how.activation == "silu" else how.activation,
            "positions": how.positions if how.positions in ("rotary", "sinusoidal") else "learned",
            "bias": mapped.has_bias("attention_out", "mlp_down", *UP)
            or _needs_ones(mapped, how)
            or (how.norm == "layernorm" and norm_bias),
            "qkv_bias": mapped.has_bias(*QKV),
            "qk_norm": how.qk_norm != "none",
            "tied_head": "head.weight" not in weights,
            "head_bias": mapped.has("head", "bias"),
            "value_embeddings": False,
            "dropout": dropout,
        }
    )
    _unshare(weights)
    filled = fill_biases(config, weights)
    rescaled = (
        how.score_scale != "head_dim"
        or how.embedding_scale != "one"
        or (how.qk_norm != "none" and how.qk_norm_eps != how.norm_eps)
    )
    return Built(config, weights, tuple(_describe_folds(tensors, how, heads, filled)), rescaled)


def _unshare(weights: dict[str, Tensor]) -> None:
    """Copy each tensor that appears under a second name, such as a norm that two sublayers share.
    safetensors does not save tensors that share memory."""
    seen: set[int] = set()
    for name, tensor in weights.items():
        if tensor.data_ptr() in seen:
            weights[name] = tensor.clone()
        seen.add(tensor.data_ptr())


def _outside(tensors: MappedTensors, how: Computation) -> dict[str, Tensor]:
    embedding, head = tensors.take("token_embedding"), tensors.get("head")
    if head is not None and head.shape != embedding.shape:
        raise ConvertError(
            f"{tensors.where}: the head has shape {list(head.shape)} and the token embedding "
            f"has shape {list(embedding.shape)}; the two shapes must be equal"
        )
    weights: dict[str, Tensor] = {}
    if head is not None and not torch.equal(head, embedding):
        weights["head.weight"] = head
    width = embedding.shape[1]
    if how.embedding_scale == "sqrt_d_model":
        weights.setdefault("head.weight", embedding)
        embedding = embedding * math.sqrt(width)
    weights["token_embedding.weight"] = embedding
    if (bias := tensors.get("head", "bias")) is not None:
        weights["head.bias"] = bias
    if how.positions in ("learned", "sinusoidal_halves", "none"):
        weights["position_embedding.weight"] = _position_table(tensors, how, width)
    for part in PARTS:
        if how.final_norm and (tensor := tensors.get("final_norm", part)) is not None:
            weights[f"final_norm.{part}"] = tensor
    if how.final_norm:
        weights.setdefault("final_norm.weight", torch.ones(width))
    return weights


def _position_table(tensors: MappedTensors, how: Computation, width: int) -> Tensor:
    length = how.context_length
    if how.positions == "learned":
        table = tensors.take("positions")
        if len(table) < length:
            raise ConvertError(
                f"{tensors.where}: context_length is {length}, but the file's table of positions "
                f"has only {len(table)} rows"
            )
        return table[:length]
    if how.positions == "none":
        return torch.zeros(length, width)
    table = sinusoidal_table(length, width, torch.device("cpu"))
    return torch.cat((table[:, 0::2], table[:, 1::2]), dim=1)  # sines, then cosines


def _layer(
    tensors: MappedTensors, how: Computation, heads: HeadShape, layer: int
) -> dict[str, Tensor]:
    roles: tuple[Role, ...] = ("attention_norm", "attention_out", "mlp_norm", "mlp_down")
    weights = {
        f"{role}.{part}": tensor
        for role in roles
        for part in PARTS
        if (tensor := tensors.get(role, part, layer)) is not None
    }
    weights |= _attention(tensors, how, heads, layer) | _feed_forward(tensors, how, layer)
    width = tensors.shape("token_embedding")[1]
    for name in ("attention_norm.weight", "mlp_norm.weight"):
        weights.setdefault(name, torch.ones(width))
    if "attention_out.weight" not in weights:
        weights["attention_out.weight"] = torch.eye(width, heads.n_head * heads.head_dim)
    if "mlp_down.weight" not in weights:
        if (size := len(weights["mlp_up.weight"])) != width:
            raise ConvertError(
                f"{tensors.where}: the feed-forward has one matrix of {size} rows, but the "
                f"residual stream is {width} wide: name the second matrix with --map"
            )
        weights["mlp_down.weight"] = torch.eye(size)
    if _needs_ones(tensors.map, how):
        up = weights["mlp_up.weight"]
        bias = weights.get("mlp_up.bias", up.new_zeros(len(up)))
        weights["mlp_up.weight"] = torch.cat((up, torch.zeros_like(up)))
        weights["mlp_up.bias"] = torch.cat((bias, torch.ones_like(bias)))
    return weights


def _needs_ones(mapped: TensorMap, how: Computation) -> bool:
    """True if the feed-forward has the SiLU and no gate. It is computed as a gate of a part that is
    always 1, because a GPTConfig has the SiLU only in a gate."""
    return how.activation == "silu" and not mapped.has_gate


def _stacked(
    tensors: MappedTensors, roles: Sequence[Role], part: Part, layer: int
) -> Tensor | None:
    """The tensors of several roles, one below the other; None if no role has such a tensor. If only
    some have a bias, zeros take the place of the others."""
    if not any(tensors.map.has(role, part) for role in roles):
        return None
    pieces = []
    for role in roles:
        piece = tensors.get(role, part, layer)
        if piece is None:
            weight = tensors.take(role, "weight", layer)
            piece = weight.new_zeros(len(weight))
        pieces.append(piece)
    return torch.cat(pieces)


def _attention(
    tensors: MappedTensors, how: Computation, heads: HeadShape, layer: int
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    scale = {
        "head_dim": 1.0,
        "d_model": math.sqrt(heads.head_dim / tensors.shape("token_embedding")[1]),
        "none": math.sqrt(heads.head_dim),
    }[how.score_scale]
    factors = (scale, 1.0, 1.0)  # of the rows of query, key and value
    if how.qk_norm != "none":
        norms = _qk_norms(tensors, how, heads, layer)
        weights |= {"query_norm.weight": norms[0] * scale, "key_norm.weight": norms[1]}
        # Scaling the rows gives the norms' eps the same relative size as in the source.
        stretch = math.sqrt(how.norm_eps / how.qk_norm_eps)
        factors = (stretch, stretch, 1.0)
    fused = tensors.map.has("qkv")
    rows = _source_rows(how, heads, fused=fused)
    sizes = torch.tensor([heads.n_head, heads.n_kv_head, heads.n_kv_head]) * heads.head_dim
    for part in PARTS:
        tensor = _stacked(tensors, ("qkv",) if fused else SEPARATE, part, layer)
        if tensor is not None:
            by_row = torch.tensor(factors, dtype=tensor.dtype).repeat_interleave(sizes)
            tensor = tensor[rows] * (by_row if tensor.dim() == 1 else by_row[:, None])
            weights[f"qkv.{part}"] = tensor
    return weights


def _source_rows(how: Computation, heads: HeadShape, *, fused: bool) -> Tensor:
    """For each row of query, key and value here, its index in the source's matrix, or in its
    matrices one below the other."""
    grouped = fused and how.qkv_layout == "per_head"
    if grouped and heads.n_head != heads.n_kv_head:
        raise ConvertError(
            "rows of query, key and value are ordered head by head, but there are "
            f"{heads.n_head} query heads and {heads.n_kv_head} key heads; this order can be "
            "imported only if the two numbers are equal"
        )
    rows = source_rows(heads, _source_channels(how, heads), grouped=grouped)
    if fused and how.qkv_layout == "kqv":  # keys before queries
        queries, keys = heads.n_head * heads.head_dim, heads.n_kv_head * heads.head_dim
        rows[:queries] += keys
        rows[queries : queries + keys] -= queries
    return rows


def _source_channels(how: Computation, heads: HeadShape) -> list[int]:
    """For each channel of a head here, its index in the source."""
    channels = list(range(heads.head_dim))
    if how.positions == "rotary" and how.rotary_layout == "interleaved":
        channels = evens_first(heads)
    if how.positions == "rotary" and how.rotary_direction == "backward":
        channels = [channels[channel] for channel in backwards(heads)]
    return channels


def _qk_norms(
    tensors: MappedTensors, how: Computation, heads: HeadShape, layer: int
) -> Sequence[Tensor]:
    if how.qk_norm == "unit":
        return [torch.ones(heads.head_dim), torch.ones(heads.head_dim)]
    norms = []
    roles: tuple[Role, ...] = ("query_norm", "key_norm")
    for role in roles:
        weight, biased = tensors.take(role, "weight", layer), tensors.map.has(role, "bias")
        if biased or len(weight) != heads.head_dim:
            raise ConvertError(
                f"{tensors.where}: {tensors.map.of(role, 'weight')[0]} has {len(weight)} elements"
                f"{' and a bias' if biased else ''}; norms of queries and keys must be RMS norms "
                f"over one head, with {heads.head_dim} elements and no bias"
            )
        norms.append(weight[_source_channels(how, heads)])
    return norms


def _feed_forward(tensors: MappedTensors, how: Computation, layer: int) -> dict[str, Tensor]:
    """The first matrix of the feed-forward and its bias. If there is a gate, its rows come
    first."""
    roles: tuple[Role, ...] = ("mlp_up",)
    if tensors.map.has_gate:
        fused = tensors.map.has("mlp_gate_up")
        roles = ("mlp_gate_up",) if fused else ("mlp_gate", "mlp_up")
    weights: dict[str, Tensor] = {}
    for part in PARTS:
        if (tensor := _stacked(tensors, roles, part, layer)) is not None:
            swapped = tensors.map.has_gate and how.gate_order == "up_first"
            weights[f"mlp_up.{part}"] = tensor.roll(len(tensor) // 2, 0) if swapped else tensor
    return weights


def _describe_folds(
    tensors: MappedTensors, how: Computation, heads: HeadShape, filled: Sequence[str]
) -> Iterator[str]:
    mapped, width = tensors.map, tensors.shape("token_embedding")[1]
    if how.embedding_scale == "sqrt_d_model":
        yield f"the embedding times sqrt({width}), as the source multiplies it"
    if filled:
        yield f"zeros for biases that the source does not have: {', '.join(filled)}"
    if mapped.n_head:
        yield f"query, key and value of {mapped.n_head} heads stacked into one matrix"
    if how.score_scale != "head_dim" and heads.head_dim != width:
        divisor = "sqrt(d_model)" if how.score_scale == "d_model" else "nothing"
        yield f"query rows scaled: the source divides scores by {divisor}"
    if how.positions == "rotary" and how.rotary_layout == "interleaved":
        yield "rows of query and key reordered: the source rotates adjacent channels"
    if how.positions == "rotary" and how.rotary_direction == "backward":
        yield "halves of the heads of query and key exchanged: the source rotates backward"
    if how.qk_norm == "unit":
        yield "ones as norms of query and key: the source's have no weights"
    if how.qk_norm != "none" and how.qk_norm_eps != how.norm_eps:
        yield (
            f"query and key rows scaled: their norms have eps {how.qk_norm_eps:g} in the source, "
            f"the other norms {how.norm_eps:g}"
        )
    if _needs_ones(mapped, how):
        yield "the SiLU without a gate computed as a gate of ones"
    if not mapped.has("attention_out"):
        yield "the identity as the output projection of attention: the source has none"
    if not mapped.has("mlp_down"):
        yield "the identity as the second matrix of the feed-forward: the source has none"
    if not mapped.has_norms:
        yield "ones as norms: the source's have no weights"
    elif how.final_norm and not mapped.has("final_norm"):
        yield "ones as the norm behind the layers: the source's has no weights"
    if mapped.has_norms and mapped.name("attention_norm") == mapped.name("mlp_norm"):
        yield "one norm for attention and feed-forward: stored twice"
    if how.positions == "sinusoidal_halves":
        yield "the sinusoidal table (sines, then cosines) stored as learned positions"
    if how.positions == "none":
        yield "zeros as positions: the source has none"
    if how.qkv_layout != "qkv":
        yield f"rows of the fused query, key and value reordered from {how.qkv_layout}"
