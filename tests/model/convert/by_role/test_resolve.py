"""Questions that names leave open are answered by the owner's logits, a check text, or flags. The
model in `conftest.py` is trained on text of the same kind as the check text."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.convert.by_role import by_text
from logitd.model.convert.by_role.finding import FIELDS, Finding, canonical
from logitd.model.convert.by_role.ngrams import ngram_nats
from logitd.model.convert.by_role.objective import (
    CheckText,
    LogitsObjective,
    TextObjective,
    text_objective,
)
from logitd.model.convert.by_role.read import RoleOptions, read_by_role, recognize_file
from logitd.model.convert.by_role.recognize import recognize
from logitd.model.convert.by_role.resolution import OpenQuestions, Resolution, first
from logitd.model.convert.by_role.resolve import resolve
from logitd.model.convert.by_role.search import Search
from logitd.model.convert.by_role.tensor_map import MappedTensors
from logitd.model.convert.foreign import ConvertError
from tests.model.convert.by_role.conftest import Trained
from tests.model.convert.by_role.scheme import (
    Scheme,
    built_from,
    findings,
    given_logits,
    mapped,
    some_ids,
    state,
    state_file,
)
from tests.model.convert.by_role.schemes import SCHEMES
from tests.model.convert.by_role.textbook.common import VOCAB
from tests.model.convert.by_role.textbook.torch_layers import Multihead
from tests.model.full_disk import files_of_at_most

QUICK: Mapping[str, Mapping[str, Any]] = {
    "lecture": {},
    "torch, pre-LN": {},
    "heads with biases": {},
    "fused, head by head": {"n_head": 4},
    "gate and up together, no positions": {"n_head": 4},
}
"""Schemes that `make test` runs, each with the settings that the test supplies; `make test-slow`
runs all schemes without settings."""


def logits_objective(scheme: Scheme, model: torch.nn.Module) -> LogitsObjective:
    ids = some_ids(2, 12)
    return LogitsObjective("its class", ids, given_logits(scheme, model, ids))


def resolved_by_logits(scheme: Scheme, model: torch.nn.Module) -> Resolution:
    tensors = mapped(model)
    objective = logits_objective(scheme, model)
    return resolve(tensors, findings(tensors, scheme.settings), objective)


@pytest.mark.parametrize(
    ("name", "said"),
    [*QUICK.items(), *(pytest.param(name, {}, marks=pytest.mark.slow) for name in SCHEMES)],
)
def test_logits_select_the_sources_computation(name: str, said: Mapping[str, Any]) -> None:
    torch.manual_seed(1)  # with other weights the search once found a wrong variant
    scheme = replace(SCHEMES[name], settings={**SCHEMES[name].settings, **said})
    resolution = resolved_by_logits(scheme, scheme.model())
    right = canonical(scheme.computation)
    unlike = {
        field: (getattr(resolution.computation, field), getattr(right, field))
        for field in FIELDS
        if getattr(resolution.computation, field) != getattr(right, field)
    }
    unlike.pop("context_length", None)  # llama's files do not store it
    for eps in ("norm_eps", "qk_norm_eps"):
        ours, theirs = unlike.pop(eps, (0.0, 0.0))
        assert abs(ours - theirs) < 1e-5  # as far as logits show
    assert unlike == {}
    assert resolution.penalty is not None
    assert resolution.penalty < 1e-4
    assert re.search(r"logits of its class .* largest difference \d", resolution.verified)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_search_changes_positions_and_rotation_together(direction: str) -> None:
    """There is no time to try all combinations. With the wrong layout, rotary positions fit worse
    than none, so the search once ended without positions."""
    how = {**SCHEMES["llama2.c"].how, "rotary_direction": direction}
    scheme = replace(SCHEMES["llama2.c"], settings={"n_heads": 4}, how=how)
    model = scheme.model(2)
    tensors, objective = mapped(model), logits_objective(scheme, model)
    best = Search(tensors, findings(tensors, scheme.settings), objective, seconds=0).best()
    found = (best.positions, best.rotary_layout, best.rotary_direction)
    assert found == ("rotary", "interleaved", direction)


def test_search_changes_score_scale_and_norms_of_queries_and_keys_together() -> None:
    """Without the norms, another scale fits better, and then no single change improves it."""
    scheme = SCHEMES["modded-nanogpt"]
    scheme = replace(scheme, settings={**scheme.settings, "n_head": 4, "activation": "relu2"})
    how = resolved_by_logits(scheme, scheme.model()).computation
    found = (how.score_scale, how.qk_norm, how.rotary_direction)
    assert found == ("head_dim", "unit", "backward")


def test_alternatives_have_their_difference_of_logits() -> None:
    scheme = SCHEMES["heads with biases"]
    resolution = resolved_by_logits(scheme, scheme.model())
    others = {(other.field, other.value): other for other in resolution.alternatives}
    assert others["activation", "gelu"].clear
    assert others["activation", "gelu"].penalty > 1e-4
    assert others["norm_position", "pre"].penalty > others["activation", "gelu"].penalty
    assert resolution.origins["activation"] == "agrees with its class"
    assert resolution.origins["n_head"] == "each head has separate tensors"


def test_logits_that_no_variant_gives_are_refused() -> None:
    """The model's activation is tanh, which no variant has."""
    scheme = SCHEMES["heads with biases"]
    model = scheme.model()
    model.activation = torch.tanh  # type: ignore[assignment]
    sentence = (
        r"no variant .* the logits of its class: the closest variant, .*--activation .* differs"
    )
    with pytest.raises(ConvertError, match=sentence):
        resolved_by_logits(scheme, model)


