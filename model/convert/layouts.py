"""Layouts: how other programs name, order and orient a GPT's weights, and what they call its sizes.

A `Layout` maps this project's modules and sizes to the modules and sizes of another program, for
reading (`read_weights`, `read_sizes`) and writing (`write_weights`, `write_sizes`). `hf/config.py`,
`nanogpt.py` and `litgpt.py` read the other keys of configurations.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from logitd.model.checkpoint.load import empty_gpt
from logitd.model.convert.foreign import ConvertError, Settings, StateDictReader
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

EMBEDDING, POSITIONS, HEAD = "token_embedding", "position_embedding", "head"
NORMS = ("attention_norm", "mlp_norm", "final_norm")
MATRICES = ("attention_out", "mlp_up", "mlp_down")
LAYER = ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_up", "mlp_down")
"""The modules of a layer, except the norms of query and key."""


class Heads(Protocol):
    """A shape with attention heads."""

    @property
    def n_head(self) -> int: ...
    @property
    def n_kv_head(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The other program's names ("theirs") by this project's names ("ours").

    outside     modules outside the layers
    inside      modules of a layer (see the function `inside`)
    layer       prefix of names in a layer, with {N} for its number
    prefixes    alternative prefixes of all names except the head's; an export uses the last
    heads       alternative names of the head; an export uses the first
    transposed  True if the matrices of the layers are stored (in, out)
    skipped     number of unused rows at the start of a table, by module
    bare        norms that have no weights there; here, all their weights are 1
    channels    the order of the channels in a head of queries or keys, if it differs
    grouped     True if the rows of query, key and value are stored group by group
    sizes       the other program's keys by field of GPTConfig, alternatives separated by spaces
    eps         the other program's key for the norms' eps, and the default value of eps
    """

    outside: Mapping[str, str]
    inside: Mapping[str, tuple[str, ...]]
    layer: str
    prefixes: tuple[str, ...] = ("",)
    heads: tuple[str, ...] = ("lm_head",)
    transposed: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()
    channels: Callable[[GPTConfig], list[int]] | None = None
    grouped: bool = False
    sizes: Mapping[str, str] = field(default_factory=dict)
    eps: tuple[str, float] | None = None

    def names(self, module: str, prefix: str) -> list[str]:
        if module == HEAD:
            return [self.heads[0]]
        if not module.startswith("blocks."):
            return [f"{prefix}{self.outside[module]}"]
        _, number, part = module.split(".")
        layer = prefix + self.layer.replace("{N}", number)
        return [f"{layer}{name}" for name in self.inside[part]]

    def rows(self, config: GPTConfig) -> dict[str, Tensor]:
        """The orders of rows, by the names of the modules whose rows are ordered differently in the
        other program. Element i of a tensor is the index, in the other program, of the row that has
        index i in this project."""
        if self.channels is None:
            return {}
        channels = self.channels(config)
        norm = torch.tensor(channels)
        qkv = source_rows(config, channels, grouped=self.grouped)
        return {"qkv": qkv, "query_norm": norm, "key_norm": norm}

    def is_transposed(self, module: str, tensor_dims: int) -> bool:
        return self.transposed and tensor_dims == 2 and module.startswith("blocks.")


def read_sizes(settings: Settings, layout: Layout, **defaults: int) -> dict[str, Any]:
    """Read the sizes in a configuration as fields of a GPTConfig. Raises ConvertError."""
    read: dict[str, Any] = {"vocab_size": settings.integer("vocab_size")}
    for ours, theirs in layout.sizes.items():
        read[ours] = settings.integer(*theirs.split(), default=defaults.get(ours))
    return read | ({"norm_eps": settings.number(*layout.eps)} if layout.eps else {})


def write_sizes(config: GPTConfig, layout: Layout) -> dict[str, Any]:
    """The sizes under the other program's keys, including all alternative keys."""
    written = {
        key: getattr(config, ours) for ours, keys in layout.sizes.items() for key in keys.split()
    }
    return written | ({layout.eps[0]: config.norm_eps} if layout.eps else {})


