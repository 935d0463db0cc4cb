"""nanoGPT: checkpoints are compared with a textbook copy of its model, and files that are not
checkpoints are refused."""

import argparse
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from logitd.model.convert.by_role.read import RoleOptions
from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model
from logitd.model.text.tokenizer import TokenizerError
from tests.model.convert.by_role.textbook.common import randomized
from tests.model.convert.by_role.textbook.nanogpt import Nano, NanoConfig
from tests.model.convert.theirs import loaded
from tests.model.factories import merging_tokenizer

CHARACTERS = sorted(set("\n !,.:abcdefghijklmnopqrstuvwxyzABCé€😀"))
STOI = {character: index for index, character in enumerate(CHARACTERS)}
TEXT = "A bad cab,\nfée €: 😀!"


def save(
    path: Path,
    model: Nano,
    prefix: str = "",
    changes: Mapping[str, torch.Tensor] | None = None,
    **more: Any,
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {prefix + name: value for name, value in model.state_dict().items()} | dict(
        changes or {}
    )
    checkpoint = {"model": state, "model_args": asdict(model.config), "iter_num": 250,
                  "best_val_loss": torch.tensor(1.5), "optimizer": {"state": {}}}  # fmt: skip
    torch.save(checkpoint | more, path)


def small(rows: int, *, bias: bool = False) -> Nano:
    model = Nano(NanoConfig(vocab_size=rows, block_size=32, bias=bias))
    randomized(model)
    return model


def logits_of(model: Nano, ids: list[int]) -> torch.Tensor:
    given = torch.tensor([ids])
    return model(given, given)[0]


def save_meta(path: Path, **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {"vocab_size": len(STOI), "stoi": STOI, "itos": dict(enumerate(CHARACTERS))}
    path.write_bytes(pickle.dumps(meta | changes))


def test_checkpoint_older_than_the_setting_bias_has_the_approximate_gelu(tmp_path: Path) -> None:
    model = small(len(STOI), bias=True)
    for gelu in model.modules():
        if isinstance(gelu, torch.nn.GELU):
            gelu.approximate = "tanh"
    arguments = {key: value for key, value in asdict(model.config).items() if key != "bias"}
    save(tmp_path / "ckpt.pt", model, model_args=arguments, stoi=STOI)
    import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    assert info.config.activation == "gelu_tanh"
    ids = [STOI[character] for character in TEXT]
    logits = gpt(torch.tensor([ids])).logits
    assert_close(logits, logits_of(model, ids), atol=1e-5, rtol=1e-5)


def test_exact_gelu_is_reported_as_assumed_unless_it_is_stated(tmp_path: Path) -> None:
    for number, more in enumerate([{}, {"activation": "gelu"}]):
        save(tmp_path / "ckpt.pt", small(64), config={"learning_rate": 1e-3, **more})
        told: list[str] = []
        import_model(
            tmp_path / "ckpt.pt", tmp_path / f"{number}", tokenizer="none", log=told.append
        )
        assert any(line.startswith("assumed: the exact GELU") for line in told) is not bool(more)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transformer.wpe.weight", None),
        ("lm_head.bias", torch.zeros(64)),
        ("transformer.h.{}.mlp.w2.weight", torch.rand(128, 32)),
        ("transformer.h.{}.attn.q_norm.weight", torch.ones(16)),
        ("bias", None),
    ],
)
def test_changed_copy_with_other_tensors_is_recognized_by_role(
    name: str, value: torch.Tensor | None, tmp_path: Path
) -> None:
    model = small(64)
    names = {name.format(layer): value for layer in range(model.config.n_layer)}
    names |= {n.replace("q_norm", "k_norm"): value for n in names}
    state = {n: t for n, t in model.state_dict().items() if n not in names}
    state |= {n: t for n, t in names.items() if t is not None}
    arguments = {key: a for key, a in asdict(model.config).items() if key != name}
    save(tmp_path / "ckpt.pt", model)
    saved = torch.load(tmp_path / "ckpt.pt")
    torch.save(saved | {"model": state, "model_args": arguments}, tmp_path / "ckpt.pt")
    with pytest.raises(OpenQuestions, match="--score-scale"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
def test_character_model_keeps_its_ids_and_logits(bias: bool, prefix: str, tmp_path: Path) -> None:
    model = small(len(STOI), bias=bias)
    save(tmp_path / "out" / "ckpt.pt", model, prefix)
    save_meta(tmp_path / "out" / "meta.pkl")
    import_model(tmp_path / "out", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    ids = [STOI[character] for character in TEXT]
    assert info.tokenizer.encode(TEXT) == ids
    assert info.tokenizer.decode(ids) == TEXT
    assert info.config.activation == "gelu"
    assert info.config.bias is bias
    logits = gpt(torch.tensor([ids])).logits
    assert logits.shape[-1] == len(STOI) == info.config.vocab_size
    assert_close(logits, logits_of(model, ids), atol=1e-4, rtol=1e-4)
    assert (info.training.step, info.training.val_loss) == (250, 1.5)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("activation", "relu", "activation"),
        ("pre_norm", False, "norm_position"),
        ("layer_norm_eps", 1e-3, "norm_eps"),
    ],
)
def test_stated_computation_of_a_changed_copy_is_kept(
    name: str, value: Any, field: str, tmp_path: Path
) -> None:
    model = small(len(STOI), bias=True)
    save(tmp_path / "ckpt.pt", model, model_args={**asdict(model.config), name: value})
    with pytest.raises(OpenQuestions, match="--score-scale"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none")
    own = {"activation": "gelu", "norm_position": "pre", "score_scale": "head_dim"}
    answers = {key: answer for key, answer in own.items() if key != field} | {"final_norm": True}
    import_model(
        tmp_path / "ckpt.pt",
        tmp_path / "ours",
        tokenizer="none",
        roles=RoleOptions(answers=answers),
    )
    expected = "post" if value is False else value
    assert getattr(loaded(tmp_path / "ours")[0].config, field) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("qk_norm", True), ("activation", "relu"), ("norm_eps", 1e-3), ("pre_norm", False)),
        ("use_rmsnorm", True),
    ],
)
def test_computation_that_only_the_training_states_is_kept(
    name: str, value: Any, tmp_path: Path
) -> None:
    """`config` has all global variables of train.py; some were understood but not used."""
    save(tmp_path / "ckpt.pt", small(len(STOI)), config={"learning_rate": 1e-3, name: value})
    with pytest.raises(OpenQuestions, match="--score-scale"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rope_theta", 10000.0), ("use_rope", True), ("swiglu", True), ("n_kv_head", 1)),
        *(("qk_norm_eps", 1e-6), ("pos_emb", "rope"), ("eps", 1e-8), ("softcap", 15.0)),
    ],
)
def test_setting_that_only_the_training_states_is_asked_about(
    name: str, value: Any, tmp_path: Path
) -> None:
    save(tmp_path / "ckpt.pt", small(len(STOI)), config={"learning_rate": 1e-3, name: value})
    with pytest.raises(OpenQuestions, match=f"not understood, .*: {name} {value!r}"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none")


def test_settings_that_nanogpt_agrees_with_are_not_asked_about(tmp_path: Path) -> None:
    """A resumed training states its own sizes next to those of the checkpoint."""
    model = small(len(STOI))
    own = {"activation": "gelu", "qk_norm": False, "norm_eps": 1e-5, "use_rope": False,
           "num_heads": model.config.n_head, "n_head": 99, "pos_emb": "learned"}  # fmt: skip
    save(tmp_path / "ckpt.pt", model, config={"learning_rate": 1e-3, **own})
    import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none")


@pytest.mark.parametrize(
    ("name", "value"), [("attn_type", "linear"), ("positions", "alibi"), ("window_size", 8)]
)
def test_setting_that_may_name_another_computation_is_asked_about(
    name: str, value: Any, tmp_path: Path
) -> None:
    """Guards against a changed copy of nanoGPT that was computed like nanoGPT."""
    model = small(len(STOI))
    save(tmp_path / "ckpt.pt", model, model_args={**asdict(model.config), name: value})
    with pytest.raises(OpenQuestions, match=f"not understood, .*: {name} {value!r}"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none")


def test_stated_rms_norm_of_a_changed_copy_is_kept(tmp_path: Path) -> None:
    model = small(len(STOI))
    arguments = {**asdict(model.config), "norm": "rmsnorm"}
    save(tmp_path / "ckpt.pt", model, model_args=arguments, config={"optimizer": "RMSprop"})
    answers = {"activation": "gelu", "norm_position": "pre", "score_scale": "head_dim"}
    import_model(
        tmp_path / "ckpt.pt",
        tmp_path / "ours",
        tokenizer="none",
        roles=RoleOptions(answers=answers | {"final_norm": True}),
    )
    assert loaded(tmp_path / "ours")[0].config.norm == "rmsnorm"


def test_loss_on_a_text_is_measured_without_padded_rows(tmp_path: Path) -> None:
    save(tmp_path / "ckpt.pt", small(len(STOI)))
    save_meta(tmp_path / "meta.pkl")
    (tmp_path / "text.txt").write_text("abc" * 100, encoding="utf-8")
    with pytest.raises(ConvertError, match=r"does not predict text\.txt: [\d.]+ nats per token"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", check=tmp_path / "text.txt")


def test_unknown_characters_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "ckpt.pt", small(len(STOI)))
    save_meta(tmp_path / "meta.pkl")
    import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    tokenizer = loaded(tmp_path / "ours")[0].tokenizer
    assert tokenizer.end_of_text is None
    with pytest.raises(TokenizerError, match="'Z', at index 4 of the text"):
        tokenizer.encode("é€aaZ")
    with pytest.raises(TokenizerError, match="'ü', at index 2 of the text"):
        tokenizer.encode("é€ü")
    with pytest.raises(TokenizerError, match=f"outside the vocabulary of {len(STOI)} ids"):
        tokenizer.token_bytes(len(STOI))


def test_characters_are_found_in_the_data_folder(tmp_path: Path) -> None:
    training = {"dataset": "plays", "gradient_accumulation_steps": 2, "batch_size": 3,
                "block_size": 32}  # fmt: skip
    save(tmp_path / "out" / "ckpt.pt", small(len(STOI)), config=training)
    with pytest.raises(ConvertError, match="has no vocabulary"):
        import_model(tmp_path / "out", tmp_path / "ours")
    save_meta(tmp_path / "data" / "plays" / "meta.pkl")
    info = import_model(tmp_path / "out", tmp_path / "ours")
    assert info.training.tokens == 250 * 2 * 3 * 32
    assert info.training.data["dataset"] == "plays"


def test_rows_beyond_the_vocabulary_are_padding(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer()
    tokenizer.write_ranks(tmp_path / "own.tiktoken")
    model = small(320, bias=True)
    save(tmp_path / "ckpt.pt", model)
    import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer=str(tmp_path / "own.tiktoken"))
    info, gpt = loaded(tmp_path / "ours")
    assert info.config.vocab_size == len(tokenizer.ranks) < 320 == info.config.padded_vocab_size
    ids = info.tokenizer.encode("abc null 12")
    expected = logits_of(model, ids)[..., : info.config.vocab_size]
    assert_close(gpt(torch.tensor([ids])).logits, expected, atol=1e-4, rtol=1e-4)
    save(tmp_path / "small.pt", small(100))
    ranks = str(tmp_path / "own.tiktoken")
    with pytest.raises(ConvertError, match=r"has 100 rows .* they do not belong together"):
        import_model(tmp_path / "small.pt", tmp_path / "two", tokenizer=ranks)


class Exploding:
    """A hostile pickle: unpickling it would call a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"config": torch.nn.Linear(2, 2)}, r"is a whole pickled module .* torch\.save\("),
        ({"config": Exploding()}, r"holds .*pathlib\.(_local\.)?Path.* run code"),
        ({"model_args": {**asdict(NanoConfig()), "vocab_size": None}}, "lacks vocab_size"),
    ],
)
def test_file_that_needs_code_or_lacks_parts_is_refused(
    tmp_path: Path, more: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "ckpt.pt", small(64), **more)
    with pytest.raises(ConvertError, match=sentence):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="unused.pkl")
    assert not Path("exploded").exists()


@pytest.mark.parametrize("settings", [argparse.Namespace(lr=1), Path("x")])
def test_object_in_settings_is_read_as_its_attributes(settings: object, tmp_path: Path) -> None:
    """Many training scripts save their argparse namespace. It is read without running their
    code."""
    save(tmp_path / "ckpt.pt", small(len(STOI)), config=settings, stoi=STOI)
    info = import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    assert info.training.data["format"] == "nanoGPT"


@pytest.mark.parametrize("arguments", [None, {"n_layer": 2}])
def test_nanogpt_names_without_settings_ask_questions(arguments: object, tmp_path: Path) -> None:
    """minGPT uses the same names with another activation, so names alone do not identify
    nanoGPT."""
    save(tmp_path / "ckpt.pt", small(len(STOI)), model_args=arguments, stoi=STOI)
    with pytest.raises(ConvertError, match=r"(?s)Still unknown:.*--n-head.*--activation"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours")


def test_wrong_shapes_and_extra_tensors_are_refused(tmp_path: Path) -> None:
    model = small(64)
    for change, sentence in (
        ({"transformer.h.0.ln_1.weight": torch.ones(3)}, r"ln_1\.weight has shape \(3,\)"),
        (
            {"transformer.h.0.extra": torch.ones(3)},
            r"without a known role .* \S*h\.0\.extra",
        ),
        ({"transformer.wpe.weight": torch.ones(31, 32)}, r"wpe\.weight has shape \(31, 32\)"),
    ):
        save(tmp_path / "ckpt.pt", model, changes=change)
        with pytest.raises(ConvertError, match=sentence):
            import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    # The causal mask of old versions is not a weight; an untied head is kept.
    changed = {"transformer.h.0.attn.bias": torch.ones(1), "lm_head.weight": torch.zeros(64, 32)}
    save(tmp_path / "ckpt.pt", model, changes=changed)
    save_meta(tmp_path / "meta.pkl")
    import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    info, gpt = loaded(tmp_path / "ours")
    assert not info.config.tied_head
    assert not gpt(torch.tensor([[1, 2]])).logits.any()


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (pickle.dumps(Exploding()), "it refers to .*; creating that would run code"),
        (b"", "is not a pickle of plain values"),
        (pickle.dumps([1]), r"meta\.pkl is not a vocabulary in a known form"),
        (pickle.dumps({"stoi": {"a": 0, "b": 2}}), r"38 rows .* 3 ids: 35 rows without a token"),
        (pickle.dumps({"stoi": {"a": 0, "b": 20}}), "19 ids have no text .the first is 1"),
        (pickle.dumps({"stoi": {"a": 0, "b": 0}}), "'stoi' of .*: 'a' and 'b' share the id 0"),
        (pickle.dumps({"stoi": {"a": 0}, "itos": {0: "b"}}), "'itos' is not the inverse of 'stoi'"),
    ],
)
def test_broken_meta_file_is_refused(
    raw: bytes, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "ckpt.pt", small(len(STOI)))
    (tmp_path / "meta.pkl").write_bytes(raw)
    with pytest.raises(ConvertError, match=sentence):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    assert not Path("exploded").exists()


def test_vocabulary_in_the_file_goes_into_the_checkpoint_with_its_ids(tmp_path: Path) -> None:
    """Special tokens come first, and there are padding rows. Every id equals the source's id."""
    texts = ["<pad>", *CHARACTERS, "<eos>"]
    model = small(64)
    save(tmp_path / "ckpt.pt", model, itos=texts, stoi={t: i for i, t in enumerate(texts)})
    told: list[str] = []
    import_model(tmp_path / "ckpt.pt", tmp_path / "ours", log=told.append)
    info, gpt = loaded(tmp_path / "ours")
    ids = [texts.index(character) for character in TEXT]
    assert info.tokenizer.encode(TEXT) == ids
    assert (info.tokenizer.end_of_text, info.config.vocab_size) == (len(texts) - 1, len(texts))
    assert_close(
        gpt(torch.tensor([ids])).logits,
        logits_of(model, ids)[..., : len(texts)],
        atol=1e-4,
        rtol=1e-4,
    )
    note = f"the vocabulary of {len(texts)} ids is from 'stoi' of the checkpoint"
    assert note in told
    assert note in (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["words", "pieces", "none"])
def test_other_kinds_of_vocabularies_are_saved_and_read(kind: str, tmp_path: Path) -> None:
    words = ["the", "cat", ".", "<eos>", "sat"] + ([" "] if kind == "pieces" else [])
    model = small(len(words))
    save(tmp_path / "ckpt.pt", model, itos=words)
    import_model(
        tmp_path / "ckpt.pt", tmp_path / "ours", tokenizer="none" if kind == "none" else None
    )
    info, gpt = loaded(tmp_path / "ours")
    assert (info.tokenizer.kind, info.tokenizer.vocab_size) == (kind, len(words))
    assert_close(gpt(torch.tensor([[1, 0, 4]])).logits, logits_of(model, [1, 0, 4]),
                 atol=1e-4, rtol=1e-4)  # fmt: skip
    assert (tmp_path / "ours" / "tokenizer.tiktoken").exists() == (kind != "none")
    if kind != "none":
        assert info.tokenizer.encode("the cat") == ([0, 1] if kind == "words" else [0, 5, 1])


def test_unused_rows_need_a_flag(tmp_path: Path) -> None:
    save(tmp_path / "ckpt.pt", small(100), itos=["a", "b"])
    with pytest.raises(ConvertError, match=r"100 rows .* 2 ids: 98 rows .* --unused-rows"):
        import_model(tmp_path / "ckpt.pt", tmp_path / "ours")
    info = import_model(tmp_path / "ckpt.pt", tmp_path / "ours", unused_rows=True)
    assert info.config.vocab_size == 2
