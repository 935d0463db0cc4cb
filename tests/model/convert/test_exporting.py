"""Export: `transformers` loads the written files and computes the same logits, and the files can be
imported again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch.testing import assert_close

from logitd.model.checkpoint.checkpoint import CheckpointError
from logitd.model.convert.exporting import export_model
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.tokenizer import QWEN2_PATTERN
from logitd.model.convert.importing import import_model
from logitd.model.convert.vocabulary.words import character_tokenizer, word_tokenizer
from logitd.model.files import FileError
from logitd.model.llm import LLM, SamplingParams
from logitd.model.transformer.shapes import MODERN, ORIGINAL
from tests.model.convert.theirs import SAMPLE, loaded, save_theirs, their_tokenizer
from tests.model.factories import (
    CHAT_TEMPLATE,
    FAMILIES,
    chat_tokenizer,
    merging_tokenizer,
    save_tiny_checkpoint,
    tiny_config,
    tiny_gpt,
)
from tests.model.full_disk import files_of_at_most
from tests.model.shapes import SCALINGS

LLAMA = FAMILIES["llama"]
NEOX: Mapping[str, Any] = {"positions": "rotary", "activation": "gelu", "tied_head": False}
SHAPES: dict[str, Mapping[str, Any]] = {
    "gpt2": {},
    "gpt2-nanogpt": {"bias": False, "qkv_bias": False, "activation": "gelu"},
    "gpt2-untied": {"tied_head": False, "d_ff": 48, "activation": "relu2"},
    "gpt2-sinusoidal": {"positions": "sinusoidal", "activation": "relu"},
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tied_head": True, "rope_theta": 500.0, "norm_eps": 1e-5},
    "llama-biased": {**LLAMA, "bias": True, "head_dim": 12},
    "llama-all-biased": {**LLAMA, "bias": True, "qkv_bias": True},
    "llama-qwen2": {**LLAMA, "qkv_bias": True},
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 16},
    "qwen3-biased": {**LLAMA, "qk_norm": True, "qkv_bias": True, "tied_head": True},
    "llama-linear": {**LLAMA, "rope_scaling": SCALINGS["linear"]},
    "llama-llama3": {**LLAMA, "rope_theta": 500.0, "rope_scaling": SCALINGS["llama3"]},
    "llama-yarn": {**LLAMA, "rope_theta": 500.0, "rope_scaling": SCALINGS["yarn"]},
    "qwen3-yarn": {
        **LLAMA,
        "qk_norm": True,
        "rope_scaling": {**(SCALINGS["yarn"] or {}), "attention_factor": 0.9, "truncate": False},
    },
    "gpt_neox": {**NEOX, "residual": "parallel", "rotary_dim": 2},
    "gpt_neox-sequential": {**NEOX, "residual": "sequential", "qkv_bias": False},
    "gpt_neox-unbiased": {**NEOX, "residual": "parallel", "bias": False, "qkv_bias": False},
    "gpt_neox-odd": {
        **NEOX,
        "tied_head": True,
        "residual": "parallel",
        "rope_theta": 500.0,
        "n_head": 2,
        "d_model": 44,
        "rotary_dim": 6,
        "rope_scaling": SCALINGS["yarn"],
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_computes_the_same_and_import_returns(shape: str, tmp_path: Path) -> None:
    tokenizer = merging_tokenizer()
    gpt = tiny_gpt(tiny_config(vocab_size=tokenizer.vocab_size, n_layer=2, **SHAPES[shape]))
    save_tiny_checkpoint(tmp_path / "ours", gpt=gpt, tokenizer=tokenizer)
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert model.config.model_type == shape.partition("-")[0]
    assert model.get_input_embeddings().weight.shape[0] == tokenizer.vocab_size  # no padding
    text = 'null {"a": 12.5e}, [abc]\n\n é€😀 def'
    ids = tokenizer.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.end_of_text
    given = torch.tensor([ids])
    logits = gpt(given).logits
    assert logits.std() > 0.5
    assert_close(model(given).logits, logits, atol=1e-4, rtol=1e-4)
    import_model(tmp_path / "theirs", tmp_path / "again")
    info, again = loaded(tmp_path / "again")
    assert info.tokenizer.encode(text) == ids
    assert_close(again(given).logits, logits, atol=1e-4, rtol=1e-4)


def test_added_tokens_and_ends_come_here_and_go(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    tokenizer = their_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("   ", normalized=True)])
    save_theirs(tmp_path / "source", "llama", tokenizer=tokenizer)
    ends = '{"eos_token_id": [381, 380]}'
    (tmp_path / "source" / "generation_config.json").write_text(ends, encoding="utf-8")
    info = import_model(tmp_path / "source", tmp_path / "ours")
    text = "a      b"
    assert info.tokenizer.encode(text) == tokenizer.encode(text).ids == [64, 382, 382, 65]
    with LLM(tmp_path / "ours") as llm:
        for end in (380, 381):
            bias = SamplingParams(max_tokens=5, temperature=0, seed=1, logit_bias={end: 50.0})
            assert llm.generate([[1, 2]], bias)[0].token_ids == (end,)
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs(text).input_ids == tokenizer.encode(text).ids
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "theirs")
    assert settings.eos_token_id == [381, 380]
    export_model(tmp_path / "ours", tmp_path / "model.gguf", to="gguf")
    fields = gguf.GGUFReader(str(tmp_path / "model.gguf")).fields
    facts = {name.rpartition(".")[2]: field.contents() for name, field in fields.items()}
    assert (facts["eos_token_id"], facts["eot_token_id"]) == (381, 380)
    assert (facts["tokens"][382], facts["token_type"][382]) == ("   ", 4)


def test_qwen2_split_pattern_is_kept(tmp_path: Path) -> None:
    save_theirs(tmp_path / "source", "qwen2", tokenizer=their_tokenizer(pattern=QWEN2_PATTERN))
    import_model(tmp_path / "source", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert model.config.model_type == "qwen2"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = info.tokenizer.encode(SAMPLE)
    assert theirs(SAMPLE)["input_ids"] == ids
    given = torch.tensor([ids])
    assert_close(model(given).logits, gpt(given).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        (MODERN, "value_embeddings is True"),
        (ORIGINAL, "norm_position is 'post'"),
        ({"activation": "swiglu"}, "activation is 'swiglu'"),
        ({"final_norm": False}, "final_norm is False"),
        ({**LLAMA, "head_bias": True}, "head_bias is True"),
        ({"residual": "parallel"}, "residual is 'parallel'"),
        ({**LLAMA, "residual": "parallel"}, "residual is 'parallel'"),
        ({**LLAMA, "rotary_dim": 4}, "rotary_dim is 4"),
        ({**NEOX, "qk_norm": True}, "qk_norm is True"),
        ({**NEOX, "head_dim": 16}, "head_dim is 16"),
        ({**LLAMA, "activation": "gelu"}, "activation is 'gelu'"),
        ({**LLAMA, "positions": "learned"}, "positions is 'learned'"),
        ({"qk_norm": True}, "qk_norm is True"),
        ({"n_kv_head": 2}, "n_kv_head is 2"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({**LLAMA, "qk_norm": True, "bias": True}, "bias is True"),
        ({**LLAMA, "n_head": 6, "n_kv_head": 2, "head_dim": 8}, "n_head is 6"),
    ],
)
def test_unexportable_shape_is_refused_by_its_key(
    shape: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save_tiny_checkpoint(tmp_path / "ours", gpt=tiny_gpt(tiny_config(n_layer=1, **shape)))
    with pytest.raises(
        ConvertError,
        match=f"^{sentence}: .* the model cannot be exported; train it again with --exportable$",
    ):
        export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_chat_template_round_trips(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(vocab_size=259, n_layer=1))
    save_tiny_checkpoint(
        tmp_path / "ours", gpt=gpt, tokenizer=chat_tokenizer(), chat_template=CHAT_TEMPLATE
    )
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    written = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in written
    import_model(tmp_path / "theirs", tmp_path / "again")
    template = loaded(tmp_path / "again")[0].chat_template
    assert template is not None
    assert template.source == CHAT_TEMPLATE


def test_characters_go_and_come_back(tmp_path: Path) -> None:
    tokenizer = character_tokenizer({0: "a", 1: "é", 2: "😀", 3: "\n", 4: " "})
    gpt = tiny_gpt(tiny_config(vocab_size=5, n_layer=1))
    save_tiny_checkpoint(tmp_path / "ours", gpt=gpt, tokenizer=tokenizer)
    lines: list[str] = []
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf", log=lines.append)
    assert "253 of the 256 bytes are not tokens" in lines[0]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs("é 😀a\n")["input_ids"] == [1, 4, 2, 0, 3]
    import_model(tmp_path / "theirs", tmp_path / "again")
    info, again = loaded(tmp_path / "again")
    assert info.tokenizer.ranks == tokenizer.ranks
    ids = torch.tensor([[1, 4, 2, 0, 3]])
    assert torch.equal(again(ids).logits, gpt(ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_keeps_the_dtype_or_takes_the_given_one(dtype: str, tmp_path: Path) -> None:
    numbers = getattr(torch, dtype)
    save_tiny_checkpoint(tmp_path / "ours", gpt=tiny_gpt(tiny_config(n_layer=1)), dtype=numbers)
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    export_model(tmp_path / "ours", tmp_path / "wide", to="hf", dtype="float32")
    for folder, expected in (("theirs", numbers), ("wide", torch.float32)):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert model.dtype == expected


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "ours")
    (tmp_path / "there").mkdir()
    with pytest.raises(FileError, match="there already exists"):
        export_model(tmp_path / "ours", tmp_path / "there", to="hf")


@pytest.mark.parametrize("raw", [b"", b"\x02" + bytes(7) + b"{}", b"\xff" * 8])
def test_damaged_weights_are_refused_by_name(raw: bytes, tmp_path: Path) -> None:
    save_tiny_checkpoint(tmp_path / "ours", gpt=tiny_gpt(tiny_config(n_layer=1)))
    (tmp_path / "ours" / "model.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"ours/model\.safetensors .*damaged"):
        export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")


def test_characters_between_special_tokens_keep_their_ids(tmp_path: Path) -> None:
    tokenizer = character_tokenizer({0: "<pad>", 1: "a", 2: "é", 3: "[SEP]", 4: "b", 5: "<eos>"})
    gpt = tiny_gpt(tiny_config(vocab_size=6, n_layer=1))
    save_tiny_checkpoint(tmp_path / "ours", gpt=gpt, tokenizer=tokenizer)
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs("éab")["input_ids"] == tokenizer.encode("éab") == [2, 1, 4]
    assert theirs("<pad>a[SEP]b<eos>")["input_ids"] == [0, 1, 3, 4, 5]
    assert theirs.decode([0, 1, 2, 3]) == "<pad>aé[SEP]"
    assert theirs.eos_token_id == 5
    import_model(tmp_path / "theirs", tmp_path / "again")
    info, again = loaded(tmp_path / "again")
    assert info.tokenizer.description() == tokenizer.description()
    row = torch.tensor([info.tokenizer.encode("éab")])
    assert torch.equal(again(row).logits, gpt(row).logits)


@pytest.mark.parametrize("joined", [False, True])
def test_words_become_a_vocabulary_of_words(joined: bool, tmp_path: Path) -> None:
    words = ["<pad>", "the", "cat", ".", "it's", "<eos>", "sat"]
    if joined:
        words += [" ", "\n"]
    tokenizer, _ = word_tokenizer(dict(enumerate(words)), "here")
    gpt = tiny_gpt(tiny_config(vocab_size=len(words), n_layer=1))
    save_tiny_checkpoint(tmp_path / "ours", gpt=gpt, tokenizer=tokenizer)
    export_model(tmp_path / "ours", tmp_path / "theirs", to="hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = "the cat\nit's the cat sat" if joined else "the cat\nit's the  cat ."
    ids = tokenizer.encode(text)
    assert theirs(text)["input_ids"] == ids
    assert theirs.decode(ids) == (text if joined else " ".join(text.split()))
    assert theirs("the<eos>")["input_ids"] == [1, 5]
    assert theirs.eos_token_id == 5
    if not joined:
        import_model(tmp_path / "theirs", tmp_path / "again")
        info, again = loaded(tmp_path / "again")
        assert info.tokenizer.description() == tokenizer.description()
        assert info.tokenizer.tokens == tokenizer.tokens
        row = torch.tensor([ids])
        assert torch.equal(again(row).logits, gpt(row).logits)
    with pytest.raises(Exception, match="Missing"):
        theirs("dog")
    with pytest.raises(ConvertError, match=r"is whole words, but llama\.cpp needs byte pairs"):
        export_model(tmp_path / "ours", tmp_path / "x.gguf", to="gguf")


@pytest.mark.parametrize("room", [0, 1000, 30_000])
def test_full_disk_is_reported_and_leaves_nothing(room: int, tmp_path: Path) -> None:
    """The small files of the export may fit on the disk, but the weights do not."""
    save_theirs(tmp_path / "theirs", "llama")
    reason = r" cannot be written: .*File too large\. No partial copy is left\. Free space"
    with files_of_at_most(room), pytest.raises(FileError, match=f"ours{reason}"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    with files_of_at_most(room), pytest.raises(FileError, match=f"back{reason}"):
        export_model(tmp_path / "ours", tmp_path / "back", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
