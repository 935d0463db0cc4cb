"""The process of an owner's code: it crashes, hangs, and starts again."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from logitd import LLM, SamplingParams
from logitd.model.checkpoint.checkpoint import read_checkpoint
from logitd.model.checkpoint.load import read_sources
from logitd.model.convert.by_code import CodeOptions, import_by_code
from logitd.model.convert.by_role.owner_code import parse_owner_code
from logitd.model.convert.foreign import ConvertError
from logitd.model.inference.engine.events import Event, FinishEvent, FinishReason, TokenEvent
from logitd.model.inference.engine.requests import GenerationRequest
from logitd.model.llm import GenerationError
from logitd.model.owner_code.config import CodeConfig
from logitd.model.owner_code.connection import CodeError, CodeModel, Wanted
from tests.model.convert.by_role.owner_files import BY_NAMES, PARTS
from tests.model.owner_code.classes import CONTEXT, made
from tests.model.owner_code.imported import imported, source, written

pytestmark = pytest.mark.slow


def code_model(path: Path, seconds: float = 60) -> CodeModel:
    info = read_checkpoint(path)
    assert isinstance(info.shape, CodeConfig)
    return CodeModel(info.shape, *read_sources(info), 1, seconds=seconds)


def test_crash_fails_its_sequence_and_restarts_the_process(tmp_path: Path) -> None:
    path = imported("Crashing", tmp_path)
    with LLM(path, run_code=True) as llm:
        before = llm.logits([1, 2, 3])
        network = llm._engine._runner.model.network
        assert isinstance(network, CodeModel)
        process = network._process
        assert process is not None
        folder = Path(f"/proc/{process.popen.pid}/cwd").resolve()
        (folder / "now").touch()
        greedy = SamplingParams(max_tokens=2, temperature=0)
        with pytest.raises(GenerationError, match=r"owner\.py:Crashing ended with status 3"):
            llm.generate([[7, 2], [1, 2]], greedy)
        assert not folder.exists()
        assert (llm.logits([1, 2, 3]) == before).all()
        assert len(llm.generate([[7, 2]], greedy)[0].token_ids) == 2
        with pytest.raises(Exception, match=r"owner\.py:Crashing: its forward failed .* out of or"):
            llm.logits([8, 1, 1, 1, 1])
        engine, params = llm._engine, replace(greedy, max_tokens=1, seed=0)
        for name, ids in (("bad", (8, 1, 1, 1, 1)), ("good", (1, 2, 3))):
            engine.add(GenerationRequest(request_id=name, token_ids=ids, params=params))
        events = engine.step().events
        ended = {e.request_id: e.reason for e in events if isinstance(e, FinishEvent)}
        assert ended == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
        assert (llm.logits([1, 2, 3]) == before).all()


def test_restart_of_the_process_does_not_change_the_bits_of_a_sequence(tmp_path: Path) -> None:
    """The process holds the states of all sequences, so a pass of one sequence that ends the
    process ends them too. The others were then computed in other passes."""
    params = SamplingParams(max_tokens=CONTEXT - 3, seed=1, logprobs=0)
    with LLM(imported("Remembering", tmp_path), run_code=True) as llm:
        engine, events = llm._engine, list[list[Event]]()
        network = engine._runner.model.network
        assert isinstance(network, CodeModel)
        for restart_at in (None, 20):
            engine.add(GenerationRequest(request_id="one", token_ids=(1, 2, 3), params=params))
            events.append([])
            while engine.has_work():
                events[-1] += engine.step().events
                if len(events[-1]) == restart_at:
                    network.close()
    alone, restarted = ([e for e in each if isinstance(e, TokenEvent)] for each in events)
    assert len(alone) == params.max_tokens
    assert restarted == alone


def test_call_by_an_expression_is_served(tmp_path: Path) -> None:
    path, code = source("Masked", tmp_path)
    call = parse_owner_code(code, "model(ids, torch.ones_like(ids))")
    options = CodeOptions(code=call, answers={})
    import_by_code(path, tmp_path / "out", options, log=lambda line: None)
    with LLM(tmp_path / "out", run_code=True) as llm:
        logits = torch.from_numpy(llm.logits([1, 2, 3]))
    assert torch.allclose(logits, made("Recurrent")(torch.tensor([[1, 2, 3]]))[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["Routed", "Turned"])
def test_integers_and_complex_numbers_are_stored(kind: str, tmp_path: Path) -> None:
    """Tables of integers were dropped, and the class drew others. Complex parameters were
    refused as missing."""
    with LLM(imported(kind, tmp_path, seed=5), run_code=True) as llm:
        logits = torch.from_numpy(llm.logits([1, 2, 3]))
    assert torch.allclose(logits, made(kind, 5)(torch.tensor([[1, 2, 3]]))[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["Drawn", "DrawnByTorch"])
def test_class_that_draws_what_it_does_not_store_is_refused(kind: str, tmp_path: Path) -> None:
    """Random numbers from torch went unnoticed, because every model was made with one seed."""
    with pytest.raises(ConvertError, match=rf"owner.py:{kind} returns other logits each time"):
        imported(kind, tmp_path)


def test_answer_that_the_class_does_not_read_is_refused(tmp_path: Path) -> None:
    path, code = source("Masked", tmp_path)
    call = parse_owner_code(code, "model(ids, torch.ones_like(ids))")
    options = CodeOptions(code=call, answers={"activation": "relu"})
    with pytest.raises(ConvertError, match=r"--activation has no effect .* owner.py:Masked reads"):
        import_by_code(path, tmp_path / "out", options, log=lambda line: None)


def test_hang_ends_the_process(tmp_path: Path) -> None:
    path = imported("Crashing", tmp_path)
    model = code_model(path, seconds=1.0)
    model.start()
    assert model._process is not None
    os.kill(model._process.popen.pid, 19)  # SIGSTOP
    with pytest.raises(CodeError, match="did not answer within 1 seconds; its process was killed"):
        model.logits([Wanted([1, 2], 0, 2)])
    model.seconds = 60.0
    expected = made("Crashing")(torch.tensor([[1, 2]]))[0]
    assert torch.allclose(model.logits([Wanted([1, 2], 0, 2)]), expected, atol=1e-5)
    model.close()


def test_process_starts_again_with_the_verified_weights(tmp_path: Path) -> None:
    """The process once opened the file by its path. If another checkpoint had replaced the file,
    the process served it after a crash without verifying it."""
    path, other = (imported("Recurrent", tmp_path, seed=seed) for seed in (1, 2))
    model = code_model(path)
    other.joinpath("model.safetensors").rename(path / "model.safetensors")
    expected = made("Recurrent")(torch.tensor([[1, 2]]))[0]
    for _ in range(2):
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
    assert model._process is not None
    assert (model._process.folder / "stderr").stat().st_size < 2**20
    model.close()


CHARACTERS = """
from pathlib import Path
import torch
from torch import nn
text = Path("input.txt").read_text()
chars = sorted(set(text))

