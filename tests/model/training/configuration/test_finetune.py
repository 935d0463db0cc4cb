"""Fine-tuning of whole models and of adapters: the start, the changes that are allowed, and the
files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.checkpoint.adapter import merge, read_adapter
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import load_checkpoint
from logitd.model.data.errors import DataError
from logitd.model.evaluation.held_out import held_out_text
from logitd.model.evaluation.text_loss import text_loss
from logitd.model.training.configuration.config import TrainingConfig, TrainingError
from logitd.model.training.configuration.finetune import LORA_RATE, WARMUP
from logitd.model.training.configuration.presets import PRESETS, Recipe
from logitd.model.training.configuration.resolve import resolve
from logitd.model.training.events import Event, Noticed
from logitd.model.training.optim.schedule import lr_scale
from logitd.model.training.recording import recorder
from logitd.model.training.run.directory import RunDirectory
from logitd.model.training.run.state import read_state
from logitd.model.training.setup.base import open_base
from logitd.model.training.trainer import TrainingResult, train
from logitd.model.transformer.config import GPTConfig, RopeScaling
from logitd.model.transformer.shapes import MODERN
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.model.training.test_trainer import _state, _train_until

LINES, LINE = 300, "the quick foxes jump over it...\n"
"""The text has LINES lines of 32 bytes. With one token per byte, each window of 32 tokens in the
held-out text is one line."""
HELD_OUT = (LINES // 10 - 1) * len(LINE)

Tune = Callable[..., TrainingConfig]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "foxes.txt"
    path.write_text(LINE * LINES, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with rotary positions and a context of 32."""
    config = tiny_config(**MODERN, context_length=32, n_layer=2)
    path = tmp_path_factory.mktemp("checkpoints") / "base"
    template = "{{ messages }}"
    return save_tiny_checkpoint(path, gpt=tiny_gpt(config), chat_template=template).path


@pytest.fixture
def tune(base: Path, text: Path, tmp_path: Path) -> Tune:
    def make(**given: Any) -> TrainingConfig:
        values: dict[str, Any] = {
            "from_checkpoint": base,
            "data": (str(text),),
            "out": tmp_path / "run",
            "steps": 12,
            "batch_size": 4,
            "dtype": "float32",
            "threads": 1,
            "log_every": 2,
            "eval_every": 6,
            "eval_batches": 1,
            "checkpoint_every": 6,
            "sample_tokens": 1,
        }
        return TrainingConfig(**{**values, **given})

    return make


def evaluations(result: TrainingResult) -> dict[int, float]:
    metrics = RunDirectory(result.run).metrics()
    return {each["step"]: each["val_loss"] for each in metrics if each["kind"] == "eval"}


def held_out(text: Path, path: Path) -> Path:
    """Write the lines that the trainer holds out from the document: its last tenth without the
    first line, because the split moves to the next end of a line."""
    path.write_bytes(text.read_bytes()[-HELD_OUT:])
    return path


@pytest.mark.parametrize(("lora", "dtype"), [(None, "float32"), (4, "float32"), (4, "bfloat16")])
def test_run_begins_with_the_loss_of_its_base_and_lowers_it(
    tune: Tune, base: Path, text: Path, tmp_path: Path, lora: int | None, dtype: Any
) -> None:
    result = train(tune(lora=lora, dtype=dtype, eval_batches=1000))
    losses = evaluations(result)
    found = text_loss(
        base, [str(held_out(text, tmp_path / "end.txt"))], batch_size=4, dtype=dtype, threads=1
    )
    assert found.evaluation.tokens == HELD_OUT
    rounding = 1e-5 if dtype == "float32" else 0  # the former is computed as for serving
    assert losses[0] == pytest.approx(found.evaluation.loss, rel=rounding, abs=0)
    assert losses[12] < losses[6] < losses[0]


