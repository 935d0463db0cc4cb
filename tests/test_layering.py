"""The import rules of ARCHITECTURE.md, read from the sources."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SERVICE_ONLY = {"fastapi", "starlette", "uvicorn", "uvloop", "asyncio", "anyio"}
WITH_TORCH = {"model.engine.runner", "model.engine.sampler"}
ONE_MODULE = {
    "gguf": {"model.convert.gguf_file"},
    "llguidance": {"model.constraint"},
    "pickle": {"model.convert.pt_file", "model.training.state"},
    "pyarrow": {"model.training.text.records"},
    "subprocess": {
        "model.constraint_check",
        "model.kernels.library",
        "service.benchmark.server",
        "service.engine_process",
    },
    "yaml": {"model.convert.litgpt"},
}
"""What few modules may import."""
WITH_THREAD = {
    "service.async_engine",
    "service.engine_process",
    "service.engine_worker",
    "service.turns",
    "model.hashed_file",
    "model.look_ahead",
    "model.training.interrupt",
}
DOWNLOADS = "model.training.text.download"
"""The one module of `model` that opens a connection."""
ENGINE_OUTSIDE = {
    "model.config",
    "model.draw",
    "model.device",
    "model.gpt",
    "model.kernels.plain",
    "model.kernels.prefill",
    "model.kv_cache",
}
"""What the engine may import of `model` besides itself."""
CLIENT_NEEDS = sys.stdlib_module_names | {"httpx", "numpy"}
"""What the Python client may import besides itself: who asks a server need not have one."""


def modules(package: str) -> Iterator[tuple[str, set[str]]]:
    """Each module below a package with the modules it imports."""
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, imports(path.read_text(encoding="utf-8"))


def imports(source: str) -> set[str]:
    """Names of the modules that a source imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            found.add(node.module)
    return found


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def violations() -> list[str]:
    """Every import that a layer forbids."""
    wrong = []
    for name, imported in [*modules("model"), *modules("service")]:
        for library, owners in ONE_MODULE.items():
            if library in roots(imported) and name not in owners:
                wrong.append(f"{name} imports {library}: only {owners} may")
        if roots(imported) & {"threading", "queue", "concurrent"} and name not in WITH_THREAD:
            wrong.append(f"{name} knows threads: only {WITH_THREAD} may")
    for name, imported in modules("model"):
        if above := roots(imported) & ({"service"} | SERVICE_ONLY):
            wrong.append(f"{name} imports {above}: nothing in model knows the service")
        if "httpx" in roots(imported) and name != DOWNLOADS:
            wrong.append(f"{name} imports httpx: only {DOWNLOADS} asks a server")
        if name.startswith("model.engine"):
            torch_free = name not in WITH_TORCH
            if torch_free and roots(imported) & {"torch", "numpy"}:
                wrong.append(f"{name} imports torch or numpy: only {WITH_TORCH} may")
            inside = {n for n in imported if n.startswith("model")}
            if outside := {n for n in inside if not n.startswith("model.engine")} - ENGINE_OUTSIDE:
                wrong.append(f"{name} imports {outside}: the engine knows tokens, not these")
        foreign = {n for n in imported if n.startswith("model.convert")}
        if foreign and not name.startswith("model.convert"):
            wrong.append(f"{name} imports {foreign}: only a command converts")
        trainer = {n for n in imported if n.startswith("model.training")}
        if trainer and not name.startswith("model.training"):
            wrong.append(f"{name} imports {trainer}: the trainer stands above it")
        if "logitd" in roots(imported):
            wrong.append(f"{name} imports logitd: that is for those who ask a server")
    for name, imported in modules("service"):
        if "torch" in roots(imported):
            wrong.append(f"{name} imports torch: only model computes")
        if name.startswith("service.client"):
            others = {n for n in imported if not n.startswith("service.client")}
            if more := {n for n in others if n.partition(".")[0] not in CLIENT_NEEDS}:
                wrong.append(f"{name} imports {more}: the client stands for itself")
        if "logitd" in roots(imported):
            wrong.append(f"{name} imports logitd: that is for those who ask a server")
    for name, imported in modules("logitd"):
        if imported != {"service.client"}:
            wrong.append(f"{name} imports {imported}: it is the names of service.client")
    return wrong


def test_imports_run_one_way() -> None:
    assert violations() == []


def test_the_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong import anywhere, even inside a function, is found."""
    for file, source in {
        "model/a.py": "def f():\n    from service import app\n",
        "model/reading.py": "from concurrent.futures import ThreadPoolExecutor\n",
        "model/training/text/files.py": "import httpx\n",
        "model/engine/scheduler.py": "import torch\n",
        "service/b.py": "import torch.nn\n",
        "service/f.py": "def f():\n    import llguidance.numpy\n",
        "service/c.py": "import logitd\n",
        "service/client/d.py": "import httpx, json\nfrom service import schemas\n",
        "service/client/e.py": "import pydantic\nfrom service.client import results\n",
        "logitd/__init__.py": "from service.client import *\nimport os\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    monkeypatch.setattr("tests.test_layering.ROOT", tmp_path)
    assert [line.partition(" ")[0] for line in violations()] == [
        "model.reading",
        "service.f",
        "model.a",
        "model.engine.scheduler",
        "model.training.text.files",
        "service.b",
        "service.c",
        "service.client.d",
        "service.client.e",
        "logitd",
    ]


def test_no_pickle_is_loaded_where_checkpoints_are_served() -> None:
    """Loading never executes code: torch.load appears in the trainer and where foreign files are
    imported, weights only."""
    for path in sorted([*(ROOT / "model").rglob("*.py"), *(ROOT / "service").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert {"training", "convert"} & set(path.parts), f"{path} reads a pickle"
                safe = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert safe.get("weights_only") == "True", f"{path}: torch.load runs code"


def test_our_packages_are_the_ones_imported() -> None:
    """`model` and `service` are common names: another one on the path must not win."""
    import model
    import service

    assert Path(str(model.__file__)).parent == ROOT / "model"
    assert Path(str(service.__file__)).parent == ROOT / "service"
