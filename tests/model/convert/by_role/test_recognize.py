"""Roles of tensors are recognized by name and shape, for the schemes of `textbook/` and for names
that combine the usual words for each part."""

import re
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.tensor_map import check
from logitd.model.convert.foreign import ConvertError
from tests.model.convert.by_role.scheme import Scheme, state
from tests.model.convert.by_role.schemes import SCHEMES

named = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


@named
def test_each_scheme_has_its_roles(scheme: Scheme) -> None:
    tensors = state(scheme.model())
    roles = recognize("model.pt", tensors)
    assert dict(roles.names) == scheme.names()
    assert (roles.n_layer, roles.first_layer, roles.n_head) == (
        scheme.n_layer, scheme.first_layer, scheme.heads,
    )  # fmt: skip
    assert set(roles.ignored) == scheme.ignored
    assert roles.transposed == scheme.transposed
    assert check("model.pt", tensors, roles) == torch.float32


@named
def test_unknown_tensor_is_named(scheme: Scheme) -> None:
    tensors = state(scheme.model())
    first = next(name for name in scheme.names().values() if "." in name)
    layers = next((name for name in scheme.names().values() if "{N}" in name), first)
    inside = (
        layers.partition("{N}")[0] + "{N}.gadget.weight" if "{N}" in layers else "gadget.weight"
    )
    numbers = range(scheme.first_layer, scheme.first_layer + scheme.n_layer)
    for extra in (
        {"gadget.weight": torch.ones(7, 5)},
        {"gadget.weight": torch.ones(11)},
        {inside.replace("{N}", str(number)): torch.ones(11) for number in numbers},
    ):
        with pytest.raises(ConvertError, match=r"gadget\.weight"):
            check("model.pt", tensors | extra, recognize("model.pt", tensors | extra))


IN_LAYERS = [
    name
    for name, scheme in SCHEMES.items()
    if scheme.n_layer > 1 and name != "a list for each kind of part"  # one of its lists is shorter
]


@pytest.mark.parametrize("name", IN_LAYERS)
def test_tensor_that_one_layer_lacks_is_named(name: str) -> None:
    scheme = SCHEMES[name]
    tensors = state(scheme.model())
    last = str(scheme.first_layer + scheme.n_layer - 1)
    for pattern in set(scheme.names().values()):
        if "{N}" not in pattern:
            continue
        lost = pattern.replace("{N}", last).replace("{M}", "1")
        less = {key: tensor for key, tensor in tensors.items() if key != lost}
        with pytest.raises(ConvertError, match=re.escape(lost)):
            check("model.pt", less, recognize("model.pt", less))


def test_model_without_a_token_embedding_is_refused() -> None:
    tensors = state(SCHEMES["matrices (in, out)"].model())
    del tensors["wte.weight"]
    with pytest.raises(ConvertError, match=r"no token embedding: .*found wpe\.weight \[16, 32\]"):
        recognize("model.pt", tensors)


# Names composed of synonyms.

EMBEDDINGS = (
    "wte", "tok_emb", "token_emb", "token_embed", "token_embedding", "token_embedding_table",
    "token_embeddings", "embed_tokens", "tok_embeddings", "embedding", "word_embeddings",
)  # fmt: skip
POSITIONS = ("wpe", "pos_emb", "position_embedding", "position_embedding_table", "pos_embeddings")
BLOCKS = ("h", "blocks", "layers", "trf_blocks", "transformer_blocks", "decoders", "model.layers")
ATTENTIONS = ("attn", "att", "attention", "sa", "mha", "mhsa", "self_attn", "mh_attention")
PROJECTIONS = (
    ("query", "key", "value"), ("W_q", "W_k", "W_v"), ("Wq", "Wk", "Wv"), ("wq", "wk", "wv"),
    ("W_query", "W_key", "W_value"), ("q_proj", "k_proj", "v_proj"), ("q", "k", "v"),
    ("query_layer", "key_layer", "value_layer"), ("to_q", "to_k", "to_v"),
)  # fmt: skip
OUTPUTS = (
    "proj", "c_proj", "out_proj", "projection", "W_o", "Wo", "wo", "o_proj", "out", "fc_out",
    "compute_output", "dense",
)  # fmt: skip
FEED_FORWARDS = ("mlp", "ff", "ffn", "ffwd", "ffnn", "feed_forward")
PAIRS = (
    ("c_fc", "c_proj"), ("fc1", "fc2"), ("linear1", "linear2"), ("w1", "w2"), ("up", "down"),
    ("up_proj", "down_proj"), ("lin_1", "lin_2"), ("first_linear_layer", "second_linear_layer"),
    ("net.0", "net.2"), ("0", "2"), ("layers.0", "layers.2"), ("fc_in", "fc_out"),
)  # fmt: skip
TRIPLES = (
    ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("W_gate", "W_up", "W_down"),
)  # fmt: skip
NORMS = (
    ("ln_1", "ln_2"), ("ln1", "ln2"), ("norm1", "norm2"), ("rmsnorm1", "rmsnorm2"),
    ("input_layernorm", "post_attention_layernorm"), ("attention_norm", "ffn_norm"),
    ("first_norm_layer", "second_norm_layer"), ("attn_norm", "mlp_norm"), ("norm_1", "norm_2"),
)  # fmt: skip
NORM_PARTS = (("weight", "bias"), ("gamma", "beta"), ("scale", "shift"))
FINALS = ("ln_f", "ln", "norm", "final_norm", "ln_final", "final_norm_layer", "norm_f")
HEADS = (
    "lm_head",
    "head",
    "out_head",
    "output",
    "linear",
    "vocab_projection",
    "embed_out",
    "unembed",
)


