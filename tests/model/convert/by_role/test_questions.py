"""Questions: a setting that is not understood, or that contradicts the tensors, is not assumed."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitd.model.convert.by_role.finding import CONVENTION, UNUSED, Finding
from logitd.model.convert.by_role.questions import find
from logitd.model.convert.by_role.read import RoleOptions, recognize_file
from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.stated import states_rms
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.state_file import StateFile
from tests.model.convert.by_role.scheme import findings, mapped, state, state_file
from tests.model.convert.by_role.schemes import SCHEMES


def finding(name: str, field: str, **settings: Any) -> Finding:
    return findings(mapped(SCHEMES[name].model()), settings)[field]


def of_tensors(tensors: dict[str, Tensor], **settings: Any) -> dict[str, Finding]:
    return dict(find(MappedTensors("m.pt", tensors, recognize("m.pt", tensors)), {}, settings))


@pytest.mark.parametrize(
    ("name", "field", "settings", "value"),
    [
        ("llama", "norm_eps", {"norm_eps": "1e-3"}, 1e-3),
        ("llama", "rope_theta", {"rope_theta": "5e5"}, 5e5),
        ("llama", "qk_norm_eps", {"qk_norm_eps": "1e-3"}, 1e-3),
        ("llama", "qk_norm", {"qk_norm": 1}, "unit"),
        ("llama", "qk_norm", {"qk_norm": "rms"}, "unit"),
        ("llama", "qk_norm", {"qk_norm": False}, "none"),
        ("llama", "qk_norm", {"qk_norm_type": "rms"}, "unit"),
        ("llama", "qk_norm", {"query_key_norm": "rmsnorm"}, "unit"),
        ("llama", "qk_norm", {"qk_norm": False, "qk_norm_type": "rms"}, "none"),
        ("llama", "qk_norm", {"use_qk_norm": "none"}, "none"),
        ("llama", "norm_eps", {"eps": 1e-3}, 1e-3),
        ("llama", "positions", {"use_rope": True}, "rotary"),
        ("nanoGPT", "positions", {"use_rope": False, "rope_theta": 1e4}, "learned"),
        ("llama", "activation", {"use_swiglu": True}, "swiglu"),
        ("nanoGPT", "norm_position", {"use_pre_norm": True}, "pre"),
        ("llama", "norm_eps", {"norm_eps": "1e-5", "rms_norm_eps": 1e-5, "eps": 1e-8}, 1e-5),
    ],
)
def test_setting_is_understood(name: str, field: str, settings: dict[str, Any], value: Any) -> None:
    """The texts were dropped: YAML's 1e-5 is one."""
    found = finding(name, field, **settings)
    assert (found.values, found.ambiguous) == ((value,), False)


@pytest.mark.parametrize(
    ("name", "field", "settings"),
    [
        ("llama", "norm_eps", {"norm_eps": "small"}),
        ("llama", "norm_eps", {"norm_eps": 0}),
        ("llama", "norm_eps", {"eps": 1e-8, "lr": 3e-4}),
        ("llama", "rope_theta", {"rope_theta": -1.0}),
        ("llama", "qk_norm", {"qk_norm": "l2"}),
        ("llama", "qk_norm", {"qk_norm_kind": "l2"}),
        ("llama", "qk_norm", {"qk_layernorm": True}),
        ("llama", "n_head", {"n_head": 4, "head_dim": 16}),
        ("llama", "n_head", {"n_head": 4, "n_kv_head": 4}),
        ("llama", "n_head", {"n_head": 5}),
        ("llama", "positions", {"rope_theta": 1e4, "pos_encoding": "sinusoidal"}),
        ("llama", "positions", {"rope_theta": 0}),
        ("llama", "positions", {"use_rope": False}),
        ("llama", "positions", {"rope": True, "pos_encoding": "sinusoidal"}),
        ("nanoGPT", "positions", {"use_rope": True}),
        ("nanoGPT", "positions", {"max_position_embeddings": 14}),
        ("llama", "activation", {"swiglu": False}),
        ("nanoGPT", "activation", {"swiglu": True}),
        ("llama", "n_head", {"n_head": 4, "num_heads": 8}),
        ("nanoGPT", "activation", {"activation": "relu", "hidden_act": "gelu"}),
        ("llama", "norm_eps", {"norm_eps": 1e-5, "rms_norm_eps": "1e-6"}),
        ("nanoGPT", "positions", {"rope_theta": 1e4}),
        ("nanoGPT", "norm", {"norm_type": "rmsnorm"}),
        ("llama, QK-norm", "qk_norm", {}),
        ("llama, QK-norm", "qk_norm", {"rms_norm_eps": 1e-6, "qk_norm": False}),
    ],
)
def test_unclear_setting_is_a_question(name: str, field: str, settings: dict[str, Any]) -> None:
    assert finding(name, field, **settings).ambiguous


