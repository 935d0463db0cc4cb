"""Textbook models as files: the computation of each, and the roles of its tensors.

`SCHEMES` is written by hand and is the tests' answer key.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tests.model.convert.by_role.scheme import Scheme
from tests.model.convert.by_role.textbook.common import HEADS
from tests.model.convert.by_role.textbook.lecture import Lecture
from tests.model.convert.by_role.textbook.nanogpt import Nano, NanoConfig
from tests.model.convert.by_role.textbook.torch_layers import EncoderStack, Multihead


def first(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits of a model whose `forward` returns logits and a loss."""
    return model(ids)[0]


MASKS = frozenset({"blocks.0.sa.tril", "blocks.1.sa.tril"})

NANO = """
token_embedding  transformer.wte.weight
positions        transformer.wpe.weight
attention_norm   transformer.h.{N}.ln_1.(weight|bias)
qkv              transformer.h.{N}.attn.c_attn.(weight|bias)
attention_out    transformer.h.{N}.attn.c_proj.(weight|bias)
mlp_norm         transformer.h.{N}.ln_2.(weight|bias)
mlp_up           transformer.h.{N}.mlp.c_fc.(weight|bias)
mlp_down         transformer.h.{N}.mlp.c_proj.(weight|bias)
final_norm       transformer.ln_f.(weight|bias)
head             lm_head.weight
"""

LECTURE = """
token_embedding  token_embedding_table.weight
positions        position_embedding_table.weight
attention_norm   blocks.{N}.ln1.(weight|bias)
query            blocks.{N}.sa.heads.{M}.query.weight
key              blocks.{N}.sa.heads.{M}.key.weight
value            blocks.{N}.sa.heads.{M}.value.weight
attention_out    blocks.{N}.sa.proj.(weight|bias)
mlp_norm         blocks.{N}.ln2.(weight|bias)
mlp_up           blocks.{N}.ffwd.net.0.(weight|bias)
mlp_down         blocks.{N}.ffwd.net.2.(weight|bias)
final_norm       ln_f.(weight|bias)
head             lm_head.(weight|bias)
"""

PROJ = """
token_embedding  embed_tokens.weight
attention_norm   layers.{N}.input_layernorm.weight
query            layers.{N}.self_attn.q_proj.(weight|bias)
key              layers.{N}.self_attn.k_proj.(weight|bias)
value            layers.{N}.self_attn.v_proj.(weight|bias)
attention_out    layers.{N}.self_attn.o_proj.weight
mlp_norm         layers.{N}.post_attention_layernorm.weight
mlp_gate         layers.{N}.mlp.gate_proj.weight
mlp_up           layers.{N}.mlp.up_proj.weight
mlp_down         layers.{N}.mlp.down_proj.weight
final_norm       norm.weight
head             lm_head.weight
"""

PROJ_AND_NORMS = (
    f"{PROJ}query_norm layers.{{N}}.self_attn.q_norm.weight\n"
    "key_norm layers.{N}.self_attn.k_norm.weight\n"
)

TORCH = """
token_embedding  embedding.weight
attention_norm   transformer_encoder.layers.{N}.norm1.(weight|bias)
qkv              transformer_encoder.layers.{N}.self_attn.in_proj_(weight|bias)
attention_out    transformer_encoder.layers.{N}.self_attn.out_proj.(weight|bias)
mlp_norm         transformer_encoder.layers.{N}.norm2.(weight|bias)
mlp_up           transformer_encoder.layers.{N}.linear1.(weight|bias)
mlp_down         transformer_encoder.layers.{N}.linear2.(weight|bias)
head             fc_out.(weight|bias)
"""

MULTIHEAD = """
token_embedding  token_embed.weight
qkv              transformer_blocks.{N}.attn.in_proj_(weight|bias)
attention_out    transformer_blocks.{N}.attn.out_proj.(weight|bias)
attention_norm   transformer_blocks.{N}.ln1.(weight|bias)
mlp_up           transformer_blocks.{N}.ff.0.(weight|bias)
mlp_down         transformer_blocks.{N}.ff.2.(weight|bias)
mlp_norm         transformer_blocks.{N}.ln2.(weight|bias)
head             lm_head.(weight|bias)
"""