def test_eps_of_the_code_overrules_the_settings() -> None:
    """The code may contain another eps than the settings, which it does not read."""
    scheme = SCHEMES["heads with biases"]
    model = scheme.model()
    tensors = mapped(model)
    resolution = resolve(
        tensors, findings(tensors, {"norm_eps": 1e-2}), logits_objective(scheme, model)
    )
    assert resolution.computation == canonical(scheme.computation)
    assert resolution.origins["norm_eps"] == "agrees with its class"


def test_difference_at_special_ids_is_refused() -> None:
    """The owner's code masked id 0, which is padding and is rare among random ids."""
    scheme = SCHEMES["heads with biases"]
    model, ids, edge_ids = scheme.model(), some_ids(2, 8), some_ids(1, 12)
    tensors = mapped(model)
    logits, edge = (given_logits(scheme, model, each) for each in (ids, edge_ids))
    agreeing = LogitsObjective("its class", ids, logits, edge_ids=edge_ids, edge=edge)
    assert "logits of its class" in resolve(tensors, findings(tensors), agreeing).verified
    sentence = "differ by 0.05.* the first and last ids of the vocabulary.* --run-code"
    with pytest.raises(ConvertError, match=sentence):
        resolve(tensors, findings(tensors), replace(agreeing, edge=edge + 0.05))


def test_difference_at_late_positions_is_refused() -> None:
    """A sliding window of the owner's code showed in no logits of the first 24 positions, and the
    import computed full attention."""
    scheme = SCHEMES["heads with biases"]
    model, ids, long_ids = scheme.model(), some_ids(2, 8), some_ids(1, 12)
    tensors = mapped(model)
    late = given_logits(scheme, model, long_ids)[:, -4:]
    logits = given_logits(scheme, model, ids)
    agreeing = LogitsObjective("its class", ids, logits, long_ids, late)
    assert "at the end of 12" in resolve(tensors, findings(tensors), agreeing).verified
    sentence = "first 8 positions match .* but the last of 12 differ by 0.05.* --run-code"
    with pytest.raises(ConvertError, match=sentence):
        resolve(tensors, findings(tensors), replace(agreeing, late=late + 0.05))


def test_log_probabilities_replace_logits() -> None:
    scheme = SCHEMES["heads with biases"]
    model, ids = scheme.model(), some_ids(2, 12)
    tensors = mapped(model)
    log_probs = given_logits(scheme, model, ids).log_softmax(-1)
    objective = LogitsObjective("its class", ids, log_probs, log_probs=True)
    resolution = resolve(tensors, findings(tensors), objective)
    assert resolution.computation == canonical(scheme.computation)


def test_tolerance_grows_with_the_logits() -> None:
    for largest, tolerance in ((2.0, 1e-4), (200.0, 1e-3)):
        objective = LogitsObjective("", some_ids(1, 4), torch.full((1, 4, 29), largest))
        assert objective.tolerance == pytest.approx(tolerance)


def test_nan_logits_are_infinitely_far_off() -> None:
    scheme = SCHEMES["book"]
    model = scheme.model()
    objective = LogitsObjective("", some_ids(1, 4), torch.full((1, 4, 29), torch.nan))
    assert objective(built_from(scheme, model), causal=True, effort="quick").tolist() == [math.inf]


