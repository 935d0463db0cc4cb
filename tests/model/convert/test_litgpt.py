"""LitGPT's folders, made from Llama's weights by a mapping in this test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.testing import assert_close

from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model
from tests.model.convert.theirs import ROWS, SAMPLE, loaded, their_model, their_tokenizer

CONFIG: dict[str, Any] = {
    "name": "tiny", "hf_config": {"org": "x", "name": "tiny"}, "block_size": 64, "n_layer": 2,
    "n_embd": 32, "n_head": 4, "n_query_groups": 2, "head_size": 8, "vocab_size": 382,
    "padding_multiple": 64, "padded_vocab_size": ROWS, "norm_class_name": "RMSNorm",
    "norm_eps": 1e-6, "parallel_residual": False, "bias": False, "rotary_percentage": 1.0,
    "rope_base": 5000, "mlp_class_name": "LLaMAMLP", "intermediate_size": 48,
    "gelu_approximate": "none", "scale_embeddings": False, "n_expert": 0,
    "sliding_window_size": None,
}  # fmt: skip


def lit_state(model: Any, *, interleaved: bool) -> dict[str, Tensor]:
    """Llama's weights under LitGPT's names."""
    theirs = model.state_dict()
    weights = {
        "lm_head.weight": theirs["lm_head.weight"],
        "transformer.wte.weight": theirs["model.embed_tokens.weight"],
        "transformer.ln_f.weight": theirs["model.norm.weight"],
    }
    for layer in range(2):
        source, here = f"model.layers.{layer}.", f"transformer.h.{layer}."
        q, k, v = (theirs[f"{source}self_attn.{part}_proj.weight"] for part in "qkv")
        if interleaved:  # two groups: queries 0 and 1, key 0, value 0, queries 2 and 3, ...
            rows = []
            for group in range(2):
                rows += [q[group * 16 : group * 16 + 16], k[group * 8 : group * 8 + 8]]
                rows += [v[group * 8 : group * 8 + 8]]
            weights[f"{here}attn.attn.weight"] = torch.cat(rows)
        else:
            weights[f"{here}attn.qkv.weight"] = torch.cat((q, k, v))
        for ours, name in {
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.proj": "self_attn.o_proj",
            "mlp.fc_1": "mlp.gate_proj",
            "mlp.fc_2": "mlp.up_proj",
            "mlp.proj": "mlp.down_proj",
        }.items():
            weights[f"{here}{ours}.weight"] = theirs[f"{source}{name}.weight"]
    return weights


def save(folder: Path, state: Any, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.dump(CONFIG | changes), encoding="utf-8")
    their_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_logits_are_llamas(interleaved: bool, wrapped: bool, tmp_path: Path) -> None:
    model = their_model("llama")
    state = lit_state(model, interleaved=interleaved)
    save(tmp_path / "lit", {"model": state} if wrapped else state)
    import_model(tmp_path / "lit", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    assert not info.config.tied_head
    ids = torch.tensor([info.tokenizer.encode(SAMPLE)])
    expected = model(ids).logits[..., : info.config.vocab_size]
    assert_close(gpt(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_windowed_model_matches_mistral(tmp_path: Path) -> None:
    model = their_model("mistral", sliding_window=8)
    save(tmp_path / "lit", lit_state(model, interleaved=False), sliding_window_size=8)
    import_model(tmp_path / "lit", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    ids = torch.tensor([info.tokenizer.encode(SAMPLE)])
    expected = model(ids).logits[..., : info.config.vocab_size]
    assert_close(gpt(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_head_equal_to_the_embedding_is_stored_once(tmp_path: Path) -> None:
    model = their_model("llama", tie_word_embeddings=True)
    save(tmp_path / "lit", lit_state(model, interleaved=False))
    info = import_model(tmp_path / "lit" / "lit_model.pth", tmp_path / "ours")
    assert info.config.tied_head


def test_serial_neox_shape_is_supported(tmp_path: Path) -> None:
    """In LitGPT, LayerNorm always has a bias; whether matrices have one depends on the
    configuration."""
    generator = torch.Generator().manual_seed(0)
    state = {
        "lm_head.weight": torch.randn(ROWS, 32, generator=generator),
        "transformer.wte.weight": torch.randn(ROWS, 32, generator=generator),
    }
    for module in (
        "transformer.ln_f",
        *(f"transformer.h.{i}.norm_{n}" for i in (0, 1) for n in (1, 2)),
    ):
        state |= {f"{module}.weight": torch.ones(32), f"{module}.bias": torch.full((32,), 0.5)}
    for layer in range(2):
        for name, shape in {"attn.qkv": (64, 32), "attn.proj": (32, 32), "mlp.fc": (128, 32),
                            "mlp.proj": (32, 128)}.items():  # fmt: skip
            state[f"transformer.h.{layer}.{name}.weight"] = torch.randn(shape, generator=generator)
    neox = {
        "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
        "intermediate_size": 128,
    }
    import_model(save(tmp_path / "lit", state, **neox), tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    assert (info.config.activation, info.config.norm) == ("gelu", "layernorm")
    assert torch.equal(gpt.get_parameter("final_norm.bias"), torch.full((32,), 0.5))
    assert not gpt.get_parameter("blocks.1.mlp_down.bias").any()


PYTHIA: dict[str, Any] = {
    "n_head": 2, "n_query_groups": 2, "head_size": 16, "norm_class_name": "LayerNorm",
    "norm_eps": 1e-5, "mlp_class_name": "GptNeoxMLP", "bias": True, "rope_base": 10_000,
}  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_pythia_may_have_a_head_bias(interleaved: bool, parallel: bool, tmp_path: Path) -> None:
    """The logits equal the logits of `transformers` plus a bias that only LitGPT supports. If the
    configuration does not say otherwise, residuals are parallel and a quarter of each head is
    rotated."""
    model = their_model("gpt_neox", use_parallel_residual=parallel)
    theirs = model.state_dict()
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    state = {
        "lm_head.weight": theirs["lm_head.weight"],
        "lm_head.bias": bias,
        "transformer.wte.weight": theirs["gpt_neox.embed_in.weight"],
    }
    names = {"gpt_neox.final_layer_norm": "transformer.ln_f"}
    for layer in range(2):
        source, here = f"gpt_neox.layers.{layer}", f"transformer.h.{layer}"
        names |= {
            f"{source}.input_layernorm": f"{here}.norm_1",
            f"{source}.post_attention_layernorm": f"{here}.norm_2",
            f"{source}.attention.dense": f"{here}.attn.proj",
            f"{source}.mlp.dense_h_to_4h": f"{here}.mlp.fc",
            f"{source}.mlp.dense_4h_to_h": f"{here}.mlp.proj",
        }
        for kind in ("weight", "bias"):  # head by head: query, key, value
            rows = theirs[f"{source}.attention.query_key_value.{kind}"]
            parts = [rows[48 * head + 16 * part : 48 * head + 16 * part + 16]
                     for part in range(3) for head in range(2)]  # fmt: skip
            state[f"{here}.attn.{'attn' if interleaved else 'qkv'}.{kind}"] = (
                rows if interleaved else torch.cat(parts)
            )
    for source, here in names.items():
        state |= {f"{here}.{kind}": theirs[f"{source}.{kind}"] for kind in ("weight", "bias")}
    changes = {**PYTHIA, "lm_head_bias": True, "parallel_residual": parallel}
    folder = save(tmp_path / "lit", state, **changes, rotary_percentage=0.25)
    if parallel:
        bare = {name: value for name, value in (CONFIG | changes).items()
                if name not in ("parallel_residual", "rotary_percentage")}  # fmt: skip
        (folder / "model_config.yaml").write_text(yaml.dump(bare), encoding="utf-8")
    import_model(folder, tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    assert (info.config.rotary_dim, info.config.head_dim) == (4, 16)
    ids = torch.tensor([info.tokenizer.encode(SAMPLE)])
    expected = (model(ids).logits + bias)[..., : info.config.vocab_size]
    assert_close(gpt(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_norms_of_queries_and_keys_move_with_their_channels(tmp_path: Path) -> None:
    state = lit_state(their_model("llama"), interleaved=False)
    for layer in range(2):
        for part in "qk":
            state[f"transformer.h.{layer}.attn.norm_{part}.weight"] = torch.arange(8) + 1.0
    folder = save(tmp_path / "lit", state, norm_qk=True, rotary_percentage=0.5)
    import_model(folder, tmp_path / "ours")
    _, gpt = loaded(tmp_path / "ours")
    for part in ("query", "key"):
        weight = gpt.get_parameter(f"blocks.1.{part}_norm.weight")
        assert weight.tolist() == [1, 2, 5, 6, 3, 4, 7, 8]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shared_attention_norm": True}, "shared_attention_norm is True; not supported here"),
        ({"rotary_percentage": 0.4}, "rotary_dim is 3; channels are rotated in pairs"),
        ({"lm_head_bias": True}, r"lacks the tensor lm_head\.bias"),
        ({"rope_adjustments": {"factor": 8}}, "rope_adjustments is "),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"name": "Gemma-tiny"}, "name is 'Gemma-tiny'; LitGPT adds 1 to the weights of norms"),
        ({"name": "", "hf_config": {"name": "Gemma-2"}}, r"hf_config of .* name is 'Gemma-2'"),
        ({"mlp_class_name": "GemmaMLP"}, "mlp_class_name is 'GemmaMLP'"),
        ({"something_new": 3}, "something_new 3.*--ignore-setting something_new"),
        ({"sliding_window_size": 16, "sliding_window_indices": [1]}, "0 or 1 for 2 layers"),
        ({"sliding_window_size": 16, "n_layer": 10**14}, "states 100,000,000,000,000 layers"),
        ({"sliding_window_size": "x"}, "sliding_window_size is 'x'; expected a positive integer"),
        ({"sliding_window_size": float("nan")}, "sliding_window_size is nan; expected a positive"),
        ({"n_layer": 1}, r"has 7 tensors .* transformer\.h\.1\.attn\.proj\.weight"),
        ({"norm_qk": True}, r"lacks the tensor transformer\.h\.0\.attn\.norm_q\.weight"),
        ({"bias": True}, r"lacks the tensor transformer\.h\.0\.attn\.qkv\.bias"),
    ],
)
def test_unsupported_litgpt_is_refused_by_its_key(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save(tmp_path / "lit", lit_state(their_model("llama"), interleaved=False), **change)
    with pytest.raises(ConvertError, match=sentence):
        import_model(tmp_path / "lit", tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (Tensor.to_sparse, r"transformer\.wte\.weight is sparse; only dense tensors"),
        (lambda tensor: tensor.to("meta"), r"transformer\.wte\.weight is without values"),
        (lambda tensor: tensor * float("nan"), "has NaN or infinite values"),
        (lambda tensor: tensor.to(torch.int8), "is int8; only weights in .* not quantized"),
        (
            lambda tensor: tensor[1:],
            r"has shape \(386, 32\); its configuration requires \(387, 32\)",
        ),
    ],
    ids=["sparse", "meta", "NaN", "int8", "a row less"],
)
def test_tensors_of_other_kinds_are_named(
    change: Callable[[Tensor], Tensor], sentence: str, tmp_path: Path
) -> None:
    state = lit_state(their_model("llama"), interleaved=False)
    save(tmp_path / "lit", state | {"transformer.wte.weight": change(state["lm_head.weight"])})
    with pytest.raises(ConvertError, match=sentence):
        import_model(tmp_path / "lit", tmp_path / "ours")


def test_tensor_without_a_name_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "lit", {3: torch.zeros(2)})
    with pytest.raises(ConvertError, match=r"lit_model\.pth contains 3 of type Tensor"):
        import_model(tmp_path / "lit", tmp_path / "ours")


def test_broken_configuration_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "lit", {})
    bomb = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    for text, sentence in (
        ("[1", "is not YAML"),
        ("- 1", "is not a mapping of keys to values"),
        (f"a0: &a0 [1]\n{bomb}norm_class_name: *a11\n", r"has an alias \(\*NAME\)"),
    ):
        (folder / "model_config.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConvertError, match=rf"model_config\.yaml {sentence}"):
            import_model(folder, tmp_path / "ours")
    (folder / "model_config.yaml").unlink()
    with pytest.raises(ConvertError, match=r"model_config\.yaml does not exist, but lit_model"):
        import_model(folder, tmp_path / "ours")
