"""The textbook models as files: what each computes, and which of its tensors plays which role.

`SCHEMES` is written by hand from the classes of `textbook/`: the right answers of the tests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.convert.by_role.build import Built, build
from model.convert.by_role.computation import Computation
from model.convert.by_role.judge import open_gpt
from model.convert.by_role.questions import Finding, find
from model.convert.by_role.recognise import recognise
from model.convert.by_role.tensor_map import MappedTensors, check
from model.convert.state_file import StateFile
from tests.model.convert.by_role.textbook.book import BOOK, Book
from tests.model.convert.by_role.textbook.common import CONTEXT, HEADS, LAYERS, VOCAB, randomised
from tests.model.convert.by_role.textbook.heads import HeadByHead, OneHead, PerHeadPost
from tests.model.convert.by_role.textbook.lecture import Lecture
from tests.model.convert.by_role.textbook.llama import ProjLlama, TinyLlama
from tests.model.convert.by_role.textbook.matrices import Glu, Raw, Transposed
from tests.model.convert.by_role.textbook.nanogpt import Mini, Nano, NanoConfig
from tests.model.convert.by_role.textbook.norms import PostWithFinal, SharedNorm
from tests.model.convert.by_role.textbook.numbering import FromOne, Lists, NoNumber
from tests.model.convert.by_role.textbook.torch_layers import EncoderStack, Multihead

USUAL: Mapping[str, Any] = {
    "n_head": HEADS,
    "context_length": CONTEXT,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "norm_position": "pre",
    "final_norm": True,
    "residual": "sequential",
    "positions": "learned",
    "rotary_layout": "half",
    "rope_theta": 10_000.0,
    "activation": "gelu",
    "score_scale": "head_dim",
    "qkv_layout": "qkv",
    "gate_order": "gate_first",
    "qk_norm": "none",
    "qk_norm_eps": 1e-5,
    "embedding_scale": "one",
    "causal": True,
}
"""A `Computation` as most of them have it."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One textbook model.

    make        the model with initial weights
    how         where its computation differs from USUAL
    roles       a line for each role: the weight's name, and the bias's where it has one
    settings    what its file says beside the tensors, as it cannot be found by trying
    logits      how its forward is called for the logits of all positions
    """

    make: Callable[[], nn.Module]
    how: Mapping[str, Any] = field(default_factory=dict)
    roles: str
    n_layer: int = LAYERS
    first_layer: int = 0
    heads: int = 0
    transposed: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    logits: Callable[[nn.Module, Tensor], Tensor] = lambda model, ids: model(ids)

    def model(self, seed: int = 0) -> nn.Module:
        return randomised(self.make(), seed)

    @property
    def computation(self) -> Computation:
        return Computation(**{**USUAL, **self.how})

    def names(self) -> dict[tuple[str, str], str]:
        """Names by role and part."""
        names: dict[tuple[str, str], str] = {}
        for line in self.roles.strip().splitlines():
            role, *given = line.split()
            names |= {(role, part): name for part, name in zip(("weight", "bias"), given)}  # noqa: B905
        return names


def given_logits(scheme: Scheme, model: nn.Module, ids: Tensor) -> Tensor:
    """The textbook's logits (B, T, V) of ids (B, T)."""
    with torch.no_grad():
        return scheme.logits(model, ids)


def some_ids(rows: int = 3, length: int = CONTEXT, seed: int = 5) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def state(model: nn.Module) -> dict[str, Tensor]:
    """What `torch.save(model.state_dict())` holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def mapped(model: nn.Module, where: str = "model.pt") -> MappedTensors:
    """The tensors of a model by the roles that are recognised."""
    tensors = state(model)
    roles = recognise(where, tensors)
    check(where, tensors, roles)
    return MappedTensors(where, tensors, roles)


def findings(
    tensors: MappedTensors, settings: Mapping[str, Any] | None = None
) -> dict[str, Finding]:
    """What a file of these tensors and settings says."""
    ignored = {name: tensors.tensors[name] for name in tensors.map.ignored}
    return find(tensors, ignored, settings or {})


def state_file(
    model: nn.Module, path: Path = Path("model.pt"), settings: Mapping[str, Any] | None = None
) -> StateFile:
    return StateFile(path, str(path), state(model), None, settings or {})


def built_from(scheme: Scheme, model: nn.Module, **changes: Any) -> Built:
    """The model in this project's form, by the right computation or with `changes` to it."""
    how = Computation(**{**USUAL, **scheme.how, **changes})
    return build(mapped(model), how)