HEAD_BY_HEAD = """
token_embedding  embed_in.weight
positions        embed_pos.weight
attention_norm   layers.{N}.input_layernorm.(weight|bias)
qkv              layers.{N}.attention.query_key_value.(weight|bias)
attention_out    layers.{N}.attention.dense.(weight|bias)
mlp_norm         layers.{N}.post_attention_layernorm.(weight|bias)
mlp_up           layers.{N}.mlp.dense_h_to_4h.(weight|bias)
mlp_down         layers.{N}.mlp.dense_4h_to_h.(weight|bias)
final_norm       final_layer_norm.(weight|bias)
head             embed_out.weight
"""

POST = """
token_embedding  token_emb.emb_matrix.weight
positions        pos_emb.emb_matrix.weight
attention_norm   blocks.{N}.ln1.(weight|bias)
query            blocks.{N}.attn.W_q.(weight|bias)
key              blocks.{N}.attn.W_k.(weight|bias)
value            blocks.{N}.attn.W_v.(weight|bias)
attention_out    blocks.{N}.attn.W_o.(weight|bias)
mlp_norm         blocks.{N}.ln2.(weight|bias)
mlp_up           blocks.{N}.ff.net.0.(weight|bias)
mlp_down         blocks.{N}.ff.net.2.(weight|bias)
final_norm       ln_final.(weight|bias)
head             head.weight
"""

ONE_HEAD = """
token_embedding  token_emb.weight
positions        pos_emb.weight
attention_norm   blocks.{N}.ln1.(weight|bias)
query            blocks.{N}.sa.query.weight
key              blocks.{N}.sa.key.weight
value            blocks.{N}.sa.value.weight
attention_out    identity
mlp_norm         blocks.{N}.ln2.(weight|bias)
mlp_up           blocks.{N}.ff.0.(weight|bias)
final_norm       ln_f.(weight|bias)
head             head.(weight|bias)
"""

GLU = """
token_embedding  tok.weight
attention_norm   layers.{N}.rmsnorm1.weight
qkv              layers.{N}.attn.qkv.weight
attention_out    layers.{N}.attn.proj.weight
mlp_norm         layers.{N}.rmsnorm2.weight
mlp_gate_up      layers.{N}.ffn.w12.(weight|bias)
mlp_down         layers.{N}.ffn.w3.(weight|bias)
final_norm       rmsnorm_f.weight
head             head.weight
"""

ROTARY: Mapping[str, Any] = {
    "norm": "rmsnorm", "norm_eps": 1e-6, "positions": "rotary", "rope_theta": 5_000.0,
    "activation": "swiglu", "qk_norm_eps": 1e-6,
}  # fmt: skip

GROUPED: Mapping[str, Any] = {"hidden": 48, "kv_heads": 2}

