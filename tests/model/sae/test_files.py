"""Folders in SAELens' format, written by hand, and compared with SAELens itself if it is
installed."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from logitd.model.sae.files import (
    AutoencoderError,
    FeatureFacts,
    read_autoencoder,
    write_autoencoder,
)
from tests.model.factories import tiny_config
from tests.model.full_disk import files_of_at_most

WIDTH, COUNT, K = 32, 20, 5
HOOK = "blocks.1.hook_resid_post"


def tensors(*, threshold: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "W_enc": (WIDTH, COUNT),
        "b_enc": (COUNT,),
        "W_dec": (COUNT, WIDTH),
        "b_dec": (WIDTH,),
    }
    if threshold:
        shapes["threshold"] = (COUNT,)
    return {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def settings(architecture: str, **changes: Any) -> dict[str, Any]:
    """A cfg.json of version 6."""
    values: dict[str, Any] = {
        "architecture": architecture,
        "d_in": WIDTH,
        "d_sae": COUNT,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.12.1", "hook_name": HOOK, "hook_head_index": None},
    }
    if architecture == "topk":
        values |= {"k": K, "rescale_acts_by_decoder_norm": False}
    return values | changes


def older(**changes: Any) -> dict[str, Any]:
    """A cfg.json of version 3."""
    values = {
        "architecture": "standard",
        "d_in": WIDTH,
        "d_sae": COUNT,
        "activation_fn_str": "relu",
        "apply_b_dec_to_input": True,
        "finetuning_scaling_factor": False,
        "hook_name": "blocks.2.hook_resid_pre",
        "hook_head_index": None,
        "normalize_activations": "none",
        "dtype": "torch.float32",
        "prepend_bos": True,
    }
    return values | changes


def folder(path: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    path.mkdir()
    (path / "cfg.json").write_text(json.dumps(config))
    jumps = config.get("architecture") == "jumprelu"
    save_file(weights or tensors(threshold=jumps), path / "sae_weights.safetensors")
    return path


def values() -> Tensor:
    return torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(9))


def by_hand(config: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and reconstruction by SAELens' definitions."""
    of = tensors(threshold=config["architecture"] == "jumprelu")
    norms = of["W_dec"].norm(dim=1) if config.get("rescale_acts_by_decoder_norm") else 1.0
    shifted = x - of["b_dec"] if config["apply_b_dec_to_input"] else x
    before = (shifted @ of["W_enc"] + of["b_enc"]) * norms
    features = before.relu()
    if config["architecture"] == "topk":
        least = before.topk(config["k"], dim=1).values[:, -1:]
        features = features * (before >= least)
    if config["architecture"] == "jumprelu":
        features = features * (before > of["threshold"])
    return features, features / norms @ of["W_dec"] + of["b_dec"]


FORMS = {
    "standard": settings("standard"),
    "uncentered": settings("standard", apply_b_dec_to_input=False),
    "topk": settings("topk"),
    "rescaled": settings("topk", rescale_acts_by_decoder_norm=True),
    "jumprelu": settings("jumprelu"),
    "older": older(),
    "older topk": older(activation_fn_str="topk", activation_fn_kwargs={"k": K}, hook_point=HOOK),
}


@pytest.mark.parametrize("form", FORMS)
def test_autoencoders_of_saelens_are_read(tmp_path: Path, form: str) -> None:
    config = FORMS[form]
    stored = read_autoencoder(folder(tmp_path / "sae", config))
    if form == "older topk":
        config = config | {"architecture": "topk", "k": K}
    features, rebuilt = by_hand(config, values())
    encoded = stored.autoencoder.encode(values())
    assert_close(encoded, features, atol=1e-5, rtol=1e-5)
    assert_close(stored.autoencoder.decode(encoded), rebuilt, atol=1e-5, rtol=1e-5)
    served = stored.features("mine", tiny_config())
    assert (served.layer, served.stage, served.count) == (1, "output", COUNT)