@torch.inference_mode()
def our_logits(built: Built, ids: Tensor) -> Tensor:
    return open_gpt(built)(ids).logits


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def first(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits from a forward that gives logits and a loss."""
    return model(ids)[0]


MASKS = frozenset({"blocks.0.sa.tril", "blocks.1.sa.tril"})

NANO = """
token_embedding  transformer.wte.weight
positions        transformer.wpe.weight
attention_norm   transformer.h.{N}.ln_1.weight        transformer.h.{N}.ln_1.bias
qkv              transformer.h.{N}.attn.c_attn.weight transformer.h.{N}.attn.c_attn.bias
attention_out    transformer.h.{N}.attn.c_proj.weight transformer.h.{N}.attn.c_proj.bias
mlp_norm         transformer.h.{N}.ln_2.weight        transformer.h.{N}.ln_2.bias
mlp_up           transformer.h.{N}.mlp.c_fc.weight    transformer.h.{N}.mlp.c_fc.bias
mlp_down         transformer.h.{N}.mlp.c_proj.weight  transformer.h.{N}.mlp.c_proj.bias
final_norm       transformer.ln_f.weight              transformer.ln_f.bias
head             lm_head.weight
"""

LECTURE = """
token_embedding  token_embedding_table.weight
positions        position_embedding_table.weight
attention_norm   blocks.{N}.ln1.weight   blocks.{N}.ln1.bias
query            blocks.{N}.sa.heads.{M}.query.weight
key              blocks.{N}.sa.heads.{M}.key.weight
value            blocks.{N}.sa.heads.{M}.value.weight
attention_out    blocks.{N}.sa.proj.weight blocks.{N}.sa.proj.bias
mlp_norm         blocks.{N}.ln2.weight   blocks.{N}.ln2.bias
mlp_up           blocks.{N}.ffwd.net.0.weight blocks.{N}.ffwd.net.0.bias
mlp_down         blocks.{N}.ffwd.net.2.weight blocks.{N}.ffwd.net.2.bias
final_norm       ln_f.weight ln_f.bias
head             lm_head.weight lm_head.bias
"""

PROJ = """
token_embedding  embed_tokens.weight
attention_norm   layers.{N}.input_layernorm.weight
query            layers.{N}.self_attn.q_proj.weight layers.{N}.self_attn.q_proj.bias
key              layers.{N}.self_attn.k_proj.weight layers.{N}.self_attn.k_proj.bias
value            layers.{N}.self_attn.v_proj.weight layers.{N}.self_attn.v_proj.bias
attention_out    layers.{N}.self_attn.o_proj.weight
mlp_norm         layers.{N}.post_attention_layernorm.weight
mlp_gate         layers.{N}.mlp.gate_proj.weight
mlp_up           layers.{N}.mlp.up_proj.weight
mlp_down         layers.{N}.mlp.down_proj.weight
final_norm       norm.weight
head             lm_head.weight
"""

TORCH = """
token_embedding  embedding.weight
attention_norm   transformer_encoder.layers.{N}.norm1.weight transformer_encoder.layers.{N}.norm1.bias
qkv              transformer_encoder.layers.{N}.self_attn.in_proj_weight transformer_encoder.layers.{N}.self_attn.in_proj_bias
attention_out    transformer_encoder.layers.{N}.self_attn.out_proj.weight transformer_encoder.layers.{N}.self_attn.out_proj.bias
mlp_norm         transformer_encoder.layers.{N}.norm2.weight transformer_encoder.layers.{N}.norm2.bias
mlp_up           transformer_encoder.layers.{N}.linear1.weight transformer_encoder.layers.{N}.linear1.bias
mlp_down         transformer_encoder.layers.{N}.linear2.weight transformer_encoder.layers.{N}.linear2.bias
head             fc_out.weight fc_out.bias
"""  # noqa: E501

MULTIHEAD = """
token_embedding  token_embed.weight
qkv              transformer_blocks.{N}.attn.in_proj_weight transformer_blocks.{N}.attn.in_proj_bias
attention_out    transformer_blocks.{N}.attn.out_proj.weight transformer_blocks.{N}.attn.out_proj.bias
attention_norm   transformer_blocks.{N}.ln1.weight transformer_blocks.{N}.ln1.bias
mlp_up           transformer_blocks.{N}.ff.0.weight transformer_blocks.{N}.ff.0.bias
mlp_down         transformer_blocks.{N}.ff.2.weight transformer_blocks.{N}.ff.2.bias
mlp_norm         transformer_blocks.{N}.ln2.weight transformer_blocks.{N}.ln2.bias
head             lm_head.weight lm_head.bias
"""  # noqa: E501

HEAD_BY_HEAD = """
token_embedding  embed_in.weight
positions        embed_pos.weight
attention_norm   layers.{N}.input_layernorm.weight layers.{N}.input_layernorm.bias
qkv              layers.{N}.attention.query_key_value.weight layers.{N}.attention.query_key_value.bias
attention_out    layers.{N}.attention.dense.weight layers.{N}.attention.dense.bias
mlp_norm         layers.{N}.post_attention_layernorm.weight layers.{N}.post_attention_layernorm.bias
mlp_up           layers.{N}.mlp.dense_h_to_4h.weight layers.{N}.mlp.dense_h_to_4h.bias
mlp_down         layers.{N}.mlp.dense_4h_to_h.weight layers.{N}.mlp.dense_4h_to_h.bias
final_norm       final_layer_norm.weight final_layer_norm.bias
head             embed_out.weight
"""  # noqa: E501

POST = """
token_embedding  token_emb.emb_matrix.weight
positions        pos_emb.emb_matrix.weight
attention_norm   blocks.{N}.ln1.weight blocks.{N}.ln1.bias
query            blocks.{N}.attn.W_q.weight blocks.{N}.attn.W_q.bias
key              blocks.{N}.attn.W_k.weight blocks.{N}.attn.W_k.bias
value            blocks.{N}.attn.W_v.weight blocks.{N}.attn.W_v.bias
attention_out    blocks.{N}.attn.W_o.weight blocks.{N}.attn.W_o.bias
mlp_norm         blocks.{N}.ln2.weight blocks.{N}.ln2.bias
mlp_up           blocks.{N}.ff.net.0.weight blocks.{N}.ff.net.0.bias
mlp_down         blocks.{N}.ff.net.2.weight blocks.{N}.ff.net.2.bias
final_norm       ln_final.weight ln_final.bias
head             head.weight
"""

ONE_HEAD = """
token_embedding  token_emb.weight
positions        pos_emb.weight
attention_norm   blocks.{N}.ln1.weight blocks.{N}.ln1.bias
query            blocks.{N}.sa.query.weight
key              blocks.{N}.sa.key.weight
value            blocks.{N}.sa.value.weight
attention_out    identity
mlp_norm         blocks.{N}.ln2.weight blocks.{N}.ln2.bias
mlp_up           blocks.{N}.ff.0.weight blocks.{N}.ff.0.bias
final_norm       ln_f.weight ln_f.bias
head             head.weight head.bias
"""

GLU = """
token_embedding  tok.weight
attention_norm   layers.{N}.rmsnorm1.weight
qkv              layers.{N}.attn.qkv.weight
attention_out    layers.{N}.attn.proj.weight
mlp_norm         layers.{N}.rmsnorm2.weight
mlp_gate_up      layers.{N}.ffn.w12.weight layers.{N}.ffn.w12.bias
mlp_down         layers.{N}.ffn.w3.weight layers.{N}.ffn.w3.bias
final_norm       rmsnorm_f.weight
head             head.weight
"""

ROTARY: Mapping[str, Any] = {
    "norm": "rmsnorm", "norm_eps": 1e-6, "positions": "rotary", "rope_theta": 5_000.0,
    "activation": "swiglu", "qk_norm_eps": 1e-6,
}  # fmt: skip

SCHEMES: Mapping[str, Scheme] = {
    "book": Scheme(
        make=lambda: Book(BOOK),
        how={"activation": "gelu_tanh"},
        ignored=frozenset({"trf_blocks.0.att.mask", "trf_blocks.1.att.mask"}),
        roles="""
token_embedding  tok_emb.weight
positions        pos_emb.weight
attention_norm   trf_blocks.{N}.norm1.scale trf_blocks.{N}.norm1.shift
query            trf_blocks.{N}.att.W_query.weight
key              trf_blocks.{N}.att.W_key.weight
value            trf_blocks.{N}.att.W_value.weight
attention_out    trf_blocks.{N}.att.out_proj.weight trf_blocks.{N}.att.out_proj.bias
mlp_norm         trf_blocks.{N}.norm2.scale trf_blocks.{N}.norm2.shift
mlp_up           trf_blocks.{N}.ff.layers.0.weight trf_blocks.{N}.ff.layers.0.bias
mlp_down         trf_blocks.{N}.ff.layers.2.weight trf_blocks.{N}.ff.layers.2.bias
final_norm       final_norm.scale final_norm.shift
head             out_head.weight
""",
    ),
    "lecture": Scheme(
        make=lambda: Lecture(whole_width=True),
        how={"activation": "relu", "score_scale": "d_model"},
        roles=LECTURE,
        heads=HEADS,
        ignored=frozenset(f"blocks.{n}.sa.heads.{m}.tril" for n in range(2) for m in range(4)),
        logits=first,
    ),
    "lecture, head_size": Scheme(
        make=lambda: Lecture(whole_width=False),
        how={"activation": "relu"},
        roles=LECTURE,
        heads=HEADS,
        ignored=frozenset(f"blocks.{n}.sa.heads.{m}.tril" for n in range(2) for m in range(4)),
        logits=first,
    ),
    "nanoGPT": Scheme(
        make=lambda: Nano(NanoConfig()),
        roles=NANO,
        logits=lambda model, ids: model(ids, ids)[0],
    ),
    "minGPT": Scheme(
        make=lambda: Mini(NanoConfig()),
        how={"activation": "gelu_tanh"},
        roles=NANO,
        ignored=frozenset({"transformer.h.0.attn.bias", "transformer.h.1.attn.bias"}),
    ),
    "llama2.c": Scheme(
        make=TinyLlama,
        how={**ROTARY, "norm_eps": 1e-5, "rope_theta": 10_000.0, "rotary_layout": "interleaved"},
        roles="""
token_embedding  tok_embeddings.weight
attention_norm   layers.{N}.attention_norm.weight
query            layers.{N}.attention.wq.weight
key              layers.{N}.attention.wk.weight
value            layers.{N}.attention.wv.weight
attention_out    layers.{N}.attention.wo.weight
mlp_norm         layers.{N}.ffn_norm.weight
mlp_gate         layers.{N}.feed_forward.w1.weight
mlp_up           layers.{N}.feed_forward.w3.weight
mlp_down         layers.{N}.feed_forward.w2.weight
final_norm       norm.weight
head             output.weight
""",
    ),
    "torch, post-LN": Scheme(
        make=lambda: EncoderStack(norm_first=False, kept=False),
        how={
            "norm_position": "post", "final_norm": False, "positions": "sinusoidal",
            "activation": "relu", "embedding_scale": "sqrt_d_model",
        },
        roles=TORCH,
    ),
    "torch, pre-LN": Scheme(
        make=lambda: EncoderStack(norm_first=True, kept=True, activation="gelu"),
        how={"final_norm": False, "embedding_scale": "sqrt_d_model"},
        roles=TORCH + "positions pos_encoder.pe",
    ),
    "MultiheadAttention": Scheme(
        make=Multihead,
        how={
            "norm_position": "post", "final_norm": False, "positions": "sinusoidal",
            "activation": "relu",
        },
        roles=MULTIHEAD,
    ),
    "sines, then cosines": Scheme(
        make=lambda: Multihead(halves=True),
        how={
            "norm_position": "post", "final_norm": False, "positions": "sinusoidal_halves",
            "activation": "relu",
        },
        roles=MULTIHEAD,
    ),
    "heads with biases": Scheme(
        make=PerHeadPost,
        how={"norm_position": "post", "final_norm": False, "activation": "relu"},
        heads=HEADS,
        roles="""
token_embedding  token_emb.emb_matrix.weight
positions        pos_emb.emb_matrix.weight
attention_norm   decoders.{N}.norm1.weight decoders.{N}.norm1.bias
query            decoders.{N}.mh_attention.head_attentions.{M}.wq.weight decoders.{N}.mh_attention.head_attentions.{M}.wq.bias
key              decoders.{N}.mh_attention.head_attentions.{M}.wk.weight decoders.{N}.mh_attention.head_attentions.{M}.wk.bias
value            decoders.{N}.mh_attention.head_attentions.{M}.wv.weight decoders.{N}.mh_attention.head_attentions.{M}.wv.bias
attention_out    decoders.{N}.mh_attention.out.weight decoders.{N}.mh_attention.out.bias
mlp_norm         decoders.{N}.norm2.weight decoders.{N}.norm2.bias
mlp_up           decoders.{N}.ffn.ffn.0.weight decoders.{N}.ffn.ffn.0.bias
mlp_down         decoders.{N}.ffn.ffn.2.weight decoders.{N}.ffn.ffn.2.bias
head             linear.weight linear.bias
""",  # noqa: E501
    ),
    "fused, head by head": Scheme(
        make=HeadByHead, how={"qkv_layout": "per_head"}, roles=HEAD_BY_HEAD
    ),
    "fused, keys first": Scheme(
        make=lambda: HeadByHead("keys first"), how={"qkv_layout": "kqv"}, roles=HEAD_BY_HEAD
    ),
    "llama, QK-norm": Scheme(
        make=ProjLlama,
        how={**ROTARY, "qk_norm": "learned"},
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles=PROJ
        + "query_norm layers.{N}.self_attn.q_norm.weight\n"
        + "key_norm layers.{N}.self_attn.k_norm.weight",
    ),
    "llama, QK-norm, neighbours": Scheme(
        make=lambda: ProjLlama("learned", 3e-2, neighbours=True),
        how={**ROTARY, "qk_norm": "learned", "qk_norm_eps": 3e-2, "rotary_layout": "interleaved"},
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6, "qk_norm_eps": 3e-2},
        roles=PROJ
        + "query_norm layers.{N}.self_attn.q_norm.weight\n"
        + "key_norm layers.{N}.self_attn.k_norm.weight",
    ),
    "llama, QK-norm without weights": Scheme(
        make=lambda: ProjLlama("unit", 3e-2, neighbours=True),
        how={**ROTARY, "qk_norm": "unit", "qk_norm_eps": 3e-2, "rotary_layout": "interleaved"},
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6, "qk_norm_eps": 3e-2},
        roles=PROJ,
    ),
    "llama": Scheme(
        make=lambda: ProjLlama("none"),
        how=ROTARY,
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles=PROJ,
    ),
    "post-LN and a final norm": Scheme(
        make=PostWithFinal, how={"norm_position": "post", "activation": "relu"}, roles=POST
    ),
    "post-LN and an unused norm": Scheme(
        make=lambda: PostWithFinal(applied=False),
        how={"norm_position": "post", "activation": "relu", "final_norm": False},
        roles=POST,
    ),
    "one wide head": Scheme(
        make=OneHead,
        how={"activation": "relu", "n_head": 1},
        roles=ONE_HEAD + "mlp_down blocks.{N}.ff.2.weight blocks.{N}.ff.2.bias",
        ignored=MASKS,
    ),
    "no second matrix": Scheme(
        make=lambda: OneHead(second=False),
        how={"activation": "relu", "n_head": 1},
        roles=ONE_HEAD + "mlp_down identity",
        ignored=MASKS,
    ),
    "one norm for both": Scheme(
        make=SharedNorm,
        how={"residual": "parallel"},
        roles="""
token_embedding  wte.weight
positions        wpe.weight
attention_norm   h.{N}.ln.weight h.{N}.ln.bias
query            h.{N}.attn.W_q.weight h.{N}.attn.W_q.bias
key              h.{N}.attn.W_k.weight h.{N}.attn.W_k.bias
value            h.{N}.attn.W_v.weight h.{N}.attn.W_v.bias
attention_out    h.{N}.attn.W_o.weight h.{N}.attn.W_o.bias
mlp_norm         h.{N}.ln.weight h.{N}.ln.bias
mlp_up           h.{N}.fc_in.weight h.{N}.fc_in.bias
mlp_down         h.{N}.fc_out.weight h.{N}.fc_out.bias
final_norm       ln_f.weight ln_f.bias
head             lm_head.weight lm_head.bias
""",
    ),
    "matrices (in, out)": Scheme(
        make=Transposed,
        how={"activation": "gelu_tanh"},
        transposed=frozenset({"qkv", "attention_out", "mlp_up", "mlp_down"}),
        roles="""
token_embedding  wte.weight
positions        wpe.weight
attention_norm   h.{N}.ln_1.weight        h.{N}.ln_1.bias
qkv              h.{N}.attn.c_attn.weight h.{N}.attn.c_attn.bias
attention_out    h.{N}.attn.c_proj.weight h.{N}.attn.c_proj.bias
mlp_norm         h.{N}.ln_2.weight        h.{N}.ln_2.bias
mlp_up           h.{N}.mlp.c_fc.weight    h.{N}.mlp.c_fc.bias
mlp_down         h.{N}.mlp.c_proj.weight  h.{N}.mlp.c_proj.bias
final_norm       ln_f.weight              ln_f.bias
""",
    ),
    "raw parameters": Scheme(
        make=Raw,
        how={"activation": "gelu_tanh"},
        transposed=frozenset(
            {"query", "key", "value", "attention_out", "mlp_up", "mlp_down", "head"}
        ),
        ignored=frozenset(
            f"blocks.{n}.attn.{name}" for n in range(2) for name in ("mask", "IGNORE")
        ),
        roles="""
token_embedding  embed.W_E
positions        pos_embed.W_pos
attention_norm   blocks.{N}.ln1.w blocks.{N}.ln1.b
query            blocks.{N}.attn.W_Q blocks.{N}.attn.b_Q
key              blocks.{N}.attn.W_K blocks.{N}.attn.b_K
value            blocks.{N}.attn.W_V blocks.{N}.attn.b_V
attention_out    blocks.{N}.attn.W_O blocks.{N}.attn.b_O
mlp_norm         blocks.{N}.ln2.w blocks.{N}.ln2.b
mlp_up           blocks.{N}.mlp.W_in blocks.{N}.mlp.b_in
mlp_down         blocks.{N}.mlp.W_out blocks.{N}.mlp.b_out
final_norm       ln_final.w ln_final.b
head             unembed.W_U unembed.b_U
""",
    ),
    "numbers from 1": Scheme(
        make=FromOne,
        how={"activation": "gelu_tanh"},
        n_layer=3,
        first_layer=1,
        ignored=frozenset(f"block_{n}.att.mask" for n in (1, 2, 3)),
        roles="""
token_embedding  emb.weight
positions        pos.weight
attention_norm   block_{N}.norm1.scale block_{N}.norm1.shift
query            block_{N}.att.W_query.weight block_{N}.att.W_query.bias
key              block_{N}.att.W_key.weight block_{N}.att.W_key.bias
value            block_{N}.att.W_value.weight block_{N}.att.W_value.bias
attention_out    block_{N}.att.out_proj.weight block_{N}.att.out_proj.bias
mlp_norm         block_{N}.norm2.scale block_{N}.norm2.shift
mlp_up           block_{N}.ff.layers.0.weight block_{N}.ff.layers.0.bias
mlp_down         block_{N}.ff.layers.2.weight block_{N}.ff.layers.2.bias
final_norm       norm.scale norm.shift
head             out.weight
""",
    ),
    "one block without a number": Scheme(
        make=NoNumber,
        n_layer=1,
        roles="""
token_embedding  token_embedding.weight
positions        position_embedding.weight
attention_norm   norm1.weight norm1.bias
query            attention.W_q.weight attention.W_q.bias
key              attention.W_k.weight attention.W_k.bias
value            attention.W_v.weight attention.W_v.bias
attention_out    attention.W_o.weight attention.W_o.bias
mlp_norm         norm2.weight norm2.bias
mlp_up           feed_forward.0.weight feed_forward.0.bias
mlp_down         feed_forward.2.weight feed_forward.2.bias
final_norm       final_norm.weight final_norm.bias
head             output.weight output.bias
""",
    ),
    "a list for each kind of part": Scheme(
        make=Lists,
        roles="""
token_embedding  tok_emb.weight
positions        pos_emb.weight
attention_norm   attn_norms.{N}.weight attn_norms.{N}.bias
query            attns.{N}.W_q.weight attns.{N}.W_q.bias
key              attns.{N}.W_k.weight attns.{N}.W_k.bias
value            attns.{N}.W_v.weight attns.{N}.W_v.bias
attention_out    attns.{N}.W_o.weight attns.{N}.W_o.bias
mlp_norm         mlp_norms.{N}.weight mlp_norms.{N}.bias
mlp_up           mlps.{N}.dense_h_to_4h.weight mlps.{N}.dense_h_to_4h.bias
mlp_down         mlps.{N}.dense_4h_to_h.weight mlps.{N}.dense_4h_to_h.bias
final_norm       ln_f.weight ln_f.bias
head             head.weight
""",
    ),
    "gate and up together, no positions": Scheme(
        make=lambda: Glu(gate_first=False),
        how={
            "norm": "rmsnorm", "positions": "none", "activation": "swiglu",
            "score_scale": "none", "gate_order": "up_first",
        },
        roles=GLU,
    ),
}  # fmt: skip
