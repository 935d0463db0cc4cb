"""Weights files are recognized by their first bytes (NumPy, JSON, llama2.c) or by their names.
Intact files of other programs were once called truncated or damaged."""

import gzip
import json
import pickle
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.convert.by_role.map_file import read_map_file
from logitd.model.convert.by_role.read import RoleOptions
from logitd.model.convert.containers import read_npz
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model
from logitd.model.convert.state_file import find_state_file
from tests.model.convert.by_role.scheme import given_logits, some_ids, state
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.common import CONTEXT, HEADS, LAYERS, VOCAB, WIDTH

BOOK = {"n_head": HEADS, "norm_position": "pre", "final_norm": True, "activation": "gelu_tanh",
        "score_scale": "head_dim"}  # fmt: skip
HIDDEN, KV_HEADS = 56, 2


def imported(source: Path, tmp_path: Path, roles: RoleOptions | None = None) -> Tensor:
    """The logits of an imported file for `some_ids`."""
    shutil.rmtree(tmp_path / "ours", ignore_errors=True)
    import_model(source, tmp_path / "ours", tokenizer="none", roles=roles)
    device = torch.device("cpu")
    _, gpt = load_checkpoint(tmp_path / "ours", device=device, dtype=torch.float32)
    with torch.no_grad():
        return gpt(some_ids()).logits[..., :VOCAB]


def write_arrays(path: Path, tensors: dict[str, Tensor]) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(path, **arrays)


def write_lists(path: Path, tensors: dict[str, Tensor]) -> None:
    lists = {name: tensor.tolist() for name, tensor in tensors.items()}
    path.write_text(json.dumps({"kind": "gpt", "parameters": lists}), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("weights.npz", write_arrays),
        ("weights.json", write_lists),
        ("weights.bin", lambda path, tensors: save_file(tensors, path)),
    ],
)
def test_container_holds_the_same_model(name: str, write: object, tmp_path: Path) -> None:
    scheme = SCHEMES["book"]
    model = scheme.model()
    write(tmp_path / name, state(model))  # type: ignore[operator]
    logits = imported(tmp_path / name, tmp_path, RoleOptions(answers=BOOK))
    assert torch.allclose(logits, given_logits(scheme, model, some_ids()), atol=1e-4)