@pytest.mark.parametrize("form", FORMS)
def test_saelens_computes_the_same(tmp_path: Path, form: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sae_lens = pytest.importorskip("sae_lens", reason="the package sae-lens is not installed")
        path = folder(tmp_path / "sae", FORMS[form])
        theirs = sae_lens.SAE.load_from_disk(path, device="cpu")
    ours = read_autoencoder(path).autoencoder
    with torch.no_grad():
        features = theirs.encode(values())
        assert_close(ours.encode(values()), features, atol=1e-5, rtol=1e-5)
        rebuilt = theirs.decode(features)
    assert_close(ours.decode(ours.encode(values())), rebuilt, atol=1e-5, rtol=1e-5)


def written(path: Path) -> Path:
    facts = FeatureFacts(
        density=np.full(COUNT, 0.25, np.float32),
        ids=np.arange(COUNT * 12, dtype=np.int32).reshape(COUNT, 3, 4),
        activations=np.ones((COUNT, 3, 4), np.float32),
    )
    record = {"weights_sha256": "abc", "figures": {"active": 4.5}}
    write_autoencoder(path, tensors(), k=K, hook=HOOK, record=record, facts=facts)
    return path


def test_written_folder_is_read_back(tmp_path: Path) -> None:
    stored = read_autoencoder(written(tmp_path / "mine"))
    features, _ = by_hand(settings("topk"), values())
    assert_close(stored.autoencoder.encode(values()), features, atol=1e-5, rtol=1e-5)
    assert stored.record["figures"] == {"active": 4.5}
    assert stored.facts is not None
    assert stored.facts.ids[1, 0].tolist() == [12, 13, 14, 15]


def test_saelens_reads_a_written_folder(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sae_lens = pytest.importorskip("sae_lens", reason="the package sae-lens is not installed")
        theirs = sae_lens.SAE.load_from_disk(written(tmp_path / "mine"), device="cpu")
    assert theirs.cfg.metadata.hook_name == HOOK
    with torch.no_grad():
        features = theirs.encode(values())
    expected, _ = by_hand(settings("topk"), values())
    assert_close(features, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (settings("gated"), "architecture.*'gated'.*topk"),
        (settings("topk", normalize_activations="layer_norm"), "normalize_activations.*layer_norm"),
        (settings("topk", reshape_activations="hook_z"), "reshape_activations.*hook_z"),
        (settings("topk", k=COUNT + 1), f"k is {COUNT + 1}.*{COUNT}"),
        (settings("topk", d_sae=COUNT - 1), f"W_enc.*{COUNT}.*{COUNT - 1}"),
        (settings("standard"), "threshold"),
        (older(activation_fn_str="tanh-relu"), "activation_fn.*tanh-relu"),
        (settings("topk", k=True), "k is True.*whole number"),
        (settings("topk", d_in=True), "d_in is True.*whole number"),
        (settings("topk", apply_b_dec_to_input="false"), "apply_b_dec_to_input is 'false'"),
        (settings("topk", rescale_acts_by_decoder_norm=1), "rescale.* is 1; it must be true"),
        (older(activation_fn_str="topk", activation_fn_kwargs=[K]), "k is None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_autoencoders_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    weights = tensors(threshold="threshold" in expected)
    with pytest.raises(AutoencoderError, match=expected):
        read_autoencoder(folder(tmp_path / "sae", config, weights))


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AutoencoderError, match=r"nowhere.*cfg\.json"):
        read_autoencoder(tmp_path / "nowhere")
    infinite = tensors()
    infinite["b_enc"][3] = torch.inf
    with pytest.raises(AutoencoderError, match=r"b_enc.*finite"):
        read_autoencoder(folder(tmp_path / "infinite", settings("topk"), infinite))
    cut = folder(tmp_path / "cut", settings("topk"))
    weights = cut / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(AutoencoderError, match=re.escape(str(cut))):
        read_autoencoder(cut)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"W_enc": tensors()["W_enc"].to(torch.float8_e4m3fn)}, "W_enc.*float8_e4m3fn.*16 to 64"),
        ({"W_enc": tensors()["W_enc"].double() * 1e300}, "_enc has .* not finite in float32"),
        ({"W_dec": torch.zeros(COUNT, WIDTH)}, "W_dec.*not finite in float32"),
    ],
)
def test_weights_that_cannot_be_served_are_refused(
    tmp_path: Path, changes: dict[str, Tensor], expected: str
) -> None:
    config = settings("topk", rescale_acts_by_decoder_norm=True)
    with pytest.raises(AutoencoderError, match=expected):
        read_autoencoder(folder(tmp_path / "sae", config, tensors() | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"more": torch.zeros(3)}, "more.*expected density"),
        ({"ids": torch.zeros(COUNT, 3, 4)}, r"ids \(torch.float32\).*ids \(int32\)"),
        ({"density": torch.zeros(COUNT).bfloat16()}, "density.*bfloat16"),
        ({"density": torch.full((COUNT,), torch.nan)}, "not finite"),
        ({"density": torch.zeros(COUNT + 1)}, "shapes do not match"),
        (
            {"ids": torch.zeros(COUNT, 0, 4).int(), "activations": torch.zeros(COUNT, 0, 4)},
            "shapes do not match",
        ),
    ],
)
def test_damaged_facts_are_refused(
    tmp_path: Path, changes: dict[str, Tensor], expected: str
) -> None:
    path = written(tmp_path / "mine") / "features.safetensors"
    save_file(load_file(path) | changes, path)
    with pytest.raises(AutoencoderError, match=f"mine is not.*features.*{expected}"):
        read_autoencoder(path.parent)


@pytest.mark.parametrize(
    ("hook", "width", "expected"),
    [
        ("blocks.9.hook_resid_post", 32, "hook_name.*blocks.9"),
        ("blocks.1.attn.hook_z", 32, "one axis"),
        ("blocks.1.hook_resid_post", 64, "width 32.*64"),
    ],
)
def test_autoencoders_of_other_models_are_refused(
    tmp_path: Path, hook: str, width: int, expected: str
) -> None:
    stored = read_autoencoder(
        folder(tmp_path / "sae", settings("standard", metadata={"hook_name": hook}))
    )
    with pytest.raises(AutoencoderError, match=expected):
        stored.features("mine", tiny_config(d_model=width))


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        written(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []
