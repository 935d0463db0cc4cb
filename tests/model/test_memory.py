"""Memory of a device and of a model: the system's figures, and refusals with numbers."""

from pathlib import Path

import pytest
import torch

from logitd.model.device import DeviceError, free_memory, machine_memory, memory_groups
from logitd.model.memory import Available, available, check_weights_fit, format_bytes, model_bytes
from logitd.model.transformer.attention import visible_keys
from logitd.model.transformer.config import BLOCK
from logitd.model.transformer.shapes import gpt2_shape
from logitd.model.transformer.size import parameter_count
from tests.model.factories import FAMILIES, tiny_config, tiny_gpt

GIB = 2**30
SMALL = gpt2_shape(
    vocab_size=50_257, context_length=1024, n_layer=12, n_head=12, d_model=768
)  # GPT-2 124M


def test_weights_that_do_not_fit_are_refused() -> None:
    count = parameter_count(SMALL)
    check_weights_fit(SMALL, 2, Available("cuda:0", GIB, model_bytes(SMALL, 2)))
    with pytest.raises(DeviceError, match=r"474\.8 MiB.*4 bytes.*cuda:0.*474\.8 MiB.*1\.0 GiB"):
        check_weights_fit(SMALL, 4, Available("cuda:0", GIB, 4 * count - 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_model_takes_at_most_the_counted_bytes(family: str) -> None:
    """The count covers weights, tables and the masks of a KV cache."""
    config = tiny_config(**FAMILIES[family])
    gpt = tiny_gpt(config)
    weights = sum(parameter.nbytes for parameter in gpt.parameters())
    tables = sum(buffer.nbytes for buffer in gpt.buffers())
    windows = {config.window(layer) for layer in range(config.n_layer)}
    mask = visible_keys(BLOCK, config.context_length, torch.device("cpu")).nbytes * len(windows)
    assert weights + tables + mask <= model_bytes(config, 4)
    assert tables < model_bytes(config, 4) - weights < 4 * (tables + mask)


def test_tables_that_do_not_fit_are_refused() -> None:
    config = tiny_config(context_length=10**9, positions="rotary", rotary_dim=8, head_dim=8)
    message = r"178\.8 GiB.*1,000,000,000 rotary.*32\.0 GiB.*64\.0 GiB.*context_length"
    with pytest.raises(DeviceError, match=message):
        check_weights_fit(config, 4, Available("this machine", 64 * GIB, 32 * GIB))


def _group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def test_available_memory_is_positive(tmp_path: Path) -> None:
    whole = machine_memory(())
    assert 2**26 < machine_memory() <= whole
    for text, expected in (("max\n", whole), ("1048576\n", 2**20), (f"{2**63}\n", whole)):
        group = _group(tmp_path / "group", memory_max=text)
        assert machine_memory((tmp_path / "none", group)) == expected
    memory = available(torch.device("cpu"))
    assert 0 < memory.free <= memory.total == machine_memory()


def test_free_memory_is_the_least_of_system_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 64000000 kB\nMemFree: 10 kB\nMemAvailable: 3000 kB\n")
    assert free_memory((), meminfo) == 3000 * 1024
    assert free_memory((), tmp_path / "none") == machine_memory(())
    newer = _group(
        tmp_path / "newer",
        memory_max="2000000\n",
        memory_current="900000\n",
        memory_stat="anon 500000\ninactive_file 300000\nactive_file 100000\n",
    )
    assert free_memory((newer,), meminfo) == 1_500_000, "cached files can be evicted"
    older = tmp_path / "older"
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("2000000\n")
    (older / "memory.usage_in_bytes").write_text("3000000\n")
    assert free_memory((newer, older), meminfo) == 0


def test_process_is_limited_by_its_group_and_parents(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("4:memory:/pods/a\n3:cpuset:/\n0::/user.slice/b.scope\n")
    root = Path("/groups")
    assert set(memory_groups(own, root)) == {
        *(root, root / "user.slice", root / "user.slice/b.scope"),
        *(root / "memory", root / "memory/pods", root / "memory/pods/a"),
    }
    assert memory_groups(tmp_path / "none", root) == (root, root / "memory")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_has_memory() -> None:
    memory = available(torch.device("cuda"))
    assert 0 < memory.free <= memory.total


def test_bytes_have_a_unit() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**20, 2**31)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "3.0 MiB", "2.0 GiB"
    ]  # fmt: skip