# By a text


def words(token_ids: list[int]) -> TextObjective:
    return text_objective(CheckText("words.txt", token_ids), 24)


def resolved_by_text(trained: Trained, **answers: Any) -> Resolution:
    tensors = mapped(trained.model)
    objective = words(trained.token_ids)
    given = findings(tensors, **answers)
    return resolve(tensors, given, objective)


def test_text_selects_the_trained_models_computation(trained: Trained) -> None:
    resolution = resolved_by_text(trained)
    how = resolution.computation
    assert (how.score_scale, how.activation, how.norm_position) == ("d_model", "relu", "pre")
    assert (how.final_norm, how.residual, how.embedding_scale) == (True, "sequential", "one")
    assert (how.norm_eps, how.qk_norm, how.qkv_layout) == (1e-5, "none", "qkv")
    for field in ("score_scale", "activation", "norm_position", "final_norm"):
        assert resolution.origins[field] == "clearly the lowest loss on words.txt"
        others = [other for other in resolution.alternatives if other.field == field]
        assert others
        assert all(other.clear for other in others)
        assert resolution.penalty is not None
        assert all(other.penalty > resolution.penalty for other in others)
    assert re.match(
        rf"{resolution.penalty:.4f} nats per token on words\.txt \(its tokens' frequencies: 2\.1",
        resolution.verified,
    )


def test_text_decides_about_a_table_that_only_its_shape_shows(trained: Trained) -> None:
    """The model without the table is computed too, although an import would refuse it."""
    table = mapped(trained.model).map.name("positions")
    tensors = {name.replace(table, "places.weight"): x for name, x in state(trained.model).items()}
    found = MappedTensors("model.pt", tensors, recognize("model.pt", tensors))
    resolution = resolve(found, findings(found), words(trained.token_ids))
    assert resolution.computation.positions == "learned"
    others = [other for other in resolution.alternatives if other.field == "positions"]
    assert "none" in {other.value for other in others}
    assert all(other.clear for other in others)


def test_text_loss_equals_the_textbooks(trained: Trained) -> None:
    objective = words(trained.token_ids)
    built = built_from(SCHEMES["lecture"], trained.model, context_length=24)
    nats = objective(built, causal=True, effort="full")
    logits, _ = trained.model(objective.windows[:, :-1])
    expected = -logits.log_softmax(-1).gather(2, objective.windows[:, 1:, None]).flatten()
    assert nats.shape == expected.shape
    assert float((nats - expected).abs().max()) < 1e-4
    few = objective(built, causal=True, effort="quick")
    assert torch.equal(few, nats[: len(few)])


def test_text_of_another_model_is_refused(trained: Trained) -> None:
    noise = torch.randint(0, 9, (2000,), generator=torch.Generator().manual_seed(4))
    tensors = mapped(trained.model)
    objective = text_objective(CheckText("noise.txt", noise.tolist()), 24)
    sentence = r"no variant predicts noise\.txt better than .* frequencies .* nats per token"
    with pytest.raises(ConvertError, match=sentence):
        resolve(tensors, findings(tensors), objective)


def test_short_text_leaves_questions_open(trained: Trained) -> None:
    """Three predicted tokens make only one window. The error cannot be estimated from one window,
    so score scale and activation stay undecided."""
    tensors = mapped(trained.model)
    objective = words(trained.token_ids[:4])
    assert len(objective.windows) == 1
    with pytest.raises(ConvertError, match=r"nats per token|does not distinguish"):
        resolve(tensors, findings(tensors), objective)


def test_undecided_values_are_asked(trained: Trained) -> None:
    """Three windows of text suffice to decide the score scale, but not the activation."""
    tensors = mapped(trained.model)
    objective = words(trained.token_ids[:75])
    given = findings(tensors, score_scale="d_model", norm_position="pre")
    with pytest.raises(OpenQuestions, match=r"words\.txt does not distinguish") as refusal:
        resolve(tensors, given, objective)
    assert refusal.value.fields == ("activation",)
    assert "--activation gelu|gelu_tanh|relu|silu|relu2" in str(refusal.value)


def test_field_without_effect_is_not_asked(trained: Trained) -> None:
    """The positions are learned, so the place of norms before rotary ones does not matter."""
    tensors = mapped(trained.model)
    found = findings(tensors)
    found |= {"qk_norm_position": Finding(("before_rotary",), "not shown", True)}
    how = resolve(tensors, found, words(trained.token_ids)).computation
    assert (how.positions, how.qk_norm_position) == ("learned", "before_rotary")