def write_llama2c(path: Path, tensors: dict[str, Tensor], version: int, *, shared: bool) -> None:
    """A file as llama2.c's export.py writes it."""

    def all_layers(name: str) -> list[Tensor]:
        return [tensors[f"layers.{layer}.{name}.weight"] for layer in range(LAYERS)]

    vocab = VOCAB if shared or version else -VOCAB
    numbers = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, vocab, CONTEXT)
    norms = [*all_layers("attention_norm")], [*all_layers("ffn_norm")]
    attention = [t for name in ("wq", "wk", "wv", "wo") for t in all_layers(f"attention.{name}")]
    mlp = [t for name in ("w1", "w2", "w3") for t in all_layers(f"feed_forward.{name}")]
    embedding, final = tensors["tok_embeddings.weight"], tensors["norm.weight"]
    head = [] if shared else [tensors["output.weight"]]
    if version:
        start = struct.pack("<2I", 0x616B3432, version) + numbers + bytes([shared])
        parts = [*norms[0], *norms[1], final, embedding, *attention, *mlp, *head]
        raw = start.ljust(256, b"\0")
    else:
        table = torch.zeros(CONTEXT, WIDTH // HEADS // 2)
        parts = [embedding, *norms[0], *attention, *norms[1], *mlp, final, table, table, *head]
        raw = numbers
    path.write_bytes(raw + b"".join(part.numpy().tobytes() for part in parts))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("version", [0, 1])
def test_llama2c_file_keeps_the_logits(version: int, shared: bool, tmp_path: Path) -> None:
    scheme = SCHEMES["llama2.c"]
    model = scheme.model()
    tensors = state(model)
    ids = some_ids()
    expected = given_logits(scheme, model, ids)
    if not shared:  # scaled, so that it differs from the embedding
        tensors["output.weight"] = 2 * tensors["tok_embeddings.weight"]
        expected = 2 * expected
    write_llama2c(tmp_path / "model.bin", tensors, version, shared=shared)
    logits = imported(tmp_path / "model.bin", tmp_path)
    assert torch.allclose(logits, expected, atol=1e-4)


def test_llama2c_files_of_another_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    write_llama2c(path, state(SCHEMES["llama2.c"].model()), 1, shared=True)
    raw = path.read_bytes()
    path.write_bytes(raw[:-4])
    with pytest.raises(ConvertError, match=r"its header .* needs [\d,]+ bytes: it is damaged"):
        imported(path, tmp_path)
    path.write_bytes(raw[:4] + b"\2" + raw[5:])
    with pytest.raises(ConvertError, match="version 2; only versions 0 and 1 can be imported"):
        imported(path, tmp_path)


def equal_names_npz(path: Path) -> None:
    arrays: dict[str, Any] = {"h/w": np.zeros((2, 2)), "h.w": np.ones((2, 2))}
    np.savez(path, **arrays)


def hollow_npz(path: Path) -> None:
    np.savez(path, a=np.array([{"x": 1}], dtype=object))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: path.write_bytes(gzip.compress(b"x")), "compressed with gzip: unpack it"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n" + bytes(99)), "an HDF5 file"),
        (lambda path: path.write_bytes(b"\x93NUMPY\1\0" + bytes(99)), "a single array of NumPy"),
        (lambda path: path.write_bytes(pickle.dumps({"w": np.ones(3)})), "a pickle of NumPy arra"),
        (hollow_npz, r"pickled objects; save plain arrays"),
        (equal_names_npz, r"names differ only in / and \."),
        (lambda path: path.write_text('{"a": [1, [2]]}'), "JSON without weights"),
    ],
    ids=["gzip", "hdf5", "npy", "pickle of arrays", "npz of objects", "npz of equal names", "json"],
)
def test_other_formats_are_named_and_kept(write: object, sentence: str, tmp_path: Path) -> None:
    """No message suggests writing over the source file."""
    path = tmp_path / "params.npz"
    write(path)  # type: ignore[operator]
    path = path.rename(tmp_path / "params.pkl")
    with pytest.raises(ConvertError, match=sentence) as refusal:
        imported(path, tmp_path)
    said = str(refusal.value)
    assert "truncated" not in said
    assert "'params.pkl')" not in said


def test_files_of_a_trainer_are_not_weights(tmp_path: Path) -> None:
    """The Trainer of transformers writes such files next to every model."""
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth",
                 "scaler.pt", "tokenizer.bin", "data.npz"):  # fmt: skip
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "gpt.pt").write_bytes(b"x")
    assert find_state_file(tmp_path) == tmp_path / "gpt.pt"


@pytest.mark.parametrize("role", ["query", "attention_out", "mlp_norm", "mlp_up", "head"])
def test_partial_map_completes_known_names(role: str, tmp_path: Path) -> None:
    scheme = SCHEMES["book"]
    model = scheme.model()
    pattern, bias = (scheme.names().get((role, part), "") for part in ("weight", "bias"))
    tensors: dict[str, Tensor] = {}
    for name, tensor in state(model).items():
        for layer in range(LAYERS):
            number = str(layer)
            for old, new in ((pattern, "strange.weight"), (bias, "strange.bias")):
                if old and name == old.replace("{N}", number):
                    name = f"trf_blocks.{number}.{new}" if "{N}" in old else new
        tensors[name] = tensor
    torch.save(tensors, tmp_path / "gpt.pt")
    place = "trf_blocks.{N}.strange" if "{N}" in pattern else "strange"
    text = f'[tensors]\n{role}.weight = "{place}.weight"\n'
    text += f'{role}.bias = "{place}.bias"\n' * bool(bias)
    (tmp_path / "gpt.toml").write_text(text, encoding="utf-8")
    given = read_map_file(tmp_path / "gpt.toml")
    roles = RoleOptions(answers=BOOK, map_file=given)
    logits = imported(tmp_path / "gpt.pt", tmp_path, roles)
    assert torch.allclose(logits, given_logits(scheme, model, some_ids()), atol=1e-4)