@pytest.mark.parametrize(
    ("settings", "rms"),
    [
        ({"use_rms_norm": 0}, False),
        ({"qk_norm": "rms"}, False),
        ({"grad_rms": 0.3}, False),
        ({"comment": "not an rms norm"}, False),
        ({"norm_type": "layernorm", "rms_norm_eps": 1e-6}, False),
        ({"use_rms_norm": 1}, True),
        ({"norm": "rms"}, True),
        ({"use_rmsnorm": True}, True),
        ({"rms_norm_eps": 1e-6}, True),
    ],
)
def test_only_settings_about_norms_state_the_norm(settings: dict[str, Any], rms: bool) -> None:
    assert states_rms(settings) is rms


def test_text_that_contains_alibi_is_no_position() -> None:
    """The import was refused."""
    assert finding("llama", "positions", run="runs/no-alibi-2").ambiguous
    with pytest.raises(ConvertError, match="pos is 'alibi'"):
        finding("llama", "positions", pos="alibi")


@pytest.mark.parametrize("text", ["rope", "rotary", "relative_key", "none"])
def test_text_that_contradicts_a_table_of_positions_is_a_question(text: str) -> None:
    """The table was added."""
    found = finding("nanoGPT", "positions", pos_encoding=text)
    assert found.ambiguous
    assert {"learned", "rotary", "none"} <= set(found.values)
    assert f"pos_encoding is '{text}'" in found.origin
    with pytest.raises(ConvertError, match="position_type is 'alibi'"):
        finding("nanoGPT", "positions", position_type="alibi")


@pytest.mark.parametrize("text", ["learned", "learnable", "absolute", "sinusoidal"])
def test_text_that_agrees_with_a_table_of_positions_is_no_question(text: str) -> None:
    assert finding("nanoGPT", "positions", pos_encoding=text, use_rope=False).resolved


def test_other_number_of_layers_is_refused() -> None:
    """A model that uses each layer twice was computed with each layer once."""
    with pytest.raises(ConvertError, match=r"num_layers .* is 4, but the tensors have 2 layers"):
        finding("nanoGPT", "n_head", num_layers=4)


def test_stated_tie_that_the_tensors_contradict_is_refused() -> None:
    finding("nanoGPT", "n_head", tie_weights=True)
    finding("book", "n_head", tie_weights=False)
    with pytest.raises(ConvertError, match=r"tie_weights .* is true, but .* a head that differs"):
        finding("book", "n_head", tie_weights=True)
    with pytest.raises(ConvertError, match=r"tie_word_embeddings .* is false, but .* no head"):
        finding("matrices (in, out)", "n_head", tie_word_embeddings=False)


@pytest.mark.parametrize("lost", ["q_norm", "k_norm"])
def test_norm_of_only_queries_or_keys_is_refused(lost: str) -> None:
    """A norm of keys alone was dropped."""
    tensors = state(SCHEMES["llama, QK-norm"].model())
    tensors = {name: tensor for name, tensor in tensors.items() if lost not in name}
    with pytest.raises(ConvertError, match=r"norm\.weight is a norm of only queries or only keys"):
        of_tensors(tensors)


@pytest.mark.parametrize("name", ["segments.weight", "relative_position.weight"])
def test_table_that_no_name_calls_positions_is_a_question(name: str) -> None:
    tensors = state(SCHEMES["llama"].model()) | {name: torch.rand(2, 32)}
    found = of_tensors(tensors)["positions"]
    assert found.ambiguous
    assert {"learned", "rotary", "none"} <= set(found.values)


