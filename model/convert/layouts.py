"""Layouts: the names, order and orientation of a GPT's weights in other programs.

A `Layout` is a table from our modules to theirs. `read_weights` takes the tensors of a file by it,
`write_weights` gives our weights their names: one table for both ways. Knows no configurations
(`hf/config.py`, `nanogpt.py`, `litgpt.py`) and no files.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from logitd.model.checkpoint.checkpoint import empty_gpt
from logitd.model.convert.foreign import ConvertError, StateDictReader
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.gpt import GPT

EMBEDDING, POSITIONS, HEAD = "token_embedding", "position_embedding", "head"
NORMS = ("attention_norm", "mlp_norm", "final_norm")
MATRICES = ("attention_out", "mlp_up", "mlp_down")

Rows = Mapping[str, Tensor]
"""For a module, which row of theirs each row of ours is."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Modules by our names, and theirs.

    outside     modules outside the layers
    inside      modules of a layer; the rows of several lie one behind the other here
    layer       text before the names of a layer, with {N} for its number
    prefixes    alternatives of the text before every name but the head's; the last one is written
    heads       alternatives of the head's name; the first one is written
    transposed  matrices of the layers lie (in, out)
    skipped     rows at the start of a table that belong to nothing here
    rows        the order of rows, if it differs
    """

    outside: Mapping[str, str]
    inside: Mapping[str, tuple[str, ...]]
    layer: str
    prefixes: tuple[str, ...] = ("",)
    heads: tuple[str, ...] = ("lm_head",)
    transposed: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)
    rows: Callable[[GPTConfig], Rows] = lambda config: {}

    def names(self, module: str, prefix: str) -> list[str]:
        """Their names of a module of ours."""
        if module == HEAD:
            return [self.heads[0]]
        if not module.startswith("blocks."):
            return [f"{prefix}{self.outside[module]}"]
        _, number, part = module.split(".")
        layer = prefix + self.layer.replace("{N}", number)
        return [f"{layer}{name}" for name in self.inside[part]]

    def is_transposed(self, module: str, tensor_dims: int) -> bool:
        """True if a tensor of a module lies (in, out) there."""
        return self.transposed and tensor_dims == 2 and module.startswith("blocks.")


def read_weights(
    reader: StateDictReader, config: GPTConfig, layout: Layout, *, unbiased: Collection[str] = ()
) -> dict[str, Tensor]:
    """The weights of a model of this shape by our names; `unbiased` are parts that have no biases
    there, though others have: they get zeros. Raises ConvertError for a tensor that is missing or
    of another shape."""
    reader.require_layers(config.n_layer)
    first = layout.names(EMBEDDING, "")[0]
    found = (prefix for prefix in layout.prefixes if f"{prefix}{first}.weight" in reader)
    prefix, rows = next(found, layout.prefixes[-1]), layout.rows(config)
    weights: dict[str, Tensor] = {}
    for name, shape in _shapes(config).items():
        module, kind, part = _split(name)
        if part == HEAD or (kind == "bias" and part in unbiased):
            continue
        names = layout.names(module, prefix)
        pieces = []
        for their, size in zip(names, _sizes(config, part, shape[0], len(names)), strict=True):
            piece = [layout.skipped.get(module, 0) + size, *shape[1:]]
            turned = layout.is_transposed(module, len(piece))
            tensor = reader.take(f"{their}.{kind}", *(piece[::-1] if turned else piece))
            pieces.append((tensor.T if turned else tensor)[layout.skipped.get(module, 0) :])
        weights[name] = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        if part in rows:
            weights[name] = weights[name][rows[part]]
    fill_biases(config, weights)
    return weights | _read_head(reader, config, layout, weights[f"{EMBEDDING}.weight"])


def _read_head(
    reader: StateDictReader, config: GPTConfig, layout: Layout, embedding: Tensor
) -> dict[str, Tensor]:
    """The head; a tied one is only compared, if it is stored once more."""
    head = next((name for name in layout.heads if f"{name}.weight" in reader), layout.heads[0])
    weights: dict[str, Tensor] = {}
    if not config.tied_head or f"{head}.weight" in reader:
        weights["head.weight"] = reader.take(f"{head}.weight", *embedding.shape)
    if config.head_bias:
        weights["head.bias"] = reader.take(f"{head}.bias", len(embedding))
    if config.tied_head and not torch.equal(weights.pop("head.weight", embedding), embedding):
        raise ConvertError(
            f"{head}.weight differs from the embedding, and tie_word_embeddings says that they are "
            "one; which is right cannot be told from here"
        )
    return weights


def fill_biases(config: GPTConfig, weights: dict[str, Tensor]) -> list[str]:
    """Add zeros for the biases that a model of this shape has and its weights lack; the parts that
    got some, sorted."""
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
    """The model with a tied head if its head equals its embedding."""
    rest = dict(weights)
    head = rest.pop("head.weight", None)
    if head is None or not torch.equal(head, rest[f"{EMBEDDING}.weight"]):
        return config, dict(weights)
    return replace(config, tied_head=True), rest


def write_weights(gpt: GPT, layout: Layout, *, biased: Collection[str]) -> dict[str, Tensor]:
    """The weights by their names, without padded rows, each in memory of its own; parts that are
    `biased` there get zeros if they have no bias here. Sinusoidal positions become learned ones."""
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
    """The shapes of a GPT's weights by our names, without padded rows."""
    bare = replace(config, padded_vocab_size=config.vocab_size)
    state = empty_gpt(bare, torch.device("meta")).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _split(name: str) -> tuple[str, str, str]:
    """Module, kind and part of a weight: blocks.0.qkv.bias is blocks.0.qkv, bias and qkv."""
    module, _, kind = name.rpartition(".")
    return module, kind, module.rpartition(".")[2]


