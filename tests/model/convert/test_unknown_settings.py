"""Unknown settings that may change a logit raise a question, in every format."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from logitd.model.convert.by_role.read import RoleOptions
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.convert.by_role.stated import setting
from logitd.model.convert.collected_settings import collect_settings
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model
from logitd.model.convert.unknown_settings import unknown_settings
from tests.model.convert.test_nanogpt import STOI, TEXT, save, small
from tests.model.convert.theirs import save_theirs

ANSWERS: dict[str, Any] = {
    "n_head": 4, "norm_position": "pre", "final_norm": True, "activation": "gelu",
    "score_scale": "head_dim", "norm": "layernorm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 15.0), ("logit_scale", 0.5), ("alibi", True), ("scale_scores", False),
        ("clip_qkv", 8), ("causal", False), ("window", 4), ("embedding_multiplier", 12.0),
        ("attn_beta", 2.0), ("n_loops", 2),
        # Words of a training hid these.
        ("no_rope_layer_interval", 4), ("recurrent_steps", 3), ("global_attention_every", 2),
        ("n_register_tokens", 4), ("share_layers", True), ("mask", False), ("window_size", 256),
        ("attention_type", "sliding_window"), ("attn", "linear"),
        ("rope_type", "yarn"), ("residual", "parallel"), ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5), ("use_sliding_window", True), ("rotary_pct", True),
        ("glu", True), ("pos_emb", False), ("layer_norm", False), ("embed_scale", True),
        ("rope_dim", 32), ("layer_types", ["sliding_attention"]), ("window_sizes", [128, 256]),
        ("qkv_order", "kqv"), ("qkv_layout", "interleaved"), ("norm_type", "rmsnorm_1p"),
        ("embed_scale", "sqrt"), ("mlp_type", "geglu"), ("layout", "parallel"),
        # A number as a text, lists of numbers, and texts about one part of attention.
        ("softcap", "30.0"), ("alibi_slopes", [0.5, 0.25]), ("residual_scale", [1, 0.5]),
        ("attn_impl", "alibi"), ("softmax", "entmax"), ("attention_fn", "relu"),
        ("normalization", "batchnorm"), ("layernorm_type", "dyt"), ("gqa_mode", "tile"),
        ("final_logit_activation", "tanh"), ("scale_type", "mup"), ("softcap", "tanh30"),
        ("parallel", "true"), ("use_rope", "True"), ("parametrization", "mup"),
        ("mask", "prefix"), ("final_activation", "tanh"), ("mixer", "mamba"),
        # Any text whose name has a word for a part of the model, and loops of few steps.
        ("attention_activation", "sigmoid"), ("softmax_variant_attn", "polymax"),
        ("similarity", "cosine"), ("lm_head_type", "cosine"), ("norm_placement", "sandwich"),
        ("attn_temperature", "learned"), ("gate_activation", "sigmoid"), ("inner_steps", 4),
        ("iterations", 4), ("val_residual", True), ("n_iter", 4),
    ],
)  # fmt: skip
def test_setting_that_may_change_a_logit_is_unknown(name: str, value: Any) -> None:
    given = {name: value, name.upper(): value}
    assert unknown_settings(given) == given


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1e-3), ("max_iters", 5000), ("beta1", 0.9), ("grad_clip", 1.0),
        ("batch_size", 64), ("eval_only", False), ("use_cache", True), ("attn_pdrop", 0.1),
        ("bias", False), ("tie_weights", True), ("n_layer", 6), ("causal", True), ("seed", 1337),
        ("softcap", 0.0), ("train_loss", 1.8), ("initializer_range", 0.02), ("compile", True),
        ("eos_token_id", 51), ("warmup_iters", 100), ("lr_decay_iters", 5000), ("name", "x"),
        ("eval_interval", 250), ("tokens_per_step", 500), ("gradient_accumulation_steps", 4),
        ("num_train_epochs", 3), ("save_every_n_steps", 10), ("tie_word_embeddings", False),
        ("attention", "flash_attention_2"), ("layer_types", ["full_attention"] * 2),
        ("tokens_seen", 10**6), ("share_input_output_embed", True), ("n_samples", 5),
        ("ema_decay", 0.999), ("use_ema", True), ("use_fp16", True), ("gqa", True),
        ("use_mqa", False),
        ("norm_bias", False), ("use_layer_norm", True), ("deterministic", True), ("pos_emb", True),
        ("pretraining_tp", 1), ("partial_rotary_factor", 1.0), ("use_sliding_window", False),
        ("betas", [0.9, 0.95]), ("lr", "3e-4"), ("attn_impl", "flash_attention_2"),
        ("mask", "causal"), ("eos_token_id", [1, 2]), ("targets", ["q", "v"]),
        ("norm_type", "pre"), ("norm", "nn.LayerNorm"), ("ffn", "swiglu"), ("qkv_order", "qkv"),
        ("use_sliding_window", "false"), ("compile", "true"), ("head_name", "x"),
        ("attn_backend", "triton"), ("mask_file", "m.pt"), ("steps", 5000), ("val_loss", "low"),
    ],
)  # fmt: skip
def test_setting_of_a_training_or_a_shape_is_known(name: str, value: Any) -> None:
    assert unknown_settings({name: value}) == {}


@pytest.mark.parametrize(
    "name", ["use_rmsnorm", "rms_norm", "is_rms", "use_rope", "rotary", "rope_emb", "swiglu"]
)
def test_flag_is_known_by_role(name: str) -> None:
    """Recognition by role reads it, and asked about it nevertheless."""
    assert unknown_settings({name: True}, by_role=True) == {}
    assert unknown_settings({name: True}) == {name: True}
    assert unknown_settings({name: 0.5}, by_role=True) == {name: 0.5}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("activation", "relu"), ("rope_theta", 5e4), ("qk_norm", True), ("norm_eps", 1e-3)),
        *(("num_attention_heads", 2), ("head_dim", 8)),  # of GPT-2 and GPT-NeoX
    ],
)
def test_unused_setting_of_a_computation_is_unknown_except_by_role(name: str, value: Any) -> None:
    assert unknown_settings({name: value}) == {name: value}
    assert unknown_settings({name: value}, by_role=True) == {}


def test_sections_that_disagree_are_asked_about() -> None:
    contents = {"full": {"softcap": 1.0, "attn_type": "full", "rope_theta": 1e4},
                "sliding": {"softcap": 2.0, "attn_type": "linear", "rope_theta": 1e5}}  # fmt: skip
    found = collect_settings(contents)
    assert found["rope_theta"] == [1e4, 1e5]
    asked = {"softcap": [1.0, 2.0], "attn_type": ["full", "linear"]}
    assert unknown_settings(found, by_role=True) == asked


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, ["local", "local"]) for name in ("blocks", "attentions", "block_types")),
        *(("pattern", "LL"), ("block_pattern", "SSL"), ("softmax_type", "softmax1")),
        *(("num_iterations", 3), ("n_steps", 2), ("temperature", 0.5), ("rope_thetas", [1e4, 1e6])),
    ],
)
def test_setting_that_may_change_logits_is_asked_about(name: str, value: Any) -> None:
    assert unknown_settings({name: value}, by_role=True) == {name: value}


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_iterations", 3000), ("temperature", 1.0), ("pattern", "(?i)x+"), ("max_steps", 100)],
)
def test_setting_that_changes_no_logits_is_not_asked_about(name: str, value: Any) -> None:
    assert unknown_settings({name: value}, by_role=True) == {}


@pytest.mark.parametrize(
    "contents",
    [
        {"cfg": {"model": {"n_layer": 2, "transformer": {"attention": {"window": 8}}}}},
        {"config": {"n_layer": 2, "layer_windows": [8, 8]}},
        {"n_layer": 2, "layer_windows": [8, 8]},
        {"config": {"layer_configs": [{"window": 8}, {"window": 8}]}},
        {"config": {"n_layer": 2}, "train_args": {"lr": 1e-3, "attention_window": 8}},
        {"config": {"attention": {"heads": 4, "window": 3, "sinks": 2, "groups": 1}}},
    ],
)
def test_settings_in_structures_are_asked_about(contents: dict[str, Any]) -> None:
    """These windows were not read."""
    unknown = unknown_settings(collect_settings(contents, of_model_alone=True), by_role=True)
    assert any("window" in name for name in unknown)


def test_vocabularies_and_sections_of_a_training_are_no_settings() -> None:
    contents = {"stoi": {"a": 0, "b": 1, "c": 2, "step": 3}, "optimizer": {"softcap": 1.0},
                "model_args": {"softcap": 2.0}}  # fmt: skip
    assert collect_settings(contents) == {"softcap": 2.0}
    assert collect_settings({"optimizer": {"eps": 1e-8}}) == {}
    del contents["model_args"]
    assert collect_settings(contents, of_model_alone=True) == {}


@pytest.mark.parametrize(
    "contents",
    [
        {"metadata": {"softcap": 1.0}},
        {"pretrained_config": {"softcap": 1.0}},
        {"train_config": {"model": {"softcap": 1.0}}},
        {"training_args": {"softcap": 1.0, "n_layer": 2}},
        {"config": {"attn_layers": ["local", "global"], "softcap": 1.0}},
        {"args": {"softcap": 1.0, "a": "b", **{f"x{n}": n for n in range(300)}}},
    ],
)
def test_settings_of_the_model_are_found_in_other_sections(contents: dict[str, Any]) -> None:
    """The name or the length of the section hid them."""
    found = collect_settings(contents, of_model_alone=True)
    assert found["softcap"] == 1.0
    assert ("attn_layers" in found) is ("config" in contents)


def of_roles(folder: Path) -> None:
    save(folder / "m.pt", small(len(STOI)), model_args={"softcap": 15.0}, stoi=STOI)


def of_nanogpt(folder: Path) -> None:
    model = small(len(STOI))
    save(folder / "ckpt.pt", model, model_args=asdict(model.config) | {"softcap": 15.0}, stoi=STOI)


def of_transformers(folder: Path) -> None:
    save_theirs(folder, "llama")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"softcap": 15.0}), encoding="utf-8")


@pytest.mark.parametrize("name", ["config.yaml", "hparams.yml", "config.toml"])
def test_settings_in_a_file_that_is_not_read_are_a_question(name: str, tmp_path: Path) -> None:
    """A logit cap in a YAML file next to the weights was ignored without a word."""
    save(tmp_path / "m.pt", small(len(STOI)), stoi=STOI)
    (tmp_path / name).write_text("softcap: 15.0\n", encoding="utf-8")
    roles = RoleOptions(answers=ANSWERS)
    with pytest.raises(OpenQuestions, match=rf"{name} 'not read'.*--ignore-setting {name}"):
        import_model(tmp_path / "m.pt", tmp_path / "ours", roles=roles)
    import_model(tmp_path / "m.pt", tmp_path / "ours", roles=roles, ignored_settings=[name])


@pytest.mark.parametrize("write", [of_roles, of_nanogpt, of_transformers])
def test_unknown_setting_is_an_open_question(write: Any, tmp_path: Path) -> None:
    write(tmp_path / "source")
    (tmp_path / "text.txt").write_text(TEXT * 50, encoding="utf-8")
    roles = RoleOptions(answers=ANSWERS) if write is of_roles else None
    for check in (None, tmp_path / "text.txt"):
        with pytest.raises(OpenQuestions, match=r"softcap 15.0.*--ignore-setting softcap"):
            import_model(tmp_path / "source", tmp_path / "ours", roles=roles, check=check)
    info = import_model(
        tmp_path / "source", tmp_path / "ours", roles=roles, ignored_settings=["softcap"]
    )
    assert info.training.data["ignored_settings"] == ["softcap"]
    with pytest.raises(ConvertError, match=r"--ignore-setting cap.*softcap"):
        import_model(tmp_path / "source", tmp_path / "again", roles=roles, ignored_settings=["cap"])


@pytest.mark.parametrize("name", ["special_tokens", "specialTokens", "added_tokens", "vocab"])
def test_ids_of_special_tokens_are_not_settings(name: str) -> None:
    """Their names were asked about."""
    assert collect_settings({name: {"<|eot|>": 316, "<pad>": 5}, "window": 4}) == {"window": 4}


@pytest.mark.parametrize("name", ["attnActivation", "AttentionSimilarity"])
def test_words_of_a_name_may_begin_with_capitals(name: str) -> None:
    assert unknown_settings({name: "cosine"}) == {name: "cosine"}
    assert unknown_settings({"learningRate": 0.1, "batchSize": 8}) == {}
    assert setting({"nHead": 4}, "n_head") == (4, "nHead")
