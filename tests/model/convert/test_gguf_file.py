"""GGUF files: read back by `gguf`, and run by llama.cpp if it is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model.convert.exporting import export_model
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.tokenizer import QWEN2_PATTERN
from logitd.model.convert.importing import import_model
from logitd.model.files import FileError
from tests.model.convert.theirs import (
    SAMPLE,
    loaded,
    save_theirs,
    their_tokenizer,
)
from tests.model.factories import FAMILIES as OUR_FAMILIES
from tests.model.factories import byte_tokenizer, save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.model.full_disk import files_of_at_most

FAMILIES = ["gpt2", "llama", "llama-biases", "qwen2", "qwen3"]


def export(family: str, path: Path, **options: Any) -> Path:
    """Import a tiny model of `transformers` to `ours`, and export it as GGUF."""
    pattern = None if family == "gpt2" else QWEN2_PATTERN
    save_theirs(path / "theirs", family, tokenizer=their_tokenizer(pattern=pattern))
    import_model(path / "theirs", path / "ours")
    export_model(path / "ours", path / "model.gguf", to="gguf", **options)
    return path / "model.gguf"


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_values_are_read_back(family: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    reader = gguf.GGUFReader(str(export(family, tmp_path)))
    info, gpt = loaded(tmp_path / "ours")
    arch = family.partition("-")[0]
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.architecture"] == arch
    assert facts[f"{arch}.block_count"] == 2
    assert facts[f"{arch}.context_length"] == 64
    assert facts["tokenizer.ggml.pre"] == ("gpt-2" if arch == "gpt2" else "qwen2")
    assert len(facts["tokenizer.ggml.tokens"]) == info.config.vocab_size == 382
    assert facts["tokenizer.ggml.tokens"][-2:] == ["<|endoftext|>", "<|user|>"]
    assert facts["tokenizer.ggml.token_type"][-3:] == [1, 3, 3]
    assert len(facts["tokenizer.ggml.merges"]) == 380 - 256
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert len(stored) == len(reader.tensors)
    known = gguf.MODEL_TENSORS[{name: arch_ for arch_, name in gguf.MODEL_ARCH_NAMES.items()}[arch]]
    names = {gguf.TENSOR_NAMES[kind].replace("{bid}", str(i)) for kind in known for i in (0, 1)}
    assert {name.rpartition(".")[0] for name in stored} <= names
    assert ("output.weight" in stored) is not info.config.tied_head
    state = gpt.state_dict()
    for theirs, expected in {
        "token_embd.weight": state["token_embedding.weight"][:382],
        "blk.1.ffn_down.weight": state["blocks.1.mlp_down.weight"],
        "blk.0.attn_output.weight": state["blocks.0.attention_out.weight"],
        "output_norm.weight": state["final_norm.weight"],
    }.items():
        assert stored[theirs].tensor_type == gguf.GGMLQuantizationType.F32
        np.testing.assert_array_equal(np.array(stored[theirs].data), expected.numpy())
    queries = state["blocks.1.qkv.weight"]
    if arch == "gpt2":
        np.testing.assert_array_equal(np.array(stored["blk.1.attn_qkv.weight"].data), queries)
        return
    queries = queries[: info.config.n_head * info.config.head_dim]
    heads = queries.view(info.config.n_head, 2, -1, queries.shape[1])
    expected = heads.transpose(1, 2).reshape(queries.shape) if arch == "llama" else queries
    np.testing.assert_array_equal(np.array(stored["blk.1.attn_q.weight"].data), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_matrices_are_rounded_and_norms_are_not(dtype: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    reader = gguf.GGUFReader(str(export("gpt2", tmp_path, dtype=dtype)))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == {"bfloat16": "BF16", "float16": "F16"}[dtype]
    assert {kinds[name] for name in kinds if "norm" in name or "bias" in name} == {"F32"}
    assert kinds["position_embd.weight"] == "F32"


def test_unsupported_gguf_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    save_tiny_checkpoint(tmp_path / "own")
    with pytest.raises(ConvertError, match=r"llama\.cpp has no name .* --pre qwen2"):
        export_model(tmp_path / "own", tmp_path / "x.gguf", to="gguf")
    with pytest.raises(ConvertError, match="the vocabulary has only single bytes"):
        export_model(tmp_path / "own", tmp_path / "x.gguf", to="gguf", pre="qwen2")
    exact = tiny_gpt(tiny_config(n_layer=1, activation="gelu"))
    save_tiny_checkpoint(tmp_path / "exact", gpt=exact, tokenizer=byte_tokenizer())
    with pytest.raises(ConvertError, match=r"activation is 'gelu': llama\.cpp computes"):
        export_model(tmp_path / "exact", tmp_path / "x.gguf", to="gguf", pre="gpt-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact", "own"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = llama_cpp.Llama(
        str(export(family, tmp_path)),
        n_ctx=64,
        logits_all=True,
        verbose=False,
        n_threads=1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )
    info, gpt = loaded(tmp_path / "ours")
    ids = info.tokenizer.encode(SAMPLE)
    assert model.tokenize(SAMPLE.encode(), add_bos=False) == ids
    model.eval(ids)
    theirs = torch.tensor(np.array(model.scores[: len(ids)]))
    ours = gpt(torch.tensor([ids])).logits[0]
    assert ours.std() > 0.3
    # Activations are looked up in half precision there.
    torch.testing.assert_close(theirs, ours, atol=1e-2, rtol=0)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"positions": "rotary"}, "positions are 'rotary' and norm is 'layernorm': that is GPT-N"),
        (
            {**OUR_FAMILIES["llama"], "rope_scaling": {"kind": "linear", "factor": 2.0}},
            r'rope_scaling is \{"kind": "linear", "factor": 2.0\}: scaled rotary positions',
        ),
    ],
)
def test_flags_of_the_other_format_are_refused(
    shape: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    gpt = tiny_gpt(tiny_config(n_layer=1, **shape))
    save_tiny_checkpoint(tmp_path / "ours", gpt=gpt)
    with pytest.raises(ConvertError, match=f"{sentence}.*; export it with --to hf$"):
        export_model(tmp_path / "ours", tmp_path / "model.gguf", to="gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    """The gguf package writes with NumPy, whose error may state only a number of bytes."""
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    export("llama", tmp_path).unlink()
    whole = sorted(tmp_path.iterdir())
    with (
        files_of_at_most(30_000),
        pytest.raises(FileError, match=r"model\.gguf cannot be written: .*(too large|only a part)"),
    ):
        export_model(tmp_path / "ours", tmp_path / "model.gguf", to="gguf")
    assert sorted(tmp_path.iterdir()) == whole