class Recurrent(nn.Module):
    def __init__(self, vocab_size=len(chars)):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(vocab_size, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, vocab_size)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])
"""


def test_values_from_files_that_are_not_kept_are_recorded(tmp_path: Path) -> None:
    """During the import, the owner's code derives a default value from a text file in the current
    folder. Once that file was removed, the served model used to fail."""
    text = "ab, cd"
    (tmp_path / "input.txt").write_text(text)
    (tmp_path / "owner.py").write_text(CHARACTERS)
    names: dict[str, Any] = {"__name__": "owner"}
    with contextlib.chdir(tmp_path):
        exec(CHARACTERS, names)
    model = names["Recurrent"]()
    torch.save({"model": model.state_dict(), "chars": sorted(text)}, tmp_path / "model.pt")
    options = CodeOptions(code=parse_owner_code(f"{tmp_path}/owner.py:Recurrent"), answers={})
    path = tmp_path / "imported"
    import_by_code(tmp_path / "model.pt", path, options, log=lambda line: None)
    (tmp_path / "input.txt").unlink()
    with LLM(path, run_code=True) as llm:
        logits = torch.from_numpy(llm.logits([0, 3, 1]))
    assert torch.allclose(logits, model(torch.tensor([[0, 3, 1]]))[0], atol=1e-5)


PACKAGE = {
    "gpt/sizes.py": "WIDTH = 8\n",
    "gpt/model.py": """
