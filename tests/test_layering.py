"""The import rules of ARCHITECTURE.md, read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SERVICE_ONLY = {"fastapi", "starlette", "uvicorn", "uvloop", "asyncio", "anyio"}
WITH_TORCH = {"model.engine.runner", "model.engine.sampler"}
ENGINE_OUTSIDE = {
    "model.attention",
    "model.config",
    "model.device",
    "model.gpt",
    "model.kernels.plain",
    "model.kv_cache",
}
"""What the engine may import of `model` besides itself."""


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
    for name, imported in modules("model"):
        if above := roots(imported) & ({"service"} | SERVICE_ONLY):
            wrong.append(f"{name} imports {above}: nothing in model knows the service")
        if name.startswith("model.engine"):
            torch_free = name not in WITH_TORCH
            if torch_free and roots(imported) & {"torch", "numpy"}:
                wrong.append(f"{name} imports torch or numpy: only {WITH_TORCH} may")
            inside = {n for n in imported if n.startswith("model")}
            if outside := {n for n in inside if not n.startswith("model.engine")} - ENGINE_OUTSIDE:
                wrong.append(f"{name} imports {outside}: the engine knows tokens, not these")
            if roots(imported) & {"threading", "queue"}:
                wrong.append(f"{name} knows threads; they are service.async_engine's")
        trainer = {n for n in imported if n.startswith("model.training")}
        if trainer and not name.startswith("model.training"):
            wrong.append(f"{name} imports {trainer}: the trainer stands above it")
    for name, imported in modules("service"):
        if "torch" in roots(imported):
            wrong.append(f"{name} imports torch: only model computes")
        if name != "service.async_engine" and roots(imported) & {"threading", "queue"}:
            wrong.append(f"{name} knows threads; they are service.async_engine's")
    return wrong


def test_imports_run_one_way() -> None:
    assert violations() == []


def test_the_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong import anywhere, even inside a function, is found."""
    for file, source in {
        "model/a.py": "def f():\n    from service import app\n",
        "model/engine/scheduler.py": "import torch\n",
        "service/b.py": "import torch.nn\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    monkeypatch.setattr("tests.test_layering.ROOT", tmp_path)
    assert [line.partition(" ")[0] for line in violations()] == [
        "model.a",
        "model.engine.scheduler",
        "service.b",
    ]


def test_no_pickle_is_loaded_where_checkpoints_are_served() -> None:
    """Loading never executes code: torch.load appears in the trainer alone, weights only."""
    for path in sorted([*(ROOT / "model").rglob("*.py"), *(ROOT / "service").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "training" in path.parts, f"{path} reads a pickle"
                safe = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert safe.get("weights_only") == "True", f"{path}: torch.load runs code"


def test_our_packages_are_the_ones_imported() -> None:
    """`model` and `service` are common names: another one on the path must not win."""
    import model
    import service

    assert Path(str(model.__file__)).parent == ROOT / "model"
    assert Path(str(service.__file__)).parent == ROOT / "service"