SCHEMES: Mapping[str, Scheme] = {
    "book": Scheme(
        hidden=128,
        how={"activation": "gelu_tanh"},
        ignored=frozenset({"trf_blocks.0.att.mask", "trf_blocks.1.att.mask"}),
        roles="""
token_embedding  tok_emb.weight
positions        pos_emb.weight
attention_norm   trf_blocks.{N}.norm1.(scale|shift)
query            trf_blocks.{N}.att.W_query.weight
key              trf_blocks.{N}.att.W_key.weight
value            trf_blocks.{N}.att.W_value.weight
attention_out    trf_blocks.{N}.att.out_proj.(weight|bias)
mlp_norm         trf_blocks.{N}.norm2.(scale|shift)
mlp_up           trf_blocks.{N}.ff.layers.0.(weight|bias)
mlp_down         trf_blocks.{N}.ff.layers.2.(weight|bias)
final_norm       final_norm.(scale|shift)
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
        make=lambda: Nano(NanoConfig(), minimal=True),
        how={"activation": "gelu_tanh"},
        roles=NANO,
        logits=lambda model, ids: model(ids, ids)[0],
        ignored=frozenset({"transformer.h.0.attn.bias", "transformer.h.1.attn.bias"}),
    ),
    "llama2.c": Scheme(
        hidden=56,
        kv_heads=2,
        tied=True,
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
        how={"norm_position": "post", "final_norm": False, "activation": "relu"},
        heads=HEADS,
        roles="""
token_embedding  token_emb.emb_matrix.weight
positions        pos_emb.emb_matrix.weight
attention_norm   decoders.{N}.norm1.(weight|bias)
query            decoders.{N}.mh_attention.head_attentions.{M}.wq.(weight|bias)
key              decoders.{N}.mh_attention.head_attentions.{M}.wk.(weight|bias)
value            decoders.{N}.mh_attention.head_attentions.{M}.wv.(weight|bias)
attention_out    decoders.{N}.mh_attention.out.(weight|bias)
mlp_norm         decoders.{N}.norm2.(weight|bias)
mlp_up           decoders.{N}.ffn.ffn.0.(weight|bias)
mlp_down         decoders.{N}.ffn.ffn.2.(weight|bias)
head             linear.(weight|bias)
""",
    ),
    "fused, head by head": Scheme(
        how={"qkv_layout": "per_head"}, roles=HEAD_BY_HEAD
    ),
    "fused, keys first": Scheme(
        how={"qkv_layout": "kqv"}, roles=HEAD_BY_HEAD
    ),
    "llama, QK-norm": Scheme(
        **GROUPED,
        how={**ROTARY, "qk_norm": "learned"},
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles=PROJ_AND_NORMS,
    ),
    "llama, QK-norm, neighbors": Scheme(
        **GROUPED,
        how={**ROTARY, "qk_norm": "learned", "qk_norm_eps": 3e-2, "rotary_layout": "interleaved"},
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6, "qk_norm_eps": 3e-2},
        roles=PROJ_AND_NORMS,
    ),
    "llama, QK-norm, neighbors, backward": Scheme(
        **GROUPED,
        how={
            **ROTARY, "qk_norm": "learned", "rotary_layout": "interleaved",
            "rotary_direction": "backward",
        },
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles=PROJ_AND_NORMS,
    ),
    "modded-nanogpt": Scheme(
        how={
            **ROTARY, "qk_norm": "unit", "activation": "relu2", "rotary_direction": "backward",
        },
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles="""
token_embedding  transformer.wte.weight
query            transformer.h.{N}.attn.c_q.weight
key              transformer.h.{N}.attn.c_k.weight
value            transformer.h.{N}.attn.c_v.weight
attention_out    transformer.h.{N}.attn.c_proj.weight
mlp_up           transformer.h.{N}.mlp.c_fc.weight
mlp_down         transformer.h.{N}.mlp.c_proj.weight
head             lm_head.weight
""",
    ),
    "llama, QK-norm without weights": Scheme(
        **GROUPED,
        how={**ROTARY, "qk_norm": "unit", "qk_norm_eps": 3e-2, "rotary_layout": "interleaved"},
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6, "qk_norm_eps": 3e-2},
        roles=PROJ,
    ),
    "llama": Scheme(
        **GROUPED,
        how=ROTARY,
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles=PROJ,
    ),
    "llama, final norm without weights": Scheme(
        **GROUPED,
        how=ROTARY,
        settings={"rope_theta": 5_000.0, "rms_norm_eps": 1e-6},
        roles=PROJ.replace("final_norm       norm.weight\n", ""),
    ),
    "post-LN and a final norm": Scheme(
        how={"norm_position": "post", "activation": "relu"}, roles=POST
    ),
    "post-LN and an unused norm": Scheme(
        how={"norm_position": "post", "activation": "relu", "final_norm": False},
        roles=POST,
    ),
    "one wide head": Scheme(
        how={"activation": "relu", "n_head": 1},
        roles=ONE_HEAD + "mlp_down blocks.{N}.ff.2.(weight|bias)",
        ignored=MASKS,
    ),
    "no second matrix": Scheme(
        hidden=32,
        how={"activation": "relu", "n_head": 1},
        roles=ONE_HEAD + "mlp_down identity",
        ignored=MASKS,
    ),
    "one norm for both": Scheme(
        how={"residual": "parallel"},
        roles="""
token_embedding  wte.weight
positions        wpe.weight
attention_norm   h.{N}.ln.(weight|bias)
query            h.{N}.attn.W_q.(weight|bias)
key              h.{N}.attn.W_k.(weight|bias)
value            h.{N}.attn.W_v.(weight|bias)
attention_out    h.{N}.attn.W_o.(weight|bias)
mlp_norm         h.{N}.ln.(weight|bias)
mlp_up           h.{N}.fc_in.(weight|bias)
mlp_down         h.{N}.fc_out.(weight|bias)
final_norm       ln_f.(weight|bias)
head             lm_head.(weight|bias)
""",
    ),
    "matrices (in, out)": Scheme(
        hidden=128,
        how={"activation": "gelu_tanh"},
        transposed=frozenset({"qkv", "attention_out", "mlp_up", "mlp_down"}),
        roles="""
token_embedding  wte.weight
positions        wpe.weight
attention_norm   h.{N}.ln_1.(weight|bias)
qkv              h.{N}.attn.c_attn.(weight|bias)
attention_out    h.{N}.attn.c_proj.(weight|bias)
mlp_norm         h.{N}.ln_2.(weight|bias)
mlp_up           h.{N}.mlp.c_fc.(weight|bias)
mlp_down         h.{N}.mlp.c_proj.(weight|bias)
final_norm       ln_f.(weight|bias)
""",
    ),
    "raw parameters": Scheme(
        raw=True,
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
attention_norm   blocks.{N}.ln1.(w|b)
query            blocks.{N}.attn.(W|b)_Q
key              blocks.{N}.attn.(W|b)_K
value            blocks.{N}.attn.(W|b)_V
attention_out    blocks.{N}.attn.(W|b)_O
mlp_norm         blocks.{N}.ln2.(w|b)
mlp_up           blocks.{N}.mlp.(W|b)_in
mlp_down         blocks.{N}.mlp.(W|b)_out
final_norm       ln_final.(w|b)
head             unembed.(W|b)_U
""",
    ),
    "numbers from 1": Scheme(
        how={"activation": "gelu_tanh"},
        n_layer=3,
        first_layer=1,
        ignored=frozenset(f"block_{n}.att.mask" for n in (1, 2, 3)),
        roles="""
token_embedding  emb.weight
positions        pos.weight
attention_norm   block_{N}.norm1.(scale|shift)
query            block_{N}.att.W_query.(weight|bias)
key              block_{N}.att.W_key.(weight|bias)
value            block_{N}.att.W_value.(weight|bias)
attention_out    block_{N}.att.out_proj.(weight|bias)
mlp_norm         block_{N}.norm2.(scale|shift)
mlp_up           block_{N}.ff.layers.0.(weight|bias)
mlp_down         block_{N}.ff.layers.2.(weight|bias)
final_norm       norm.(scale|shift)
head             out.weight
""",
    ),
    "one block without a number": Scheme(
        n_layer=1,
        roles="""
token_embedding  token_embedding.weight
positions        position_embedding.weight
attention_norm   norm1.(weight|bias)
query            attention.W_q.(weight|bias)
key              attention.W_k.(weight|bias)
value            attention.W_v.(weight|bias)
attention_out    attention.W_o.(weight|bias)
mlp_norm         norm2.(weight|bias)
mlp_up           feed_forward.0.(weight|bias)
mlp_down         feed_forward.2.(weight|bias)
final_norm       final_norm.(weight|bias)
head             output.(weight|bias)
""",
    ),
    "a list for each kind of part": Scheme(
        roles="""
token_embedding  tok_emb.weight
positions        pos_emb.weight
attention_norm   attn_norms.{N}.(weight|bias)
query            attns.{N}.W_q.(weight|bias)
key              attns.{N}.W_k.(weight|bias)
value            attns.{N}.W_v.(weight|bias)
attention_out    attns.{N}.W_o.(weight|bias)
mlp_norm         mlp_norms.{N}.(weight|bias)
mlp_up           mlps.{N}.dense_h_to_4h.(weight|bias)
mlp_down         mlps.{N}.dense_4h_to_h.(weight|bias)
final_norm       ln_f.(weight|bias)
head             head.weight
""",
    ),
    "gate and up together, no positions": Scheme(
        hidden=40,
        how={
            "norm": "rmsnorm", "positions": "none", "activation": "swiglu",
            "score_scale": "none", "gate_order": "up_first",
        },
        roles=GLU,
    ),
}  # fmt: skip