def test_given_answer_is_not_tried(trained: Trained) -> None:
    resolution = resolved_by_text(trained, score_scale="d_model")
    assert resolution.computation.score_scale == "d_model"
    assert resolution.origins["score_scale"] == "--score-scale"
    assert not [other for other in resolution.alternatives if other.field == "score_scale"]


def test_windows_cover_a_text_from_end_to_end() -> None:
    objective = text_objective(CheckText("numbers", list(range(1000))), 16)
    assert objective.windows[:, 0].min() == 0
    assert objective.windows.max() == 999
    assert torch.equal(objective.windows, objective.windows[:, :1] + torch.arange(17))
    assert set(objective.windows[:, 1:].flatten().tolist()) == set(range(1, 1000))
    assert objective.distinct == 999
    short = text_objective(CheckText("short", [1, 2, 3]), 16)
    assert short.windows.tolist() == [[1, 2, 3]]


def test_frequencies_are_those_of_the_text() -> None:
    windows = torch.tensor([[0, 0, 1, 2]])
    objective = TextObjective("text", windows, 3, ngram_nats([0, 0, 1, 2], 3))
    assert objective.unigram_nats() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(4))


# Without a causal mask


@pytest.fixture(scope="module")
def sees_all() -> Multihead:
    """A model without a causal mask, trained to predict the next letter. Its input contains that
    letter."""
    torch.manual_seed(0)
    model = Multihead(causal=False, learned=True)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        ids = torch.randint(0, VOCAB, (16, 17), generator=generator)
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def test_model_without_a_mask_is_refused_by_a_text(sees_all: Multihead) -> None:
    tensors = mapped(sees_all)
    ids = torch.randint(0, VOCAB, (3000,), generator=torch.Generator().manual_seed(2))
    objective = text_objective(CheckText("letters.txt", ids.tolist()), 16)
    given = findings(tensors, n_head=4)
    with pytest.raises(ConvertError, match=r"letters\.txt.*causal mask"):
        resolve(tensors, given, objective)


