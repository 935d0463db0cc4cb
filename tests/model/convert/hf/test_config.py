"""Hugging Face folders: imported models give the same logits and ids as `transformers`, and every
refusal states a reason."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from logitd.model.convert.by_code import CodeOptions, import_by_code
from logitd.model.convert.by_role.owner_code import parse_owner_code
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model
from logitd.model.files import FileError
from tests.model.convert.theirs import FAMILIES, SAMPLE, loaded, save_theirs


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file; a value of None removes its key."""
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    kept = {name: value for name, value in document.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


@pytest.fixture
def gpt2_folder(folders: dict[str, Path]) -> Path:
    return folders["gpt2"]


@pytest.fixture
def llama_folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_ids_are_theirs(family: str, tmp_path: Path) -> None:
    model, tokenizer = save_theirs(tmp_path / "theirs", family)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    ids = info.tokenizer.encode(SAMPLE)
    assert ids == tokenizer.encode(SAMPLE).ids
    assert len(ids) > 10
    expected = model(torch.tensor([ids])).logits
    assert expected.std() > 0.1
    assert info.config.vocab_size == tokenizer.get_vocab_size()
    assert info.config.padded_vocab_size == 448  # 387 rows in whole tiles
    actual = gpt(torch.tensor([ids])).logits
    assert_close(actual, expected[..., : info.config.vocab_size], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt", "llama-tied-biased"])
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_in_pickles_are_the_same(family: str, shards: int, tmp_path: Path) -> None:
    """The weights are in several pickles, or in a single pickle that also holds the buffers that
    old versions of `transformers` saved. A tied head is stored twice."""
    model, _ = save_theirs(tmp_path / "theirs", family)
    folder = shutil.copytree(tmp_path / "theirs", tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    state = {name.replace("lm_head.weight", "embed_out.weight") if family == "gpt_neox" else name:
             tensor for name, tensor in model.state_dict().items()}  # fmt: skip
    if family == "gpt_neox":
        state["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
        state["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
        state["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(2)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        homes = {name: f"pytorch_model-{1 + i % 2}.bin" for i, name in enumerate(state)}
        for file in set(homes.values()):
            part = {name: tensor for name, tensor in state.items() if homes[name] == file}
            torch.save(part, folder / file)
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    import_model(tmp_path / "theirs", tmp_path / "a")
    named = folder / "pytorch_model.bin"  # means its folder
    import_model(named if shards == 1 else folder, tmp_path / "b")
    assert loaded(tmp_path / "a")[0].weights_sha256 == loaded(tmp_path / "b")[0].weights_sha256


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (["a"], r"pytorch_model\.bin holds a list, not a dictionary"),
        ({"model": {"a": torch.ones(1)}}, r"pytorch_model\.bin contains 'model' of type dict"),
        ({3: torch.ones(1)}, r"pytorch_model\.bin contains 3 of type Tensor"),
        ({"a": Path("x")}, r"pytorch_model\.bin contains 'a' of type str"),
        (torch.nn.Linear(2, 2), r"pytorch_model\.bin is a whole pickled module"),
    ],
)
def test_pickles_of_anything_else_are_refused(
    gpt2_folder: Path, tmp_path: Path, state: Any, sentence: str
) -> None:
    """A pickled object is read as its attributes or arguments, and none of its code runs."""
    folder = shutil.copytree(gpt2_folder, tmp_path / "pickled")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(ConvertError, match=sentence):
        import_model(folder, tmp_path / "ours")


def test_shards_and_the_base_models_names_are_read(gpt2_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(gpt2_folder, tmp_path / "sharded")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    homes: dict[str, str] = {}
    for number, half in enumerate((sorted(weights)[::2], sorted(weights)[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        names = {name: name.removeprefix("transformer.") for name in half}
        save_file({short: weights[name] for name, short in names.items()}, folder / file)
        homes |= dict.fromkeys(names.values(), file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    import_model(gpt2_folder, tmp_path / "one")
    import_model(index, tmp_path / "two")
    assert loaded(tmp_path / "one")[0].weights_sha256 == loaded(tmp_path / "two")[0].weights_sha256
    with pytest.raises(ConvertError, match=r"00002\.safetensors has only a part.*Import the index"):
        import_model(folder / file, tmp_path / "three")
    index.write_text(json.dumps({"weight_map": homes | {"h.0.more": file}}), encoding="utf-8")
    with pytest.raises(ConvertError, match=r"names 1 tensors .* the first is h\.0\.more"):
        import_model(folder, tmp_path / "three")
    save_file(load_file(folder / file) | {"h.0.more.weight": torch.ones(2, 2)}, folder / file)
    index.write_text(json.dumps({"weight_map": homes}), encoding="utf-8")
    with pytest.raises(ConvertError, match=r"h\.0\.more\.weight"):
        import_model(folder, tmp_path / "three")
    index.write_text(json.dumps({"weight_map": homes | {"x": "../x"}}), encoding="utf-8")
    with pytest.raises(ConvertError, match="has no valid weight_map"):
        import_model(folder, tmp_path / "three")


def test_shards_that_contradict_each_other_are_refused(gpt2_folder: Path, tmp_path: Path) -> None:
    """The index names one of the files, and transformers reads the other one's values."""
    folder = shutil.copytree(gpt2_folder, tmp_path / "sharded")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    first, *rest = sorted(weights)
    homes = {first: "a.safetensors"} | dict.fromkeys(rest, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    save_file({first: weights[first]}, folder / "a.safetensors")
    save_file(weights, folder / "b.safetensors")
    import_model(folder, tmp_path / "same")
    for other in (weights[first] + 1, weights[first].double()):
        save_file({first: other}, folder / "a.safetensors")
        sentence = rf"{re.escape(first)} differs between a\.safetensors and b\.safetensors"
        with pytest.raises(ConvertError, match=sentence):
            import_model(folder, tmp_path / "ours")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_is_refused(name: str, llama_folder: Path, tmp_path: Path) -> None:
    """transformers computes with the adapter; the import took the base alone."""
    folder = shutil.copytree(llama_folder, tmp_path / "adapted")
    (folder / name).write_text("{}")
    (tmp_path / "gpt.py").touch()
    code = CodeOptions(code=parse_owner_code(f"{tmp_path}/gpt.py:GPT"), answers={})
    sentence = rf"adapter \({name}\).*merge_and_unload.*move {name} to another folder"
    for source in (folder, folder / "model.safetensors", folder / name):
        with pytest.raises(ConvertError, match=sentence):
            import_model(source, tmp_path / "ours")
        with pytest.raises(ConvertError, match=sentence):
            import_by_code(source, tmp_path / "ours", code, log=lambda line: None)


def test_own_modeling_code_is_a_question(llama_folder: Path, tmp_path: Path) -> None:
    """transformers runs that code with trust_remote_code, and its own Llama without."""
    folder = shutil.copytree(llama_folder, tmp_path / "own")
    edit(folder / "config.json", auto_map={"AutoConfig": "configuration_x.XConfig"})
    import_model(folder, tmp_path / "configuration")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    sentence = r"auto_map .*modeling_x.*--code.*--ignore-setting auto_map"
    with pytest.raises(ConvertError, match=sentence):
        import_model(folder, tmp_path / "ours")
    import_model(folder, tmp_path / "ours", ignored_settings=["auto_map"])
    edit(folder / "config.json", architectures=["GPT2WithOwnForward"], auto_map=None)
    with pytest.raises(ConvertError, match=r"GPT2WithOwnForward.*--ignore-setting architectures"):
        import_model(folder, tmp_path / "other")


def test_old_form_of_a_configuration_is_equivalent(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "old")
    edit(folder / "config.json", rope_parameters=None, dtype=None, rope_theta=5000.0)
    import_model(folder, tmp_path / "a")
    import_model(llama_folder, tmp_path / "b")
    assert loaded(tmp_path / "a")[0].config == loaded(tmp_path / "b")[0].config
    assert loaded(tmp_path / "a")[0].config.rope_theta == 5000.0


def test_context_can_be_shortened(gpt2_folder: Path, tmp_path: Path) -> None:
    import_model(gpt2_folder, tmp_path / "long")
    import_model(gpt2_folder, tmp_path / "short", context_length=16)
    (_, long), (info, short) = loaded(tmp_path / "long"), loaded(tmp_path / "short")
    assert info.config.context_length == 16
    ids = torch.tensor([info.tokenizer.encode(SAMPLE)[:16]])
    assert torch.equal(long(ids).logits, short(ids).logits)
    with pytest.raises(ConvertError, match="--context-length 65 is more than the model's 64"):
        import_model(gpt2_folder, tmp_path / "longer", context_length=65)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_stored_as_in_the_source(dtype: str, tmp_path: Path) -> None:
    model, _ = save_theirs(tmp_path / "unused", "qwen3")
    numbers = getattr(torch, dtype)
    model.to(numbers).save_pretrained(tmp_path / "theirs")
    tokenizer = (tmp_path / "unused" / "tokenizer.json").read_bytes()
    (tmp_path / "theirs" / "tokenizer.json").write_bytes(tokenizer)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {numbers}
    assert f"Stored in {dtype}" in (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")
    import_model(tmp_path / "theirs", tmp_path / "wide", dtype="float32")
    ids = torch.tensor([[1, 2, 3]])
    exact = loaded(tmp_path / "wide")[1](ids).logits
    assert torch.equal(loaded(tmp_path / "ours")[1](ids).logits, exact)


UNSUPPORTED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"model_type": "bert"}, "model_type is 'bert'; expected one of gpt2, gpt_neox, opt"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]; expected one of gpt2"),
        ({"model_type": "mistral", "num_hidden_layers": 10**14}, "states 100,000,000,000,000"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": float("inf")},
         "max_window_layers is inf; expected an integer, at least 0"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1},
         "max_window_layers is -1; expected an integer, at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a finite number"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, r"of type \['linear'\] are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; "),
        *(({"rope_parameters": {"rope_type": kind, "factor": 2.0}},
           f"rotary positions of type '{kind}' are not supported; expected one of default, linear")
          for kind in ("dynamic", "longrope", "su", "proportional")),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}},
         "rope_scaling is .* rotary positions of type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e3}},
         r"rope_parameters of .*config\.json lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0, "rope_theta": 5e3}},
         r"rope_scaling\.factor is 0\.0; it must be greater"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "low_freq_factor": 1.0}},
         "with the same settings in all layers, the type 'linear' has no low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}},
         "the type 'default' has no full_attention"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         "partial_rotary_factor is 0.5; only rotation of whole heads"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default'; expected an object"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": None}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantized weights cannot be imported"),
        ({"qk_norm": True}, "settings are not understood.* qk_norm True"),
        ({"is_causal": False}, "is_causal is False; then positions attend to later ones"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; expected a positive integer"),
        ({"num_hidden_layers": 1}, r"has 9 tensors that .* the first is model\.layers\.1\.input"),
        ({"num_hidden_layers": 3}, r"lacks the tensor model\.layers\.2\."),
        ({"intermediate_size": 64},
         r"gate_proj\.weight has shape \(48, 32\); its configuration requires \(64, 32\)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
        ({"attention_bias": True}, r"lacks the tensor .*q_proj\.bias"),
        ({"num_key_value_heads": 3}, "n_head 4 is not a multiple of n_kv_head 3"),
        ({"vocab_size": 300}, r"embed_tokens\.weight has shape \(387, 32\)"),
    ],
    "gpt2": [
        ({"activation_function": "tanh"}, "activation_function is 'tanh'; "),
        *(({name: True}, f"{name} is True; ")
          for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
                       "add_cross_attention")),
        ({"scale_attn_weights": False}, "scale_attn_weights is False; "),
    ],
    "gpt_neox": [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; expected one of gelu_new"),
        ({"rotary_pct": 0.5}, "but elsewhere"),
        ({"rope_theta": 5.0}, r"rope_theta is 5\.0; but elsewhere it is 10000\.0"),
        ({"rope_parameters": None, "rotary_pct": 0.2}, "rotary_dim is 3; channels are rotated"),
        ({"num_attention_heads": 3}, "hidden_size 32 is not divisible by num_attention_heads 3"),
        ({"attention_bias": False}, r"has 4 tensors that .* the first is .*dense\.bias"),
        ({"intermediate_size": 64}, r"dense_h_to_4h\.weight has shape \(48, 32\)"),
        ({"tie_word_embeddings": True}, r"embed_out\.weight differs from the embedding"),
    ],
    "mistral-window": [
        ({"layer_types": ["sliding_attention", "full_attention"]},
         "layer_types is .* transformers ignores it for mistral"),
    ],
    "opt": [
        ({"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16; hidden_size is 32"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu'; OPT's own is relu"),
        ({"enable_bias": False}, "enable_bias is False; not supported for OPT"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False"),
        ({"max_position_embeddings": 66}, r"embed_positions\.weight has shape \(66, 32\)"),
        ({"do_layer_norm_before": False}, r"has 2 tensors .* model\.decoder\.final_layer_norm"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family in UNSUPPORTED."""
    made = {family: tmp_path_factory.mktemp("theirs") / family for family in UNSUPPORTED}
    for family, folder in made.items():
        save_theirs(folder, family)
    return made


@pytest.mark.parametrize(
    ("family", "change", "sentence"),
    [(family, *row) for family, rows in UNSUPPORTED.items() for row in rows],
)
def test_unsupported_model_is_refused_by_its_key(
    family: str,
    change: dict[str, Any],
    sentence: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(folders[family], tmp_path / "changed")
    edit(folder / "config.json", **change)
    with pytest.raises(ConvertError, match=sentence):
        import_model(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_old_form_of_gpt_neox_is_equivalent(tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "gpt_neox-whole")
    import_model(tmp_path / "theirs", tmp_path / "new")
    edit(
        tmp_path / "theirs" / "config.json",
        rope_parameters=None, rotary_pct=1.0, rotary_emb_base=700, attention_bias=None,
    )  # fmt: skip
    import_model(tmp_path / "theirs", tmp_path / "old")
    assert loaded(tmp_path / "old")[0].config == loaded(tmp_path / "new")[0].config
    edit(tmp_path / "theirs" / "config.json", rotary_pct=None, rotary_emb_base=None)
    import_model(tmp_path / "theirs", tmp_path / "bare")
    config = loaded(tmp_path / "bare")[0].config
    assert (config.rotary_dim, config.rope_theta) == (4, 10_000.0)


@pytest.mark.parametrize("name", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_old_form_of_scaled_positions_is_equivalent(
    llama_folder: Path, tmp_path: Path, kind: str, name: str
) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "changed")
    scaling: dict[str, Any] = {"factor": 4.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(folder / "config.json", rope_parameters={"rope_type": kind, "rope_theta": 5e3} | scaling)
    import_model(folder, tmp_path / "new")
    edit(
        folder / "config.json", rope_parameters=None, rope_theta=5000.0,
        rope_scaling={name: kind} | scaling,
    )  # fmt: skip
    import_model(folder, tmp_path / "old")
    config = loaded(tmp_path / "new")[0].config
    assert loaded(tmp_path / "old")[0].config == config
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == kind
    if kind != "linear":
        assert config.rope_scaling.original_context_length == 64, "the context, by default"
        edit(folder / "config.json", original_max_position_embeddings=24)
        import_model(folder, tmp_path / "stretched")
        stretched = loaded(tmp_path / "stretched")[0].config.rope_scaling
        assert stretched is not None
        assert stretched.original_context_length == 24


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("nanochat", {"partial_rotary_factor": 0.5}, "only rotation of whole heads"),
        ("gpt2", {"num_attention_heads": 2}, "not understood.* num_attention_heads 2"),
        ("gpt_neox", {"head_dim": 8}, "not understood.* head_dim 8"),
    ],
)
def test_settings_that_transformers_reads_otherwise_are_refused(
    tmp_path: Path, family: str, values: dict[str, Any], message: str
) -> None:
    """transformers rotates whole heads of nanochat, and these two keys overrule GPT-2's and
    GPT-NeoX's own."""
    save_theirs(tmp_path / "theirs", family)
    edit(tmp_path / "theirs" / "config.json", **values)
    with pytest.raises(ConvertError, match=message):
        import_model(tmp_path / "theirs", tmp_path / "ours")


def test_numbers_beyond_the_dtype_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "changed")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": torch.full((32,), 1e5)}, folder / "model.safetensors")
    with pytest.raises(
        ConvertError, match=r"final_norm\.weight contains 1e\+05, which is more than float16"
    ):
        import_model(folder, tmp_path / "ours", dtype="float16")


def test_path_without_a_model_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    import_model(llama_folder, tmp_path / "ours")
    with pytest.raises(ConvertError, match="already"):
        import_model(tmp_path / "ours", tmp_path / "again")
    with pytest.raises(FileError, match="ours already exists: choose another path, or remove it"):
        import_model(llama_folder, tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConvertError, match=r"empty has no weight file .*; it holds nothing"):
        import_model(tmp_path / "empty", tmp_path / "again")
    with pytest.raises(ConvertError, match="nowhere does not exist"):
        import_model(tmp_path / "nowhere", tmp_path / "again")
    folder = shutil.copytree(llama_folder, tmp_path / "bare")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match=r"has no vocabulary .* --tokenizer"):
        import_model(folder, tmp_path / "again")
    (folder / "model.safetensors").rename(folder / "weights")
    with pytest.raises(ConvertError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        import_model(folder, tmp_path / "again")
    (folder / "weights").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConvertError, match=r"has no vocabulary .* --tokenizer"):
        import_model(folder, tmp_path / "again")  # safetensors by its first bytes