def _sizes(config: GPTConfig, part: str, rows: int, count: int) -> list[int]:
    """The rows of each of `count` modules that one of ours consists of."""
    if part == "qkv" and count == 3:
        return [rows - 2 * config.kv_width, config.kv_width, config.kv_width]
    return [rows // count] * count


def head_by_head(config: GPTConfig) -> Rows:
    """GPT-NeoX: query, key and value of each head in turn, whose turning channels come first."""
    rows = torch.arange(config.qkv_width).view(config.n_head, 3, config.head_dim)
    order = half_split(config)
    query, key, value = rows.unbind(dim=1)
    return {"qkv": torch.cat((query[:, order], key[:, order], value)).flatten()}


def turning_first(config: GPTConfig) -> Rows:
    """LitGPT: all queries, all keys, all values; the turning channels of a head come first."""
    rows = torch.arange(config.qkv_width).view(-1, config.head_dim)  # (H + 2K, D)
    order, turned = half_split(config), config.n_head + config.n_kv_head
    norm = torch.tensor(order)
    qkv = torch.cat((rows[:turned, order], rows[turned:])).flatten()
    return {"qkv": qkv, "query_norm": norm, "key_norm": norm}


def group_by_group(config: GPTConfig) -> Rows:
    """LitGPT before 0.5: the queries of a group, its key and its value, in turn."""
    per_group = config.n_head // config.n_kv_head
    rows = torch.arange(config.qkv_width).view(config.n_kv_head, per_group + 2, config.head_dim)
    apart = torch.cat([part.flatten() for part in rows.split([per_group, 1, 1], dim=1)])
    turning = turning_first(config)
    return {**turning, "qkv": apart[turning["qkv"]]}


def neighbours_turn(config: GPTConfig) -> Rows:
    """llama.cpp's "llama": channels 2i and 2i + 1 of a head turn together."""
    rows = torch.arange(config.qkv_width).view(-1, config.head_dim)
    turned = config.n_head + config.n_kv_head
    pairs = rows.view(len(rows), -1, 2).transpose(1, 2).reshape(rows.shape)
    return {"qkv": torch.cat((pairs[:turned], rows[turned:])).flatten()}


def half_split(config: GPTConfig) -> list[int]:
    """For each channel of a head here its number there, if the `rotary_dim` channels that turn come
    first there, as two halves: here the first halves of turning and resting channels come first."""
    turning = config.rotary_dim // 2
    resting = (config.head_dim - config.rotary_dim) // 2
    ends = config.rotary_dim + resting
    first = [*range(turning), *range(config.rotary_dim, ends)]
    return [*first, *range(turning, config.rotary_dim), *range(ends, config.head_dim)]


GPT2 = Layout(
    outside={EMBEDDING: "wte", POSITIONS: "wpe", "final_norm": "ln_f"},
    inside={
        "attention_norm": ("ln_1",),
        "qkv": ("attn.c_attn",),
        "attention_out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp_up": ("mlp.c_fc",),
        "mlp_down": ("mlp.c_proj",),
    },
    layer="h.{N}.",
    prefixes=("", "transformer."),
    transposed=True,
)
NANOGPT = replace(GPT2, prefixes=("transformer.",), transposed=False)
LLAMA = Layout(
    outside={EMBEDDING: "embed_tokens", "final_norm": "norm"},
    inside={
        "attention_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "query_norm": ("self_attn.q_norm",),
        "key_norm": ("self_attn.k_norm",),
        "attention_out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp_down": ("mlp.down_proj",),
    },
    layer="layers.{N}.",
    prefixes=("", "model."),
)
NEOX = Layout(
    outside={EMBEDDING: "embed_in", "final_norm": "final_layer_norm"},
    inside={
        "attention_norm": ("input_layernorm",),
        "qkv": ("attention.query_key_value",),
        "attention_out": ("attention.dense",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp_up": ("mlp.dense_h_to_4h",),
        "mlp_down": ("mlp.dense_4h_to_h",),
    },
    layer="layers.{N}.",
    prefixes=("", "gpt_neox."),
    heads=("embed_out", "lm_head"),
    rows=head_by_head,
)
OPT = Layout(
    outside={
        EMBEDDING: "embed_tokens",
        POSITIONS: "embed_positions",
        "final_norm": "final_layer_norm",
    },
    inside={
        "attention_norm": ("self_attn_layer_norm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention_out": ("self_attn.out_proj",),
        "mlp_norm": ("final_layer_norm",),
        "mlp_up": ("fc1",),
        "mlp_down": ("fc2",),
    },
    layer="layers.{N}.",
    prefixes=("", "decoder.", "model.decoder."),
    skipped={POSITIONS: 2},  # rows that fairseq counted for the padding
)
LITGPT = Layout(
    outside={EMBEDDING: "transformer.wte", "final_norm": "transformer.ln_f"},
    inside={
        "attention_norm": ("norm_1",),
        "qkv": ("attn.qkv",),
        "query_norm": ("attn.norm_q",),
        "key_norm": ("attn.norm_k",),
        "attention_out": ("attn.proj",),
        "mlp_norm": ("norm_2",),
        "mlp_up": ("mlp.fc",),
        "mlp_down": ("mlp.proj",),
    },
    layer="transformer.h.{N}.",
    rows=turning_first,
)
GGUF_GPT2 = Layout(
    outside={EMBEDDING: "token_embd", POSITIONS: "position_embd", "final_norm": "output_norm"},
    inside={
        "attention_norm": ("attn_norm",),
        "qkv": ("attn_qkv",),
        "attention_out": ("attn_output",),
        "mlp_norm": ("ffn_norm",),
        "mlp_up": ("ffn_up",),
        "mlp_down": ("ffn_down",),
    },
    layer="blk.{N}.",
    heads=("output",),
)
GGUF_LLAMA = Layout(
    outside={EMBEDDING: "token_embd", "final_norm": "output_norm"},
    inside={
        **GGUF_GPT2.inside,
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "query_norm": ("attn_q_norm",),
        "key_norm": ("attn_k_norm",),
        "mlp_up": ("ffn_gate", "ffn_up"),
    },
    layer="blk.{N}.",
    heads=("output",),
    rows=neighbours_turn,
)
GGUF_QWEN = replace(GGUF_LLAMA, rows=lambda config: {})