def test_slightly_lower_loss_without_a_mask_is_no_evidence(
    sees_all: Multihead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two causal models that no variant computes were said to have no mask, for 0.01 nats."""
    monkeypatch.setattr(by_text, "SEEN_TOKEN", 100.0)
    ids = torch.randint(0, VOCAB, (3000,), generator=torch.Generator().manual_seed(2))
    objective = text_objective(CheckText("letters.txt", ids.tolist()), 16)
    tensors = mapped(sees_all)
    with pytest.raises(ConvertError, match="no variant predicts"):  # with the mask
        resolve(tensors, findings(tensors, n_head=4), objective)


# By the file alone


def test_open_questions_stop_with_their_flags() -> None:
    tensors = mapped(SCHEMES["nanoGPT"].model())
    with pytest.raises(OpenQuestions) as refusal:
        resolve(tensors, findings(tensors))
    asked = ("n_head", "norm_position", "final_norm", "activation", "score_scale")
    assert set(refusal.value.fields) == set(asked)
    message = str(refusal.value)
    for flag in ("--n-head", "--norm-position pre|post", "--final-norm",
                 "--activation gelu|gelu_tanh|relu|silu|relu2", "--check TEXT",
                 "--score-scale head_dim|d_model|none", "--code FILE.py:NAME"):  # fmt: skip
        assert flag in message


def test_answers_close_questions_and_are_named_as_origin() -> None:
    tensors = mapped(SCHEMES["nanoGPT"].model())
    answers: dict[str, Any] = {
        "n_head": 4, "norm_position": "pre", "final_norm": True, "activation": "gelu",
        "score_scale": "head_dim",
    }  # fmt: skip
    resolution = resolve(tensors, findings(tensors, **answers))
    assert resolution.computation == canonical(SCHEMES["nanoGPT"].computation)
    assert resolution.origins["n_head"] == "--n-head"
    assert resolution.origins["norm_eps"].startswith("assumed: ")
    assert resolution.origins["positions"] == "transformer.wpe.weight is added"
    assert resolution.verified.startswith("not compared with the source")


def test_open_questions_write_a_draft(tmp_path: Path) -> None:
    draft = tmp_path / "draft.toml"
    file = state_file(SCHEMES["nanoGPT"].model())
    with pytest.raises(OpenQuestions, match=r"(?s)--n-head .*draft\.toml is a draft .*complete it"):
        read_by_role(recognize_file(file, RoleOptions(draft=draft)))
    text = draft.read_text(encoding="utf-8")
    assert 'qkv.weight = "transformer.h.{N}.attn.c_attn.weight"' in text
    assert '# activation = "gelu" | "gelu_tanh" | "relu" | "silu" | "relu2"  # open: ' in text
    assert 'positions = "learned"  # transformer.wpe.weight is added' in text


def test_unusable_tensor_gets_no_draft(tmp_path: Path) -> None:
    """A map file cannot make such a tensor usable."""
    file = state_file(SCHEMES["nanoGPT"].model())
    file.tensors["transformer.h.1.mlp.c_fc.bias"][3] = math.nan
    with pytest.raises(ConvertError, match=r"c_fc\.bias has NaN or infinite values$"):
        recognize_file(file, RoleOptions(draft=tmp_path / "draft.toml"))
    assert list(tmp_path.iterdir()) == []


def test_questions_are_asked_without_a_writable_draft(tmp_path: Path) -> None:
    """On a full disk the import once printed only "No space left on device", and left half a
    draft."""
    file = state_file(SCHEMES["nanoGPT"].model())
    with (
        files_of_at_most(100),
        pytest.raises(OpenQuestions, match=r"(?s)--n-head .*cannot be written: File too lar"),
    ):
        read_by_role(recognize_file(file, RoleOptions(draft=tmp_path / "draft.toml")))
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_too_short_is_refused() -> None:
    recognized = recognize_file(state_file(SCHEMES["nanoGPT"].model()), RoleOptions())
    with pytest.raises(ConvertError, match=r"two\.txt has 2 tokens.*at least 3"):
        read_by_role(recognized, text=CheckText("two.txt", [1, 2]))


def test_text_completes_the_import(trained: Trained) -> None:
    """The import keeps the step, loss and dropout that the file states, and records which facts
    were verified."""
    file = replace(state_file(trained.model, settings={"val_loss": 1.25, "dropout": 0.2}), step=200)
    recognized = recognize_file(file, RoleOptions())
    assert recognized.rows == 9
    lines: list[str] = []
    text = CheckText("words.txt", trained.token_ids)
    model = read_by_role(recognized, text=text, log=lines.append)
    assert (model.step, model.val_loss, model.config.dropout) == (200, 1.25, 0.2)
    assert model.facts["verified"] in lines[-1]
    assert model.facts["settled"]["score_scale"].startswith("d_model (clearly the lowest")
    assert any("stacked into one matrix" in note for note in model.notes)


# Answers that contradict the tensors


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("nanoGPT", {"norm": "rmsnorm"}),
        ("llama, QK-norm", {"qk_norm_position": "after_rotary"}),
        ("MultiheadAttention", {"positions": "learned"}),
        ("nanoGPT", {"qk_norm": "learned"}),
        ("nanoGPT", {"activation": "swiglu"}),
        ("llama2.c", {"activation": "relu"}),
        ("nanoGPT", {"n_head": 5}),
        ("nanoGPT", {"causal": False}),
        ("nanoGPT", {"context_length": 17}),
        ("llama, QK-norm", {"n_head": 8}),
    ],
)
def test_answer_that_the_tensors_contradict_is_refused(name: str, answers: dict[str, Any]) -> None:
    scheme = SCHEMES[name]
    file = state_file(scheme.model(), settings=scheme.settings)
    read_by_role(recognize_file(file, RoleOptions(answers=scheme.answers)))
    with pytest.raises(ConvertError, match=r"model\.pt: "):
        read_by_role(recognize_file(file, RoleOptions(answers=scheme.answers | answers)))


# Settings and shapes in files


@pytest.mark.parametrize("value", ["geglu", "gelu_pytorch_tanh", "relu"])
def test_gate_with_another_activation_is_refused(value: str) -> None:
    """It was computed with silu."""
    scheme = SCHEMES["llama2.c"]
    settings = {**scheme.settings, "hidden_act": value}
    with pytest.raises(ConvertError, match=rf"hidden_act is '{value}', .* with a gate; .*silu"):
        recognize_file(state_file(scheme.model(), settings=settings), RoleOptions())


@pytest.mark.parametrize(
    "settings", [{"optimizer": "RMSprop"}, {"dataset": "platforms"}, {"norms": 2, "use_rms": False}]
)
def test_words_that_contain_rms_do_not_choose_the_norm(settings: dict[str, Any]) -> None:
    assert finding("llama2.c", "norm", settings).ambiguous


def finding(name: str, field: str, settings: dict[str, Any] | None = None) -> Finding:
    return findings(mapped(SCHEMES[name].model()), settings)[field]


@pytest.mark.parametrize(
    ("name", "settings", "field", "value"),
    [
        ("nanoGPT", {"n_head": 8}, "n_head", 8),
        ("nanoGPT", {"num_attention_heads": 2}, "n_head", 2),
        ("nanoGPT", {"head_size": 16}, "n_head", 2),
        ("llama, QK-norm", {}, "n_head", 4),
        ("raw parameters", {}, "n_head", 4),
        ("lecture", {}, "n_head", 4),
        ("MultiheadAttention", {"max_len": 500}, "context_length", 500),
        ("book", {"context_length": 99}, "context_length", 16),
        ("llama2.c", {"rope_theta": 5e5}, "rope_theta", 5e5),
        ("llama2.c", {"rms_norm_eps": 1e-6}, "norm", "rmsnorm"),
        ("llama2.c", {"norm_class": "LlamaRMSNorm"}, "norm", "rmsnorm"),
        ("llama2.c", {"rms_norm_eps": 1e-6}, "norm_eps", 1e-6),
        ("nanoGPT", {"activation": "gelu_new"}, "activation", "gelu_tanh"),
        ("nanoGPT", {"hidden_act": "ReLU"}, "activation", "relu"),
        ("nanoGPT", {"norm_first": False}, "norm_position", "post"),
        ("llama2.c", {"qk_norm": True}, "qk_norm", "unit"),
        ("MultiheadAttention", {}, "score_scale", "head_dim"),
        ("lecture", {}, "causal", True),
        ("gate and up together, no positions", {}, "norm", "rmsnorm"),
    ],
)
def test_evidence_in_the_file_answers_questions(
    name: str, settings: dict[str, Any], field: str, value: Any
) -> None:
    said = finding(name, field, settings)
    assert said.values == (value,)
    assert said.origin


def test_heads_that_shapes_contradict_are_a_question() -> None:
    found = finding("nanoGPT", "n_head", {"n_head": 5})
    assert found.ambiguous
    assert re.match(r"n_head is 5 .*32 query rows", found.origin)


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ConvertError, match=r"activation is 'mish', .*gelu"):
        finding("nanoGPT", "activation", {"activation": "mish"})


def test_settings_of_a_wrong_kind_are_ignored() -> None:
    for value in ("4", 4.0, True, 0, -4, None):
        assert finding("nanoGPT", "n_head", {"n_head": value}).ambiguous
    assert finding("nanoGPT", "norm_position", {"norm_first": "yes"}).ambiguous


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 31_000.0])
@pytest.mark.parametrize("form", ["inv_freq", "cos", "doubled", "neighbors", "freqs_cis"])
def test_rotary_table_shows_theta_layout_and_heads(form: str, theta: float) -> None:
    """The tables are for heads with 8 channels, in every form in which people store them."""
    rates = theta ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.outer(torch.arange(64, dtype=torch.float64), rates)
    name, table = {
        "inv_freq": ("rotary.inv_freq", rates.float()),
        "cos": ("layers.0.self_attn._cos", angles.cos().float()),
        "doubled": ("rope.cos_cached", torch.cat((angles, angles), 1).cos().float()[None, None]),
        "neighbors": ("rope.cos", angles.repeat_interleave(2, 1).cos().float()),
        "freqs_cis": ("freqs_cis", torch.polar(torch.ones(64, 4), angles.float())),
    }[form]
    scheme = SCHEMES["llama"]
    file = state_file(scheme.model())
    said = recognize_file(
        type(file)(file.path, file.where, {**file.tensors, name: table}), RoleOptions()
    ).findings
    assert said["positions"].values == ("rotary",)
    assert said["n_head"].values[0] == 4
    assert said["rope_theta"].values == (pytest.approx(theta, rel=2e-3),)
    layout = {"doubled": "half", "neighbors": "interleaved", "freqs_cis": "interleaved"}
    assert said["rotary_layout"].values[0] == layout.get(form, "half")
    assert said["rotary_layout"].resolved is (form in layout)
    if form != "inv_freq":
        assert said["context_length"].values == (64,)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_first_values_are_a_whole_computation(scheme: Scheme) -> None:
    how = first(findings(mapped(scheme.model()), scheme.settings))
    assert how == canonical(how)
    assert how.causal