@dataclass(frozen=True)
class Spelling:
    """A state dict with one choice of words for the names, in a random order, and the roles of its
    tensors."""

    tensors: dict[str, Tensor]
    roles: dict[tuple[str, str], str]


@st.composite
def spellings(draw: st.DrawFn) -> Spelling:
    width, rows, hidden = 12, 17, 20
    block = draw(st.sampled_from(BLOCKS)) + ".{N}."
    attention = block + draw(st.sampled_from(ATTENTIONS)) + "."
    heads = draw(st.sampled_from([0, 3]))
    inner = attention + (
        f"{draw(st.sampled_from(('heads', 'attention_heads')))}.{{M}}." if heads else ""
    )
    biases = draw(st.booleans())
    norm_weight, norm_bias = draw(st.sampled_from(NORM_PARTS))
    roles: dict[tuple[str, str], str] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}

    def add(role: str, module: str, *shape: int, bias: bool = False) -> None:
        roles[role, "weight"], shapes[role, "weight"] = f"{module}.weight", shape
        if bias:
            roles[role, "bias"], shapes[role, "bias"] = f"{module}.bias", shape[:1]

    def add_norm(role: str, module: str) -> None:
        for part, name in (("weight", norm_weight), ("bias", norm_bias)):
            roles[role, part], shapes[role, part] = f"{module}.{name}", (width,)

    add("token_embedding", draw(st.sampled_from(EMBEDDINGS)), rows, width)
    if draw(st.booleans()):
        add("positions", draw(st.sampled_from(POSITIONS)), 9, width)
    for role, word in zip(
        ("query", "key", "value"), draw(st.sampled_from(PROJECTIONS)), strict=True
    ):
        add(role, inner + word, width // 3 if heads else width, width, bias=biases)
    add("attention_out", attention + draw(st.sampled_from(OUTPUTS)), width, width, bias=biases)
    feed_forward = block + draw(st.sampled_from(FEED_FORWARDS)) + "."
    if draw(st.booleans()):
        words = draw(st.sampled_from(TRIPLES))
        add("mlp_gate", feed_forward + words[0], hidden, width, bias=biases)
        add("mlp_up", feed_forward + words[1], hidden, width, bias=biases)
        add("mlp_down", feed_forward + words[2], width, hidden, bias=biases)
    else:
        up, down = draw(st.sampled_from(PAIRS))
        add("mlp_up", feed_forward + up, hidden, width, bias=biases)
        add("mlp_down", feed_forward + down, width, hidden, bias=biases)
    before_attention, before_mlp = draw(st.sampled_from(NORMS))
    add_norm("attention_norm", block + before_attention)
    add_norm("mlp_norm", block + before_mlp)
    if draw(st.booleans()):
        add_norm("final_norm", draw(st.sampled_from(FINALS)))
    if draw(st.booleans()):
        add("head", draw(st.sampled_from(HEADS)), rows, width, bias=draw(st.booleans()))
    prefix = draw(st.sampled_from(("", "transformer.", "backbone.", "gpt.decoder.")))
    roles = {key: prefix + name for key, name in roles.items()}
    tensors = {
        name.replace("{N}", str(layer)).replace("{M}", str(head)): torch.ones(shapes[key])
        for key, name in roles.items()
        for layer in range(3 if "{N}" in name else 1)
        for head in range(heads if "{M}" in name else 1)
    }
    return Spelling({name: tensors[name] for name in draw(st.permutations(list(tensors)))}, roles)


@given(spellings())
def test_roles_are_independent_of_words_and_order(spelling: Spelling) -> None:
    roles = recognize("model.pt", spelling.tensors)
    assert dict(roles.names) == spelling.roles
    assert roles.n_layer == 3
    assert roles.ignored == ()
    assert roles.transposed == frozenset()