def test_flag_answers_contradicting_heads() -> None:
    """The message named --n-head, which had no effect."""
    file = state_file(SCHEMES["nanoGPT"].model(), settings={"n_head": 5})
    recognized = recognize_file(file, RoleOptions(answers={"n_head": 4}))
    assert recognized.findings["n_head"].values == (4,)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("class_weights", torch.rand(29)),
        ("word_embedding_norm.weight", torch.rand(32)),
        ("norm_in.weight", torch.rand(32)),
        ("logit_scale", torch.tensor(2.0)),
        ("gates", torch.rand(2, 1, 1, 32)),
        ("bigram_embed.weight", torch.rand(29, 32)),
    ],
)
def test_tensor_outside_the_layers_with_no_role_is_refused(name: str, tensor: Tensor) -> None:
    """Each got a role by its shape, or was dropped."""
    tensors = state(SCHEMES["torch, post-LN"].model()) | {name: tensor}
    tensors = {each: value for each, value in tensors.items() if "fc_out" not in each}
    with pytest.raises(ConvertError, match=rf"without a known role in a GPT: {name} "):
        recognize_file(
            StateFile(state_file(SCHEMES["book"].model()).path, "m", tensors), RoleOptions()
        )


def test_order_of_norms_and_rotary_positions_is_asked() -> None:
    """Norms after rotary positions were computed before them, without a word."""
    tensors = state(SCHEMES["llama, QK-norm"].model())
    equal = {n: torch.ones_like(t) if "_norm" in n else t for n, t in tensors.items()}
    for named, asked in ((tensors, True), (equal, False)):
        found = of_tensors(named, rms_norm_eps=1e-6)["qk_norm_position"]
        assert (found.values, found.ambiguous) == (("before_rotary",), asked)
    assert not finding("llama", "qk_norm_position", rms_norm_eps=1e-6).ambiguous
    assert not findings(mapped(SCHEMES["llama, QK-norm"].model()), positions="none")[
        "qk_norm_position"
    ].ambiguous


def test_direction_of_rotary_positions_is_asked_or_reported() -> None:
    """modded-nanogpt, which rotates backward, was computed forward, without a word."""
    found = finding("modded-nanogpt", "rotary_direction")
    assert (found.values, found.ambiguous) == (("backward", "forward"), True)
    found = finding("llama", "rotary_direction")
    assert (found.values[0], found.origin, found.ambiguous) == ("forward", CONVENTION, False)
    assert finding("nanoGPT", "rotary_direction").origin == UNUSED


@pytest.mark.parametrize(("weight", "bias"), [("a_2", "b_2"), ("alpha", "bias")])
def test_norm_named_as_in_tutorials_is_a_question(weight: str, bias: str) -> None:
    """Tutorials divide by the unbiased standard deviation; the biased one was computed."""
    named = state(SCHEMES["nanoGPT"].model())
    tensors = {
        re.sub(r"(ln_\w+\.)bias", rf"\1{bias}", re.sub(r"(ln_\w+\.)weight", rf"\1{weight}", n)): t
        for n, t in named.items()
    }
    found = of_tensors(tensors)["norm"]
    assert (found.values, found.ambiguous) == (("layernorm",), True)
    assert f"ln_1.{weight} divide by the unbiased standard deviation" in found.origin
    assert of_tensors(named)["norm"].origin == "norms have biases"
    assert "assumed: their variance" in finding("book", "norm").origin


@pytest.mark.parametrize("name", ["MultiheadAttention", "llama, final norm without weights"])
def test_final_norm_without_weights_is_a_question(name: str) -> None:
    """Without a tensor it was taken to be absent, and --final-norm was refused."""
    found = finding(name, "final_norm")
    assert (found.values, found.ambiguous) == ((False, True), True)


def test_usual_eps_follows_the_answers() -> None:
    """With --norm rmsnorm, it was that of LayerNorm."""
    file = state_file(SCHEMES["llama2.c"].model())
    for norm, eps in (("rmsnorm", 1e-6), ("layernorm", 1e-5)):
        found = recognize_file(file, RoleOptions(answers={"norm": norm})).findings
        assert found["norm_eps"].values[0] == eps
    found = recognize_file(file, RoleOptions(answers={"norm_eps": 1e-3})).findings
    assert found["qk_norm_eps"].values == (1e-3,)


@pytest.mark.parametrize(
    ("attention", "mlp"),
    [("attn_scale", "mlp_scale"), ("attention.gain", "feed_forward.gain"), ("a1", "m1")],
)
def test_vector_that_nothing_calls_a_norm_gets_no_role(attention: str, mlp: str) -> None:
    """Scales of the sublayers' outputs were taken for norms."""
    named = state(SCHEMES["llama2.c"].model())
    tensors = {name: tensor for name, tensor in named.items() if "_norm" not in name}
    tensors |= {f"layers.{n}.{name}": torch.rand(32) for n in range(2) for name in (attention, mlp)}
    with pytest.raises(ConvertError, match=rf"without a known role .* layers\.0\.{attention} "):
        recognize_file(
            StateFile(state_file(SCHEMES["book"].model()).path, "m", tensors), RoleOptions()
        )