import torch
from torch import nn
from gpt.sizes import WIDTH
from .parts import Positions

class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab_size, WIDTH), Positions(WIDTH)
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, vocab_size)

    def forward(self, ids):
        return self.head(self.rnn(self.positions(self.embed(ids)))[0])
""",
    "gpt/parts.py": """
import torch
from torch import nn

class Positions(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(12, width)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))
""",
}


def test_package_that_imports_itself_by_its_name_keeps_its_folder(tmp_path: Path) -> None:
    """The import once dropped the folder's name, so the served code did not find its own
    package."""
    (tmp_path / "gpt").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / name).write_text(text)
    state = {"embed.weight": torch.ones(5, 8), "positions.table.weight": torch.ones(12, 8)}
    gru, head = torch.nn.GRU(8, 8), torch.nn.Linear(8, 5)
    state |= {f"rnn.{name}": tensor for name, tensor in gru.state_dict().items()}
    state |= {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    torch.save({"model": state, "chars": list("abcde")}, tmp_path / "model.pt")
    code = parse_owner_code(f"{tmp_path}/gpt/model.py:Model(5)")
    options = CodeOptions(code=code, answers={})
    info = import_by_code(tmp_path / "model.pt", tmp_path / "out", options, log=lambda line: None)
    assert set(info.sources) == set(PACKAGE)
    assert (info.shape.context_length, info.shape.vocab_size) == (12, 5)


def test_table_of_positions_is_the_context_length_if_a_setting_is_shorter(tmp_path: Path) -> None:
    """The file's settings have two lengths: the length of the last training run, and the longer
    length of the table."""
    names: dict[str, Any] = {"__name__": "owner"}
    code = PARTS + BY_NAMES.replace("block_size", "max_seq_len")
    exec(code, names)
    (tmp_path / "owner.py").write_text(code)
    state = names["GPT"](5, 24, 16, dropout=0.0).state_dict()
    contents: dict[str, Any] = {"model": state, "chars": list("abcde")}
    contents["config"] = {"block_size": 12, "max_seq_len": 24}
    torch.save(contents, tmp_path / "model.pt")
    options = CodeOptions(code=parse_owner_code(f"{tmp_path}/owner.py:GPT"), answers={})
    info = import_by_code(tmp_path / "model.pt", tmp_path / "out", options, log=lambda line: None)
    assert info.shape.context_length == 24


def test_code_that_needs_another_file_is_refused_at_the_import(tmp_path: Path) -> None:
    (tmp_path / "sizes.bin").write_bytes(b"8" * 10)
    code = CHARACTERS.replace('Path("input.txt").read_text()', '"ab, cd"').replace(
        "        super", '        Path("sizes.bin").read_bytes()\n        super'
    )
    (tmp_path / "owner.py").write_text(code)
    names: dict[str, Any] = {"__name__": "owner"}
    with contextlib.chdir(tmp_path):
        exec(code, names)
        state = names["Recurrent"]().state_dict()
    torch.save({"model": state, "chars": sorted("ab, cd")}, tmp_path / "model.pt")
    options = CodeOptions(code=parse_owner_code(f"{tmp_path}/owner.py:Recurrent"), answers={})
    with pytest.raises(ConvertError, match=r"without the other files of its folder.*sizes\.bin"):
        import_by_code(tmp_path / "model.pt", tmp_path / "out", options, log=lambda line: None)
