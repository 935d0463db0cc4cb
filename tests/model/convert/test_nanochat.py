"""nanochat: the checkpoints of every version are compared with a textbook class, and the vocabulary
is imported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from logitd.model.convert.by_role.resolution import OpenQuestions
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.importing import import_model
from tests.model.convert.textbook_nanochat import VERSIONS, save, save_vocabulary, small
from tests.model.convert.theirs import loaded

IDS = torch.arange(200) * 37 % 300


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_keeps_its_logits(version: str, tmp_path: Path) -> None:
    model = small(version)
    import_model(save(tmp_path / "d4", model), tmp_path / "ours", tokenizer="none")
    info, gpt = loaded(tmp_path / "ours")
    assert (info.config.vocab_size, info.training.step, info.training.tokens) == (300, 250, 256_000)
    logits = gpt(IDS[None]).logits[0]
    theirs = model(IDS)
    assert theirs.std() > 0.3
    assert_close(logits, theirs, atol=1e-4, rtol=1e-4)


def test_file_with_most_steps_is_read(tmp_path: Path) -> None:
    save(tmp_path / "d4", small("October 2025"), step=90)
    folder = save(tmp_path / "d4", small(), step=1000)
    torch.save({}, folder / "optim_001000_rank0.pt")
    import_model(folder, tmp_path / "ours", tokenizer="none")
    assert loaded(tmp_path / "ours")[0].config.smear


def test_lone_file_reports_missing_parts(tmp_path: Path) -> None:
    model = small(window_pattern="SSSL")
    folder = save(tmp_path / "d4", model)
    (folder / "meta_000250.json").unlink()
    with pytest.raises(ConvertError, match=r"meta_000250\.json.*--context-length"):
        import_model(folder, tmp_path / "ours", tokenizer="none")
    lines: list[str] = []
    import_model(
        folder / "model_000250.pt", tmp_path / "ours",
        tokenizer="none", context_length=256, log=lines.append,
    )  # fmt: skip
    assert any("assumed" in line and "SSSL" in line for line in lines)
    info, gpt = loaded(tmp_path / "ours")
    assert info.config.vocab_size == 320, "without meta, padding cannot be told from ids"
    assert_close(gpt(IDS[None]).logits[0, :, :300], model(IDS), atol=1e-4, rtol=1e-4)


def test_unstated_logit_cap_is_assumed(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = save(tmp_path / "d4", small("17 January 2026"))
    import_model(folder, tmp_path / "ours", tokenizer="none", log=lines.append)
    assert any("assumed" in line and "15" in line and "20" in line for line in lines)


def test_vocabulary_and_chat_template_are_imported(tmp_path: Path) -> None:
    """nanochat writes its vocabulary next to the folder of checkpoints, as a pickled tiktoken
    encoding."""
    encoding = save_vocabulary(tmp_path)
    folder = save(tmp_path / "chatsft_checkpoints" / "d4", small(vocab_size=267))
    import_model(folder, tmp_path / "ours")
    info, _ = loaded(tmp_path / "ours")
    assert info.tokenizer.encode("hello 123") == encoding.encode("hello 123")
    assert set(info.tokenizer.ends) == {258, 262}
    assert info.chat_template is not None
    messages = [
        {"role": "system", "content": "be <|bos|>"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "he"},
    ]
    parts = info.chat_template.render(messages, info.tokenizer)
    ids = [
        token_id
        for part in parts
        for token_id in ([part] if isinstance(part, int) else encoding.encode_ordinary(part))
    ]
    said = encoding.encode_ordinary
    user, answer = (259, 260), (261, 262)
    assert ids == [
        258, user[0], *said("be <|bos|>\n\nhi"), user[1], answer[0], *said("ho"), answer[1],
        user[0], *said("he"), user[1], answer[0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window_pattern": "SX"}, "window_pattern is 'SX'"),
        ({"n_layer": 10**9}, "1,000,000,000 layers"),
        ({"n_head": 5}, "n_head"),
        ({"n_embd": 64}, r"\.weight has shape .* requires"),
    ],
)
def test_false_size_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = small()
    sizes = {**model.meta()["model_config"], **changes}
    folder = save(tmp_path / "d4", model, model_config=sizes)
    with pytest.raises(ConvertError, match=named):
        import_model(folder, tmp_path / "ours", tokenizer="none")


def test_foreign_tensor_is_not_nanochat(tmp_path: Path) -> None:
    folder = save(tmp_path / "d4", small())
    state = torch.load(folder / "model_000250.pt", weights_only=True)
    torch.save(
        {**state, "transformer.h.0.attn.ln.weight": torch.ones(48)}, folder / "model_000250.pt"
    )
    with pytest.raises(ConvertError, match=r"attn\.ln"):
        import_model(folder, tmp_path / "ours", tokenizer="none")


def test_file_with_the_same_names_but_without_meta_is_recognized_by_role(tmp_path: Path) -> None:
    """modded-nanogpt's names were taken for nanochat's, and a missing file was asked for."""
    model = small("October 2025")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(OpenQuestions, match="--n-head"):
        import_model(tmp_path / "model.pt", tmp_path / "ours", tokenizer="none")