def test_scale_of_a_sublayer_is_no_norm() -> None:
    tensors = state(SCHEMES["one norm for both"].model())
    tensors |= {f"h.{n}.ls_1.gamma": torch.rand(32) for n in range(2)}
    with pytest.raises(ConvertError, match=r"without a known role in a GPT: h\.0\.ls_1\.gamma "):
        recognize_file(
            StateFile(state_file(SCHEMES["book"].model()).path, "m", tensors), RoleOptions()
        )


def test_gate_of_another_activation_is_refused_by_its_name() -> None:
    named = state(SCHEMES["llama2.c"].model())
    tensors = {name.replace("feed_forward", "geglu_mlp"): value for name, value in named.items()}
    with pytest.raises(ConvertError, match=r"layers\.\{N\}\.geglu_mlp\.w1\S* says geglu"):
        of_tensors({n: t for n, t in tensors.items() if "freqs" not in n})


@pytest.mark.parametrize(("rows", "asked"), [(66, True), (64, False), (130, True), (100, False)])
def test_table_with_two_more_rows_than_a_context_is_a_question(rows: int, asked: bool) -> None:
    """The first two rows of OPT's table belong to no position."""
    tensors = state(SCHEMES["nanoGPT"].model())
    (name,) = (each for each in tensors if "wpe" in each)
    found = of_tensors(tensors | {name: torch.rand(rows, tensors[name].shape[1])})
    assert found["positions"].ambiguous is asked


def test_order_of_query_key_value_is_asked() -> None:
    """GPT-NeoX stores a matrix of this name head by head; the usual order was assumed."""
    tensors = state(SCHEMES["fused, head by head"].model())
    assert any("query_key_value" in name for name in tensors)
    assert of_tensors(tensors)["qkv_layout"].ambiguous


def test_only_the_last_part_of_a_name_says_which_is_the_gate() -> None:
    named = state(SCHEMES["llama2.c"].model())
    tensors = {f"navigate.{name}": tensor for name, tensor in named.items()}
    assert len(of_tensors(tensors)["gate_order"].values) == 2


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({}, True), ({"mlp_type": "geglu"}, True), ({"mlp_type": "SwiGLU"}, False),
     ({"use_swiglu": True}, False), ({"hidden_act": "silu"}, False)],
)  # fmt: skip
def test_activation_of_a_gate_is_asked(settings: dict[str, Any], asked: bool) -> None:
    """Every gate was assumed to be silu."""
    found = finding("llama", "activation", **settings)
    assert (found.values, found.ambiguous) == (("swiglu",), asked)


def test_norms_with_weights_around_zero_are_a_question() -> None:
    """The source multiplied by 1 + weight."""
    tensors = state(SCHEMES["nanoGPT"].model())
    shifted = {
        name: t - 1 if "ln" in name and "weight" in name else t for name, t in tensors.items()
    }
    assert not of_tensors(tensors)["norm"].ambiguous
    assert of_tensors(shifted)["norm"].ambiguous


@pytest.mark.parametrize(("more", "asked"), [(2, True), (1, True), (0, False), (3, False)])
def test_table_with_more_rows_than_the_stated_context_is_a_question(more: int, asked: bool) -> None:
    """OPT's positions begin at the third row; they were read from the first."""
    rows = mapped(SCHEMES["nanoGPT"].model()).shape("positions")[0]
    assert finding("nanoGPT", "positions", block_size=rows - more).ambiguous is asked


@pytest.mark.parametrize(
    ("name", "stated", "asked"),
    [
        ("llama", {"n_embd": 64, "vocab_size": 40, "d_ff": 77}, {"n_embd", "vocab_size", "d_ff"}),
        ("llama", {"dim": 32, "hidden_dim": 48, "vocab_size": 27, "n_ctx": 999}, set()),
        ("llama", {"ffn_dim": 72, "num_tokens": 10**9}, set()),  # 48 is 2/3; tokens of training
        ("nanoGPT", {"n_embd": [32, 64], "block_size": 32}, {"n_embd", "block_size"}),
        ("nanoGPT", {"d_ff": 4, "block_size": 16, "max_length": 100}, set()),
    ],
)
def test_stated_size_that_shapes_contradict_is_a_question(
    name: str, stated: dict[str, Any], asked: set[str]
) -> None:
    file = replace(state_file(SCHEMES[name].model()), settings=stated)
    assert recognize_file(file, RoleOptions()).unknown.keys() == asked