def test_missing_role_is_named_in_a_draft(tmp_path: Path) -> None:
    tensors = {
        name.replace("W_query", "W_ask"): tensor
        for name, tensor in state(SCHEMES["book"].model()).items()
    }
    torch.save(tensors, tmp_path / "gpt.pt")
    draft = tmp_path / "draft.toml"
    with pytest.raises(ConvertError, match=r"a layer lacks query; .*W_ask.*draft of a map"):
        imported(tmp_path / "gpt.pt", tmp_path, RoleOptions(draft=draft))
    text = draft.read_text(encoding="utf-8")
    assert 'key.weight = "trf_blocks.{N}.att.W_key.weight"' in text
    line = '# ROLE.weight = "trf_blocks.{N}.att.W_ask.weight"  # [32, 32]'
    assert line in text
    draft.write_text(text.replace(line, line[2:].replace("ROLE", "query")), encoding="utf-8")
    roles = RoleOptions(answers=BOOK, map_file=read_map_file(draft))
    assert imported(tmp_path / "gpt.pt", tmp_path, roles).shape[-1] == VOCAB


def test_all_open_questions_are_asked_at_once(tmp_path: Path) -> None:
    """The import once asked for the vocabulary first, and for computation and settings only in
    later runs."""
    tensors = state(SCHEMES["book"].model())
    torch.save({"model": tensors, "config": {"logit_cap": 30.0}}, tmp_path / "gpt.pt")
    with pytest.raises(ConvertError, match="--activation") as refusal:
        import_model(tmp_path / "gpt.pt", tmp_path / "ours")
    for asked in ("--n-head", "--ignore-setting logit_cap", "has no vocabulary"):
        assert asked in str(refusal.value)


def test_shared_norm_of_both_sublayers_can_be_saved(tmp_path: Path) -> None:
    """safetensors refuses to save a tensor under two names, so the import of such a model once
    failed."""
    scheme = SCHEMES["one norm for both"]
    model = scheme.model()
    torch.save(state(model), tmp_path / "gpt.pt")
    how = {name: value for name, value in scheme.how.items() if name != "context_length"}
    answers = {**BOOK, "activation": "gelu", "residual": "parallel", **how}
    logits = imported(tmp_path / "gpt.pt", tmp_path, RoleOptions(answers=answers))
    assert torch.allclose(logits, given_logits(scheme, model, some_ids()), atol=1e-4)


@pytest.mark.parametrize("final_norm", [True, False])
def test_weightless_norms_become_ones(final_norm: bool, tmp_path: Path) -> None:
    """Models with such norms were once refused: "its layers have no norms with weights"."""
    scheme = SCHEMES["book"]
    scheme = replace(scheme, how={**scheme.how, "final_norm": final_norm})
    model = scheme.model()
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)
    kept = {name: tensor for name, tensor in state(model).items() if "norm" not in name}
    torch.save(kept, tmp_path / "gpt.pt")
    with pytest.raises(ConvertError, match=r"--norm rmsnorm\|layernorm"):
        imported(tmp_path / "gpt.pt", tmp_path, RoleOptions(answers=BOOK))
    answers = {**BOOK, "norm": "layernorm", "final_norm": final_norm}
    logits = imported(tmp_path / "gpt.pt", tmp_path, RoleOptions(answers=answers))
    assert torch.allclose(logits, given_logits(scheme, model, some_ids()), atol=1e-4)


def test_arrays_of_bfloat16_are_named(tmp_path: Path) -> None:
    """NumPy stores them as bytes without a type; the file was called damaged."""
    np.savez(tmp_path / "w.npz", a=np.zeros((2, 3), np.int16).view("V2"))
    with pytest.raises(ConvertError, match=r"w\.npz has arrays of \|V2.*astype\('float32'\)"):
        read_npz(tmp_path / "w.npz")