def read_weights(
    reader: StateDictReader,
    config: GPTConfig,
    layout: Layout,
    *,
    unbiased: Collection[str] = (),
    own: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Read the weights of a model of this shape. Returns them by this project's names.

    unbiased  parts without biases in the source; their biases become zeros
    own       weights that the layout does not describe, by this project's names

    Raises ConvertError if a tensor is missing or has another shape.
    """
    reader.require_layers(config.n_layer)
    first = layout.names(EMBEDDING, "")[0]
    found = (prefix for prefix in layout.prefixes if f"{prefix}{first}.weight" in reader)
    prefix, rows = next(found, layout.prefixes[-1]), layout.rows(config)
    weights = dict(own or {})
    for name, shape in _shapes(config).items():
        module, kind, part = _split(name)
        if part == HEAD or name in weights or (kind == "bias" and part in unbiased):
            continue
        if part in layout.bare:
            weights[name] = torch.ones(shape)
            continue
        names, skipped, pieces = layout.names(module, prefix), layout.skipped.get(module, 0), []
        for their, size in zip(names, _sizes(config, part, shape[0], len(names)), strict=True):
            piece = [skipped + size, *shape[1:]]
            turned = layout.is_transposed(module, len(piece))
            tensor = reader.take(f"{their}.{kind}", *(piece[::-1] if turned else piece))
            pieces.append((tensor.T if turned else tensor)[skipped:])
        weights[name] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if part in rows:
            weights[name] = weights[name][rows[part]]
    fill_biases(config, weights)
    return weights | _read_head(reader, config, layout, weights[f"{EMBEDDING}.weight"])


def _read_head(
    reader: StateDictReader, config: GPTConfig, layout: Layout, embedding: Tensor
) -> dict[str, Tensor]:
    """The head's weights. If the head is tied but stored anyway, it must equal the embedding."""
    head = next((name for name in layout.heads if f"{name}.weight" in reader), layout.heads[0])
    weights: dict[str, Tensor] = {}
    if not config.tied_head or f"{head}.weight" in reader:
        weights["head.weight"] = reader.take(f"{head}.weight", *embedding.shape)
    if config.head_bias:
        weights["head.bias"] = reader.take(f"{head}.bias", len(embedding))
    if config.tied_head and not torch.equal(weights.pop("head.weight", embedding), embedding):
        raise ConvertError(
            f"{head}.weight differs from the embedding, but with tie_word_embeddings they must "
            "be equal: the file contradicts its configuration"
        )
    return weights


def fill_biases(config: GPTConfig, weights: dict[str, Tensor]) -> list[str]:
    """Add zeros to `weights` for each bias that the shape has but the weights lack. Returns the
    sorted names of the parts that got zeros."""
    filled = set[str]()
    for name in _shapes(config):
        module, kind, part = _split(name)
        if kind == "bias" and part != HEAD and name not in weights:
            weights[name] = weights[f"{module}.weight"].new_zeros(len(weights[f"{module}.weight"]))
            filled.add(part)
    return sorted(filled)


def tie_if_equal(
    config: GPTConfig, weights: Mapping[str, Tensor]
) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Tie the head to the embedding if their weights are equal."""
    rest = dict(weights)
    head = rest.pop("head.weight", None)
    if head is None or not torch.equal(head, rest[f"{EMBEDDING}.weight"]):
        return config, dict(weights)
    return replace(config, tied_head=True), rest


def write_weights(gpt: GPT, layout: Layout, *, biased: Collection[str]) -> dict[str, Tensor]:
    """The weights by the other program's names. Tensors are not shared, and padding rows are
    dropped. The parts in `biased` have biases in the other program; if such a part has no bias
    here, its bias becomes zeros. Sinusoidal positions become learned positions."""
    config, state = gpt.config, gpt.state_dict()
    rows = layout.rows(config)
    if POSITIONS in layout.outside and f"{POSITIONS}.weight" not in state:
        table = gpt.sinusoids.to(state[f"{EMBEDDING}.weight"].dtype)
        state[f"{POSITIONS}.weight"] = table
    for name, tensor in list(state.items()):
        module, kind, part = _split(name)
        if kind == "weight" and part in biased:
            state.setdefault(f"{module}.bias", tensor.new_zeros(len(tensor)))
    weights: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, kind, part = _split(name)
        names = layout.names(module, layout.prefixes[-1])
        if part in (EMBEDDING, HEAD):
            tensor = tensor[: config.vocab_size]
        if part in rows:
            tensor = tensor[rows[part].argsort()]
        pieces = tensor.split(_sizes(config, part, len(tensor), len(names)))
        for their, piece in zip(names, pieces, strict=True):
            turned = piece.T if layout.is_transposed(module, piece.dim()) else piece
            weights[f"{their}.{kind}"] = turned.clone(memory_format=torch.contiguous_format)
    return weights


def _shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    bare = replace(config, padded_vocab_size=config.vocab_size)
    state = empty_gpt(bare, torch.device("meta")).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _split(name: str) -> tuple[str, str, str]:
    """Split a name into module, kind and part: "blocks.0.qkv.bias" becomes "blocks.0.qkv", "bias"
    and "qkv"."""
    module, _, kind = name.rpartition(".")
    return module, kind, module.rpartition(".")[2]


def _sizes(config: GPTConfig, part: str, rows: int, count: int) -> list[int]:
    """The numbers of rows of the `count` modules in the other program that correspond to one module
    here."""
    if part == "qkv" and count == 3:
        return [rows - 2 * config.kv_width, config.kv_width, config.kv_width]
    return [rows // count] * count


def source_rows(heads: Heads, channels: Sequence[int], *, grouped: bool = False) -> Tensor:
    """For each row of query, key and value here, its index in the other program. There, the rows
    are in the order all queries, all keys, all values; or, if `grouped`, group by group, each with
    its queries, key and value. `channels` has the index there of each channel of a head of queries
    or keys."""
    n_kv_head, head_dim = heads.n_kv_head, heads.head_dim
    rows = torch.arange((heads.n_head + 2 * n_kv_head) * head_dim).view(-1, head_dim)
    if grouped:
        per_group = heads.n_head // n_kv_head
        groups = rows.view(n_kv_head, per_group + 2, head_dim)
        parts = groups.split([per_group, 1, 1], dim=1)
        rows = torch.cat([part.flatten(0, 1) for part in parts])
    turned = heads.n_head + n_kv_head
    return torch.cat((rows[:turned, list(channels)], rows[turned:])).flatten()


def turning_first(config: GPTConfig) -> list[int]:
    """The order of the channels in GPT-NeoX and LitGPT: in a head, the `rotary_dim` rotated
    channels come first, then the other channels. Here, the first halves of both groups come first,
    then the second halves."""
    turning = config.rotary_dim // 2
    resting = (config.head_dim - config.rotary_dim) // 2
    ends = config.rotary_dim + resting
    first = [*range(turning), *range(config.rotary_dim, ends)]
    return [*first, *range(turning, config.rotary_dim), *range(ends, config.head_dim)]


def evens_first(heads: Heads) -> list[int]:
    """The order of the channels if channels 2i and 2i + 1 of a head are rotated together, as in
    llama2.c and in llama.cpp's "llama": 0, 2, 4, ..., 1, 3, 5, ...."""
    return [*range(0, heads.head_dim, 2), *range(1, heads.head_dim, 2)]


def backwards(heads: Heads) -> list[int]:
    """nanochat's order of the channels. nanochat rotates pairs of channels backward. This is the
    same as rotating forward after the two halves of each head are exchanged."""
    half = heads.head_dim // 2
    return [*range(half, heads.head_dim), *range(half)]


def inside(*names: str, **norms: str) -> dict[str, tuple[str, ...]]:
    """The `inside` of a Layout. `names` are the other program's names of a layer's modules, in the
    order of LAYER. If a string contains several names, separated by spaces, these modules are
    stacked into one module here. `norms` are the names of the norms of query and key."""
    parts = dict(zip(LAYER, names, strict=True)) | norms
    return {part: tuple(theirs.split()) for part, theirs in parts.items()}


def sizes(*keys: str, **more: str) -> dict[str, str]:
    """The `sizes` of a Layout. `keys` are the keys of the context length, the width, the number of
    layers and the number of heads, in this order. `more` has the keys of other fields."""
    names = ("context_length", "d_model", "n_layer", "n_head")
    return dict(zip(names, keys, strict=True)) | more


GPT2 = Layout(
    outside={EMBEDDING: "wte", POSITIONS: "wpe", "final_norm": "ln_f"},
    inside=inside("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    layer="h.{N}.",
    prefixes=("", "transformer."),
    transposed=True,
    sizes=sizes("n_positions n_ctx", "n_embd", "n_layer", "n_head", d_ff="n_inner"),
    eps=("layer_norm_epsilon", 1e-5),
)
NANOGPT = replace(
    GPT2,
    prefixes=("transformer.",),
    transposed=False,
    sizes=sizes("block_size", "n_embd", "n_layer", "n_head"),
    eps=None,
)
_SIZES = ("max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
LLAMA = Layout(
    outside={EMBEDDING: "embed_tokens", "final_norm": "norm"},
    inside=inside(
        "input_layernorm",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj mlp.up_proj",
        "mlp.down_proj",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
    ),
    layer="layers.{N}.",
    prefixes=("", "model."),
    sizes=sizes(
        *_SIZES, d_ff="intermediate_size", n_kv_head="num_key_value_heads", head_dim="head_dim"
    ),
    eps=("rms_norm_eps", 1e-6),
)
LLAMA2C = Layout(
    outside={EMBEDDING: "tok_embeddings", "final_norm": "norm"},
    inside=inside(
        "attention_norm",
        "attention.wq attention.wk attention.wv",
        "attention.wo",
        "ffn_norm",
        "feed_forward.w1 feed_forward.w3",
        "feed_forward.w2",
    ),
    layer=LLAMA.layer,
    heads=("output",),
    channels=evens_first,
)
NANOCHAT = replace(
    LLAMA,
    outside={EMBEDDING: "embed_tokens"},
    inside={**LLAMA.inside, "mlp_up": ("mlp.fc1",), "mlp_down": ("mlp.fc2",)},
    bare=frozenset((*NORMS, "embedding_norm", "query_norm", "key_norm")),
    channels=backwards,
)
NEOX = Layout(
    outside={EMBEDDING: "embed_in", "final_norm": "final_layer_norm"},
    inside=inside(
        "input_layernorm",
        "attention.query_key_value",
        "attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    ),
    layer="layers.{N}.",
    prefixes=("", "gpt_neox."),
    heads=("embed_out", "lm_head"),
    channels=turning_first,
    grouped=True,
    sizes=sizes(*_SIZES, d_ff="intermediate_size"),
    eps=("layer_norm_eps", 1e-5),
)
OPT = Layout(
    outside={
        EMBEDDING: "embed_tokens",
        POSITIONS: "embed_positions",
        "final_norm": "final_layer_norm",
    },
    inside=inside(
        "self_attn_layer_norm",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attn.out_proj",
        "final_layer_norm",
        "fc1",
        "fc2",
    ),
    layer="layers.{N}.",
    prefixes=("", "decoder.", "model.decoder."),
    skipped={POSITIONS: 2},  # fairseq reserves these rows for padding
    sizes=sizes(*_SIZES, d_ff="ffn_dim"),
)
LITGPT = Layout(
    outside={EMBEDDING: "transformer.wte", "final_norm": "transformer.ln_f"},
    inside=inside(
        *("norm_1", "attn.qkv", "attn.proj", "norm_2", "mlp.fc", "mlp.proj"),
        query_norm="attn.norm_q",
        key_norm="attn.norm_k",
    ),
    layer="transformer.h.{N}.",
    channels=turning_first,
    sizes={
        **NANOGPT.sizes,
        "d_ff": "intermediate_size",
        "n_kv_head": "n_query_groups",
        "head_dim": "head_size",
    },
    eps=("norm_eps", 1e-5),
)
