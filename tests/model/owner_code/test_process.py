"""The process of an owner's code: it crashes, hangs, and starts again."""

import os
from pathlib import Path

import pytest
import torch

from logitd import LLM, SamplingParams
from logitd.model.checkpoint.checkpoint import read_checkpoint, read_sources
from logitd.model.llm import GenerationError
from logitd.model.owner_code.config import CodeConfig
from logitd.model.owner_code.connection import CodeError, CodeModel, Wanted
from tests.model.owner_code.classes import made
from tests.model.owner_code.imported import imported, written

pytestmark = pytest.mark.slow


def code_model(path: Path, seconds: float = 60) -> CodeModel:
    info = read_checkpoint(path)
    assert isinstance(info.shape, CodeConfig)
    return CodeModel(info.shape, read_sources(info), path / "model.safetensors", 1, seconds=seconds)


def test_crash_fails_the_requests_of_its_step_and_the_process_starts_again(tmp_path: Path) -> None:
    path = imported("Crashing", tmp_path)
    with LLM(path, run_code=True) as llm:
        before = llm.logits([1, 2, 3])
        network = llm._engine._runner.model.network
        assert isinstance(network, CodeModel)
        process = network._process
        assert process is not None
        folder = Path(f"/proc/{process.pid}/cwd").resolve()
        (folder / "now").touch()
        greedy = SamplingParams(max_tokens=2, temperature=0)
        with pytest.raises(GenerationError, match=r"owner\.py:Crashing ended with status 3.*again"):
            llm.generate([[7, 2], [1, 2]], greedy)
        assert not folder.exists()
        assert (llm.logits([1, 2, 3]) == before).all()
        assert len(llm.generate([[7, 2]], greedy)[0].token_ids) == 2
        with pytest.raises(Exception, match=r"owner\.py:Crashing: its forward failed .* out of or"):
            llm.logits([8, 1, 1, 1, 1])
        assert (llm.logits([1, 2, 3]) == before).all()


def test_hang_ends_the_process(tmp_path: Path) -> None:
    path = imported("Crashing", tmp_path)
    model = code_model(path, seconds=1.0)
    model.start()
    assert model._process is not None
    os.kill(model._process.pid, 19)  # SIGSTOP
    with pytest.raises(CodeError, match="did not answer within 1 seconds; its process was ended"):
        model.logits([Wanted([1, 2], 0, 2)])
    model.seconds = 60.0
    expected = made("Crashing")(torch.tensor([[1, 2]]))[0]
    assert torch.allclose(model.logits([Wanted([1, 2], 0, 2)]), expected, atol=1e-5)
    model.close()


def test_process_has_no_network_and_no_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITD_API_KEYS", "secret")
    code = (
        "import os, socket\nfrom torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        assert not [name for name in os.environ if name.startswith('LOGITD_')]\n"
        "        socket.create_connection(('127.0.0.1', 9))\n"
    )
    with pytest.raises(CodeError, match=r"owner\.py:Model: PermissionError: no network here"):
        code_model(written(tmp_path, code)).start()


def test_prints_of_the_code_do_not_fill_the_disk(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.zeros(4))\n"
        "    def forward(self, ids):\n"
        "        print('x' * 700_000, file=sys.stderr)\n"
        "        return self.weight.sum() + torch.zeros(*ids.shape, 29)\n"
    )
    model = code_model(written(tmp_path, code))
    for _ in range(4):
        assert float(model.logits([Wanted([1, 2], 1, 2)]).sum()) == 4 * 29
    assert model._scratch is not None
    assert (Path(model._scratch.name) / "stderr").stat().st_size < 2**20
    model.close()
