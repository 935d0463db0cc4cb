"""Loading: whose threads compute."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model import opening
from model.opening import OpenedModel
from service import loading
from service.settings import ServeSettings


def test_weights_are_read_with_one_thread_and_the_rest_are_the_engines(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of its own in the loading thread once made every prefill two and a half times as
    long: with it there were more threads than processors, and OpenMP let all of them sleep between
    operations."""
    before = torch.get_num_threads()
    seen: list[int] = []
    torch.set_num_threads(2)

    def watched(*arguments: Any, **wishes: Any) -> OpenedModel:
        seen.append(torch.get_num_threads())
        return opening.open_model(*arguments, **wishes)

    monkeypatch.setattr("service.loading.open_model", watched)
    settings = ServeSettings(checkpoint=checkpoint_path, threads=3, kernels="torch")
    try:
        loaded = loading._build_alone(settings)
        assert seen == [1]
        assert torch.get_num_threads() == 3
        loaded.engine.close()
    finally:
        torch.set_num_threads(before)
