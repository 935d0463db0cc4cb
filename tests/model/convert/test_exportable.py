"""`--exportable` states before training which formats the model can be exported to."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given, reject
from torch.testing import assert_close

from logitd.model.convert.exportable import describe, gguf_objections, hf_objections
from logitd.model.convert.exporting import export_model
from logitd.model.convert.family import family_of, nearest, objections
from logitd.model.convert.foreign import ConvertError
from logitd.model.text.tokenizer import END_OF_TEXT, Tokenizer
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.events import Event, Started, line
from logitd.model.training.trainer import train
from logitd.model.transformer.config import ConfigError, GPTConfig
from logitd.model.transformer.shapes import MODERN
from tests.model.convert.theirs import loaded
from tests.model.factories import (
    FAMILIES,
    byte_tokenizer,
    merging_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.model.shapes import shapes

SMALL: dict[str, Any] = {
    "n_layer": 2,
    "n_head": 2,
    "d_model": 16,
    "context_length": 16,
    "vocab_size": 300,
    "batch_size": 2,
    "eval_batches": 1,
    "sample_tokens": 1,
    "prompts": ("a",),
    "threads": 1,
    "exportable": True,
}
RUNS: dict[str, dict[str, Any]] = {
    "qwen3": {"preset": "tiny"},
    "llama": {"preset": "tiny", "qk_norm": False},
    "llama-biased": {"preset": "tiny", "qk_norm": False, "qkv_bias": True},
    "gpt2": {"preset": "nanogpt"},
    "gpt2-gelu_tanh": {"preset": "nanogpt", "activation": "gelu_tanh"},
    "gpt2-original": {"preset": "decoder-8x64"},
    "gpt_neox": {"preset": "nanogpt", "positions": "rotary", "residual": "parallel"},
}
"""Training flags by case name; each name begins with the type of the exported model."""


def config_of(shape: dict[str, Any]) -> GPTConfig:
    try:
        return tiny_config(**shape)
    except ConfigError:
        reject()


@given(shapes())
def test_nearest_shape_is_exportable_and_changes_only_objections(
    shape: dict[str, Any],
) -> None:
    config = config_of(shape)
    try:
        wanted = nearest(config)
    except ConvertError:
        assert objections(config)
        return
    assert objections(wanted) == []
    family_of(wanted)
    changed = {name for name in config.to_dict() if getattr(config, name) != getattr(wanted, name)}
    if not objections(config):
        assert changed == set()
    # Keys that depend on a change, and objections that appear once positions are rotary.
    assert changed <= {each.key for each in objections(config)} | {"d_ff", "rotary_dim"}
    assert wanted.n_layer == config.n_layer
    assert wanted.d_model == config.d_model


@given(shapes())
def test_every_objection_matters(shape: dict[str, Any]) -> None:
    """If all objections but one are resolved, the remaining one still prevents an export."""
    config = config_of(shape)
    found = objections(config)
    assume(len(found) > 1 and all(each.instead is not None for each in found))
    for kept in found:
        values = {each.key: each.instead for each in found if each is not kept}
        try:
            others = GPTConfig.from_dict({**config.to_dict(), **values})
        except ConfigError:
            continue
        assert kept.key in {each.key for each in objections(others)}


def test_export_error_lists_all_objections(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(n_layer=1, **MODERN, head_bias=True))
    save_tiny_checkpoint(tmp_path / "ours", gpt=gpt)
    with pytest.raises(ConvertError) as caught:
        export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    assert str(caught.value) == (
        "value_embeddings is True: no other architecture adds embeddings to values; head_bias is "
        "True: the heads of GPT-2 and Llama have none; activation is 'gelu_tanh': Llama's "
        "feed-forward is swiglu; the model cannot be exported; train it again with --exportable"
    )
    with pytest.raises(ConvertError) as caught:
        export_model(tmp_path / "ours", tmp_path / "theirs.gguf", to="gguf")
    for part in ("value_embeddings is", "head_bias is", "activation is", "llama.cpp has no name",
                 "the vocabulary has only single bytes"):  # fmt: skip
        assert part in str(caught.value)
    assert str(caught.value).endswith("; train it again with --exportable")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_gguf_objects_to_flags_of_added_tokens() -> None:
    bytes_alone = byte_tokenizer()
    tokenizer = Tokenizer(
        ranks=bytes_alone.ranks,
        pattern=bytes_alone.pattern,
        special_tokens={END_OF_TEXT: 256, "<|a|>": 257},
        added_flags={"<|a|>": ["rstrip"]},
        end_ids=[1, 2, 257],
    )
    found = " ".join(gguf_objections(tiny_config(**FAMILIES["llama"]), tokenizer, "any"))
    assert "have rstrip" in found
    assert "4 tokens end a text" in found


def test_gguf_objections_are_added_to_the_line() -> None:
    scaled = tiny_config(**FAMILIES["llama"], rope_scaling={"kind": "linear", "factor": 2.0})
    found = gguf_objections(scaled, byte_tokenizer(), None)
    assert [each[:12] for each in found] == ["rope_scaling", "llama.cpp ha", "the vocabula"]
    assert hf_objections(scaled, byte_tokenizer()) == []
    described = describe(scaled, merging_tokenizer())
    assert described.startswith(
        "export: --to hf writes this model, as llama, and --to gguf does not: "
    )
    assert "rope_scaling" in described
    assert "--pre" not in described


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(
        "".join(f"It was {i} and {i * i} days. She said: so be it.\n" for i in range(99))
    )
    return path


@pytest.mark.parametrize("name", RUNS)
def test_exportable_run_exports_to_every_promised_format(
    name: str, text: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    config = TrainingConfig(
        **{**SMALL, **RUNS[name]}, data=(str(text),), out=tmp_path / "run", steps=3
    )
    run = train(config, events.append).run
    (export,) = (event.export for event in events if isinstance(event, Started))
    info, gpt = loaded(run / "best")
    # 1) As a Hugging Face folder: the same logits.
    export_model(run / "best", tmp_path / "theirs", to="hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert model.config.model_type == name.partition("-")[0]
    assert export.startswith("export: --to hf writes this model, as ")
    ids = info.tokenizer.encode("She said: 12 days.\n")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")("She said: 12 days.\n")[
        "input_ids"
    ] == list(ids)
    row = torch.tensor([ids])
    assert_close(model(row).logits, gpt(row).logits, atol=1e-4, rtol=1e-4)
    # 2) As GGUF, if and only if that was promised.
    promised = "--to gguf with --pre" in export
    assert promised is (name in ("qwen3", "llama", "llama-biased", "gpt2-gelu_tanh"))
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    if not promised:
        with pytest.raises(ConvertError, match="export it with --to hf"):
            export_model(run / "best", tmp_path / "model.gguf", to="gguf", pre="qwen2")
        return
    with pytest.raises(ConvertError, match="--pre"):
        export_model(run / "best", tmp_path / "model.gguf", to="gguf")
    export_model(run / "best", tmp_path / "model.gguf", to="gguf", pre="qwen2")
    tensors = {t.name: t for t in gguf.GGUFReader(str(tmp_path / "model.gguf")).tensors}
    embedding = gpt.state_dict()["token_embedding.weight"][: info.config.vocab_size]
    assert torch.equal(torch.tensor(tensors["token_embd.weight"].data), embedding)


def test_export_is_mentioned_only_with_the_flag_which_fine_tuning_refuses(
    text: Path, tmp_path: Path
) -> None:
    events: list[Event] = []
    values = {**SMALL, "exportable": False}
    train(TrainingConfig(**values, data=(str(text),), out=tmp_path / "run", steps=1), events.append)
    (started,) = (event for event in events if isinstance(event, Started))
    assert "export:" not in line(started)
    config = TrainingConfig(from_checkpoint=tmp_path / "run" / "best", exportable=True, steps=1)
    with pytest.raises(TrainingError, match="the checkpoint's shape cannot be exported, and"):
        train(config.model_copy(update={"out": tmp_path / "tuned", "data": (str(text),)}))


@pytest.mark.parametrize(
    ("given_values", "pattern"),
    [
        ({"value_embeddings": True}, "value_embeddings .*True.*False"),
        (
            {"activation": "gelu", "value_embeddings": True},
            "activation .*gelu.*value_embeddings .*T",
        ),
        ({"norm_position": "post"}, "norm_position .*'post'.*'pre'"),
        (
            {"logit_softcap": 15.0},
            "logit_softcap is 15.0: no exported architecture has it; no other value",
        ),
        ({"smear": True}, "smear .*True.*False.*no exported"),
        ({"preset": "decoder-8x64", "n_kv_head": 2}, "n_kv_head .*2.*4"),
        ({"n_head": 3, "head_dim": 16, "qk_norm": False}, "n_head is 3: .*; no other value"),
    ],
)
def test_unexportable_flags_are_refused_by_name(given_values: dict[str, Any], pattern: str) -> None:
    with pytest.raises(TrainingError, match=f"^--exportable: .*{pattern}"):
        resolve(TrainingConfig(**given_values, exportable=True))


def test_exportable_flags_are_kept() -> None:
    asked = TrainingConfig(exportable=True, d_ff=320, n_kv_head=1, value_embeddings=False)
    model = resolve(asked).model
    assert (model.d_ff, model.n_kv_head, model.activation) == (320, 1, "swiglu")
    # Without a given width, the model has about as many parameters as before.
    model = resolve(TrainingConfig(exportable=True)).model
    assert model.d_ff == 352
    assert abs(3 * model.d_ff / (2 * 512) - 1) < 0.05
    untouched = resolve(TrainingConfig(preset="nanogpt", exportable=True))
    assert untouched.model == resolve(TrainingConfig(preset="nanogpt")).model