def test_run_killed_before_its_first_save_begins_with_its_base_again(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run once continued from random weights, though its card still named the base
    checkpoint."""
    straight = train(tune(out=tmp_path / "straight"))

    def kill(path: Path, **facts: Any) -> None:
        raise SystemExit("killed before there is a state")

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "save_state", kill)
        with pytest.raises(SystemExit):
            train(tune(out=tmp_path / "killed"))
    resumed = train(TrainingConfig(out=tmp_path / "killed", resume=True))
    assert evaluations(resumed) == evaluations(straight)


def test_checkpoint_names_its_base(tune: Tune, base: Path) -> None:
    result = train(tune(data_licence="CC0", steps=2))
    info, was = read_checkpoint(result.best), read_checkpoint(base)
    assert info.training.base == {
        "name": "base",
        "weights_sha256": was.weights_sha256,
        "model": was.config.to_dict(),
        "step": 7,
        "tokens": 7168,
        "data": {"name": "tiny", "licence": "MIT"},
    }
    assert info.config == was.config
    assert info.tokenizer.ranks == was.tokenizer.ranks
    assert info.chat_template is not None, "the base's"
    card = (result.best / "README.md").read_text()
    for part in (
        f"Fine-tuned from base, step 7, weights sha256 `{was.weights_sha256}`",
        "which was trained on tiny (MIT)",
        f"--from {base}",
        "License of the text: CC0",
    ):
        assert part in card
    again = open_base(result.best)
    assert again.record["name"] == "run/step-000002"
    assert again.record["base"] == info.training.base


def resolved(config: TrainingConfig) -> tuple[Recipe, GPTConfig]:
    path = config.from_checkpoint
    resolution = resolve(config, None if path is None else open_base(path))
    resolution = resolution.with_vocabulary(1000)
    return resolution.recipe, resolution.model


def test_recipe_is_gentle_unless_given(tune: Tune) -> None:
    preset = PRESETS["tiny"].recipe
    recipe, _ = resolved(tune(steps=40, head_lr=0.5))
    assert recipe.matrix_lr == preset.matrix_lr / 10
    assert recipe.embedding_lr == preset.embedding_lr / 10
    assert (recipe.head_lr, recipe.warmup, recipe.short_windows) == (0.5, 2, 0.0)
    assert recipe.optimizer == "muon"
    recipe, model = resolved(tune(batch_size=None))
    assert recipe.batch_size == 2048 // model.context_length
    recipe, _ = resolved(tune(steps=40, warmup=0, lora=2, preset="small"))
    assert (recipe.optimizer, recipe.matrix_lr) == ("adamw", LORA_RATE)
    assert (recipe.weight_decay, recipe.warmup) == (0.0, 0)


def test_warmup_of_a_run_by_the_clock_is_a_share_of_the_run(tune: Tune, base: Path) -> None:
    """The preset's steps, from which the warmup is counted otherwise, do not limit such a run."""
    by_clock = resolve(tune(minutes=10, preset="gpt2-124m", steps=None), open_base(base))
    rates = [
        lr_scale(by_clock.recipe, step=10, done=done, rewarming=by_clock.rewarming)
        for done in (0.0, WARMUP / 2, WARMUP)
    ]
    assert 0 < rates[0] < rates[1] < rates[2] > 0.99
    for given in ({"steps": 40}, {"warmup": 3, "steps": None}):
        assert resolve(tune(minutes=10, **given), open_base(base)).rewarming is None
    recipe, _ = resolved(tune(lora=2, matrix_lr=0.5, weight_decay=0.1))
    assert (recipe.matrix_lr, recipe.weight_decay) == (0.5, 0.1)


@pytest.mark.parametrize("lora", [None, 4])
def test_stopped_and_resumed_run_has_the_bits_of_one_run(
    tune: Tune, tmp_path: Path, lora: int | None
) -> None:
    given = {"lora": lora, "dropout": 0.1, "log_every": 1}
    train(tune(out=tmp_path / "straight", **given))
    one = tune(out=tmp_path / "broken", **given)
    assert _train_until(4, one).reason == "interrupted"
    result = train(TrainingConfig(out=one.out, resume=True))
    assert (result.step, result.reason) == (12, "finished")
    assert _state(tmp_path / "straight") == _state(tmp_path / "broken")
    config = json.loads((result.best / "config.json").read_text())
    assert config["training"]["base"]["name"] == "base"


def test_state_and_checkpoint_have_only_adapters(tune: Tune, base: Path) -> None:
    events: list[Event] = []
    result = train(tune(lora=2, lora_alpha=8.0, lora_targets=("qkv", "mlp_up")), events.append)
    state = read_state(result.run / "state" / "state.pt")
    assert len(state.weights) == 2 * 2 * 2
    assert all(name.endswith(("lora_a", "lora_b")) for name in state.weights)
    assert list(state.optimizers) == ["adamw"]
    assert len(state.optimizers["adamw"]["state"]) == 8
    adapter = read_adapter(result.best)
    assert (adapter.shape.rank, adapter.shape.alpha) == (2, 8.0)
    assert adapter.shape.targets == ("qkv", "mlp_up")
    assert result.adapter_of == base
    notices = [event.message for event in events if isinstance(event, Noticed)]
    assert any(line.startswith("adapters of rank 2: ") for line in notices)
    assert "This is an adapter of rank 2, alpha 8" in (result.best / "README.md").read_text()


def test_merged_adapters_have_the_loss_of_the_run(
    tune: Tune, base: Path, text: Path, tmp_path: Path
) -> None:
    result = train(tune(lora=4, eval_batches=1000))
    info = merge(base, result.best, tmp_path / "merged", save_dtype="float32")
    found = text_loss(
        info.path, [str(held_out(text, tmp_path / "end.txt"))], dtype="float32", threads=1
    )
    assert found.evaluation.loss == pytest.approx(result.val_loss, abs=1e-5)
    _, plain = load_checkpoint(base, device=torch.device("cpu"), dtype=torch.float32)
    _, merged = load_checkpoint(info.path, device=torch.device("cpu"), dtype=torch.float32)
    names = {
        name
        for name, tensor in merged.state_dict().items()
        if not torch.equal(tensor, plain.state_dict()[name])
    }
    matrices = ("qkv.weight", "attention_out.weight", "mlp_up.weight", "mlp_down.weight")
    assert all(name.endswith(matrices) for name in names)
    assert len(names) == 2 * 4


def test_run_of_adapters_resumes_only_with_its_base(tune: Tune, base: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    other = save_tiny_checkpoint(tmp_path / "other", gpt=tiny_gpt(seed=3))
    config = tune(lora=2)
    _train_until(4, config)
    assert config.out is not None
    with pytest.raises(TrainingError, match=f"{other.weights_sha256[:12]}.*--from"):
        train(TrainingConfig(out=config.out, resume=True, from_checkpoint=other.path))
    with pytest.raises(TrainingError, match=r"elsewhere does not exist"):
        train(TrainingConfig(out=config.out, resume=True, from_checkpoint=moved))
    moved.symlink_to(base)
    resume = TrainingConfig(out=config.out, resume=True, from_checkpoint=moved)
    assert train(resume).step == 12
    with pytest.raises(TrainingError, match="--lora cannot change when a run is resumed"):
        train(TrainingConfig(out=config.out, resume=True, lora=3))


def test_adapters_keep_a_base_that_its_run_removes(tune: Tune, tmp_path: Path) -> None:
    shape = {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 1, "context_length": 16}
    given = {"vocab_size": 257, "checkpoint_every": 2, "keep": 1, "eval_every": 100}
    first = tune(from_checkpoint=None, out=tmp_path / "first", steps=2, **shape, **given)
    step = train(first).checkpoint.resolve()
    config = tune(from_checkpoint=first.out, lora=2)
    _train_until(4, config)
    train(TrainingConfig(out=first.out, resume=True, steps=8))
    assert not step.exists()
    moved = tmp_path / "moved"
    assert config.out is not None
    config.out.rename(moved)
    result = train(TrainingConfig(out=moved, resume=True))
    assert (result.step, result.adapter_of) == (12, moved / "base")
    merged = merge(moved / "base", moved, tmp_path / "merged", save_dtype="float32")
    assert merged.training.base is not None
    assert merged.training.base["name"] == "first/step-000002"
    kept = read_checkpoint(moved / "base")
    assert (kept.name, kept.training.step) == ("base", 2)
    with pytest.raises(DataError, match="no held-out text"):
        held_out_text(kept)
    assert not (train(tune(out=tmp_path / "other", lora=2, steps=1)).run / "base").exists()


def test_tuned_run_refuses_another_base_when_resumed(tune: Tune, tmp_path: Path) -> None:
    """The state has all weights, so the base was not opened and --from had no effect."""
    config = tune()
    _train_until(2, config)
    other = save_tiny_checkpoint(tmp_path / "other", gpt=tiny_gpt(seed=3))
    with pytest.raises(TrainingError, match=f"--from: .*{other.weights_sha256[:12]}.*leave it out"):
        train(TrainingConfig(out=config.out, resume=True, from_checkpoint=other.path))


@pytest.mark.parametrize("positions", ["rotary", "sinusoidal", "learned"])
def test_other_context_needs_computed_positions(tune: Tune, tmp_path: Path, positions: Any) -> None:
    gpt = tiny_gpt(tiny_config(context_length=32, positions=positions, n_layer=1))
    path = save_tiny_checkpoint(tmp_path / "other", gpt=gpt).path
    for context in (16, 64):
        config = tune(from_checkpoint=path, context_length=context)
        if positions == "learned":
            with pytest.raises(TrainingError, match=f"context_length .*{context}.* 32 learned"):
                resolved(config)
        else:
            assert resolved(config)[1].context_length == context


def test_longer_context_may_scale_the_positions(tune: Tune) -> None:
    """No weight depends on the context length, so it may grow. The checkpoint records the scaling,
    and later runs keep it."""
    scaling = RopeScaling(kind="yarn", factor=2.0, original_context_length=32)
    result = train(tune(context_length=64, steps=2, rope_scaling=scaling))
    info, gpt = load_checkpoint(result.best, device=torch.device("cpu"), dtype=torch.float32)
    assert (info.config.context_length, info.config.rope_scaling) == (64, scaling)
    assert gpt(torch.zeros(1, 64, dtype=torch.int64)).logits.isfinite().all()
    again = resolved(tune(from_checkpoint=result.best, context_length=48))[1]
    assert again.rope_scaling == scaling


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"rotary_dim": 4}, "rotary_dim .*4.* 8"),
        ({"head_bias": True}, "head_bias .*True.*False"),
        ({"residual": "parallel"}, "residual .*parallel.*sequential"),
        ({"final_norm": False}, "final_norm .*False.*True"),
        ({"d_model": 64}, "d_model .*64.*32"),
        ({"n_layer": 3}, "n_layer .*3.*2"),
        ({"rope_theta": 5.0}, r"rope_theta .*5\.0.*10000"),
        ({"vocab_size": 300}, "vocab_size .*300.*257"),
        ({"tokenizer": "own"}, "tokenizer .*'own'"),
        ({"init": "gpt2"}, "init .*'gpt2'"),
        ({"from_checkpoint": Path("nowhere")}, "--from: nowhere does not exist"),
        ({"from_checkpoint": None, "lora": 2}, "lora .*--from"),
        ({"lora_alpha": 2.0}, "lora_alpha .*--lora"),
        ({"lora": 2, "rope_scaling": {"kind": "linear", "factor": 2.0}}, "rope_scaling .*linear"),
        ({"lora": 2, "context_length": 33}, "context_length .*33.* 32, .*at most 32.*--lora"),
        ({"lora": 33}, "rank is 33"),
        ({"lora": 2, "optimizer": "muon"}, "optimizer .*muon.*adapters"),
        ({"lora": 2, "head_lr": 0.1}, "head_lr .*--lora"),
    ],
)
def test_setting_that_contradicts_the_base_is_refused(
    tune: Tune, given: dict[str, Any], pattern: str
) -> None:
    config = tune(**given)
    with pytest.raises(TrainingError, match=pattern):
        train(config)
    assert config.out is not None
    assert not config.out.exists()


def test_setting_that_agrees_with_the_base_is_accepted(tune: Tune) -> None:
    _, model = resolved(tune(d_model=32, vocab_size=257, tied_head=False, dropout=0.5))
    assert model.dropout == 0.5


def test_adapter_may_be_trained_in_a_shorter_context(tune: Tune) -> None:
    assert resolved(tune(lora=2, context_length=16))[1].context_length == 16
