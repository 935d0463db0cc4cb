"""Building an engine: its threads and its slots."""

from pathlib import Path
from typing import Any

import pytest
import torch

from logitd.model.device import DeviceError
from logitd.model.inference import load as opening
from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.model.inference.load import LoadedModel
from logitd.model.inference.options import SERVED_SLOTS
from logitd.model.memory import Available, format_bytes
from logitd.service.engine import build as building
from logitd.service.settings.serve import ServeSettings
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt


def test_weights_are_read_with_one_thread_and_the_rest_are_the_engines(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread pool in the loading thread once made every prefill two and a half times as slow:
    there were more threads than processors, and OpenMP let all of them sleep between operations."""
    before = torch.get_num_threads()
    seen: list[int] = []
    torch.set_num_threads(2)

    def watched(*arguments: Any, **flags: Any) -> LoadedModel:
        seen.append(torch.get_num_threads())
        return opening.load_model(*arguments, **flags)

    monkeypatch.setattr("logitd.service.engine.build.load_model", watched)
    monkeypatch.setattr("logitd.model.device.available_processors", lambda: 3)
    settings = ServeSettings(checkpoint=checkpoint_path, threads=3, kernels="torch")
    try:
        loaded = building.build(settings)
        assert seen == [1]
        assert torch.get_num_threads() == 3
        loaded.engine.close()
    finally:
        torch.set_num_threads(before)


def test_bytes_of_keys_and_values_become_slots(checkpoint_path: Path) -> None:
    """Memory for 2.5 slots becomes two slots. Memory for less than one slot is rejected, whether it
    is given in bytes or as a share of the free memory."""
    before = torch.get_num_threads()
    flags: dict[str, Any] = {"checkpoint": checkpoint_path, "device": "cpu", "kernels": "torch",
                              "dtype": "float32", "threads": before}  # fmt: skip
    one = building._build(ServeSettings(slots=1, **flags)).engine.kv_cache_bytes
    engine = building._build(ServeSettings(kv_cache_memory=str(5 * one // 2), **flags)).engine
    assert (engine.slots, engine.kv_cache_bytes) == (2, 2 * one)
    with pytest.raises(DeviceError, match=r"^kv_cache_memory is"):
        building._build(ServeSettings(kv_cache_memory=str(one - 1), **flags))
    with pytest.raises(DeviceError, match=r"^kv_cache_memory is 0.0001%.* free of "):
        building._build(ServeSettings(kv_cache_memory="0.0001%", **flags))
    assert building._build(ServeSettings(**flags)).engine.slots == SERVED_SLOTS.most


def test_automatic_slots_are_logged_with_their_reason(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of free memory has room for 40.5 slots in one case, and for 100 in the other, of
    which 64 are created."""
    flags: dict[str, Any] = {"checkpoint": checkpoint_path, "device": "cpu", "kernels": "torch",
                              "dtype": "float32", "threads": torch.get_num_threads()}  # fmt: skip
    one = building._build(ServeSettings(slots=1, **flags)).engine.kv_cache_bytes
    assert building._build(ServeSettings(slots=1, **flags)).computation.slots_why is None

    def said(free: int) -> tuple[int, str | None]:
        there = Available("this machine", 2**40, free)
        monkeypatch.setattr("logitd.model.inference.load.available", lambda device: there)
        built = building._build(ServeSettings(**flags))
        return built.engine.slots, built.computation.slots_why

    free = 4 * 40 * one + 2 * one
    assert said(free) == (40, f"25% of the {format_bytes(free)} that the weights leave free")
    assert said(400 * one) == (64, "the default")


def test_parameters_are_the_models_whatever_of_them_is_in_memory(tmp_path: Path) -> None:
    """Weights that the decoder holds in int8 are removed from the model. The parameter count in the
    banner once left them out."""
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    gpt = tiny_gpt(tiny_config(head_dim=16, d_model=64, d_ff=256))
    checkpoint = save_tiny_checkpoint(tmp_path / "covered", gpt=gpt)
    flags: dict[str, Any] = {"device": "cpu", "threads": torch.get_num_threads()}
    built = building._build(
        ServeSettings(
            checkpoint=checkpoint.path, quantize="int8", max_quantization_loss="any", **flags
        )
    )
    built.engine.close()
    assert built.computation.parameters == gpt.parameter_count()
