"""A model in the shape of modded-nanogpt, imported with its code: its forward needs a second
argument, and its layers have banks of weights instead of modules."""

import shutil
from pathlib import Path

import pytest
import torch

from logitd import LLM
from logitd.model.convert.by_code import CodeOptions, import_by_code
from logitd.model.convert.by_role.owner_code import parse_owner_code
from tests.model.owner_code import speedrun
from tests.model.owner_code.classes import CONTEXT, VOCABULARY
from tests.model.owner_code.imported import LETTERS

pytestmark = pytest.mark.slow


def test_logits_and_stages_are_those_of_the_class(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = speedrun.Speedrun(VOCABULARY).eval()
    shutil.copy(speedrun.__file__, tmp_path / "train_gpt.py")
    contents = {"model": model.state_dict(), "max_seq_len": CONTEXT, "itos": list(LETTERS)}
    torch.save(contents, tmp_path / "state.pt")
    made = f"{tmp_path}/train_gpt.py:Speedrun({VOCABULARY})"
    code = parse_owner_code(made, "model(ids, bigram_hashes(ids))")
    options = CodeOptions(code=code, answers={})
    import_by_code(tmp_path / "state.pt", tmp_path / "out", options, log=lambda line: None)
    ids, mixed = torch.arange(CONTEXT)[None] * 5 % VOCABULARY, list[torch.Tensor]()
    model.mixers[0].register_forward_hook(lambda module, given, made: mixed.append(made[0]))
    with torch.no_grad():
        expected = model(ids, speedrun.bigram_hashes(ids))[0]
    with LLM(tmp_path / "out", run_code=True) as llm:
        assert torch.allclose(torch.from_numpy(llm.logits(ids[0].tolist())), expected, atol=1e-5)
        read = llm.activations(ids[0].tolist(), "mixers.0", positions="all")["mixers.0"]
    assert torch.allclose(torch.from_numpy(read), mixed[0], atol=1e-5)
