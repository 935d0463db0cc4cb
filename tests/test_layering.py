"""The sources follow the import rules of ARCHITECTURE.md."""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ROOMS: dict[str, set[str]] = {
    "model.version": set(),
    "model.dtypes": set(),
    "model.files": set(),
    "model.first_error": set(),
    "model.extras": set(),
    "model.optional_fields": set(),
    "model.plural": set(),
    "model.plain_integer": set(),
    "model.folder_lock": set(),
    "model.processor": set(),
    "model.openmp": set(),
    "model.device": {"model.dtypes", "model.plural"},
    "model.machine": {"model.device"},
    # Models by their owner's code: their shape, then the process that computes them.
    "model.owner_code.config": {"model.first_error"},
    "model.transformer": {"model.device", "model.owner_code.config"},
    "model.owner_code": {"model.first_error", "model.owner_code.config"},
    "model.memory": {"model.device", "model.transformer"},
    "model.text": {"model.files", "model.first_error"},
    "model.checkpoint": {
        "model.device", "model.dtypes", "model.files", "model.first_error", "model.memory",
        "model.owner_code.config",
        "model.plain_integer", "model.plural", "model.text", "model.transformer",
    },
    # Inference: parameters and protocols first, then what computes, then the engine over both.
    "model.inference.errors": set(),
    "model.inference.options": {"model.dtypes"},
    "model.inference.constraints": {"model.inference.errors", "model.text"},
    "model.inference.sampling": {"model.inference.constraints.protocol", "model.inference.errors"},
    "model.inference.selection": {
        "model.inference.errors", "model.owner_code.config", "model.plural", "model.transformer",
    },
    "model.inference.interventions": {
        "model.inference.errors", "model.inference.selection", "model.plural", "model.transformer",
    },
    "model.inference.sweep": {
        "model.inference.errors", "model.inference.interventions", "model.inference.sampling",
        "model.transformer",
    },
    "model.inference.attribution": {"model.device", "model.transformer"},
    "model.inference.circuit": {"model.device", "model.inference.attribution", "model.transformer"},
    "model.inference.kv_cache": {"model.inference.options", "model.transformer"},
    "model.sae": {"model.checkpoint", "model.device", "model.files", "model.transformer"},
    "model.inference.kernels": {
        "model.device", "model.dtypes", "model.inference.interventions", "model.inference.kv_cache",
        "model.inference.options", "model.inference.sampling", "model.owner_code",
        "model.processor", "model.transformer",
    },
    "model.inference.engine": {
        "model.device", "model.inference.attribution", "model.inference.circuit",
        "model.inference.constraints.protocol", "model.inference.errors",
        "model.inference.interventions", "model.inference.kernels.base",
        "model.inference.kernels.code", "model.inference.kernels.eager", "model.inference.kv_cache",
        "model.inference.options", "model.inference.sampling", "model.inference.selection",
        "model.owner_code", "model.plural", "model.transformer",
    },
    "model.inference.memory": {
        "model.device", "model.inference.options", "model.memory", "model.owner_code.config",
        "model.transformer",
    },
    "model.inference.load": {
        "model.checkpoint", "model.device", "model.dtypes", "model.inference.kernels.select",
        "model.inference.memory", "model.inference.options", "model.memory", "model.owner_code",
        "model.transformer",
    },
    "model.inference.reference": {"model.inference.sampling", "model.transformer"},
    "model.operations": {
        "model.checkpoint", "model.inference.attribution", "model.inference.circuit",
        "model.inference.constraints.compiler", "model.inference.engine", "model.inference.errors",
        "model.inference.interventions", "model.inference.sampling", "model.inference.selection",
        "model.inference.sweep", "model.owner_code.config", "model.plural", "model.sae",
        "model.text", "model.transformer",
    },
    "model.hooked": {
        "model.device", "model.inference.errors", "model.text", "model.transformer",
    },
    "model.in_process": {"model.checkpoint", "model.inference", "model.operations"},
    "model.llm": {
        "model.checkpoint", "model.device", "model.dtypes", "model.hooked", "model.in_process",
        "model.inference", "model.operations", "model.sae", "model.text",
    },
    "model.benchmark": {"model.inference", "model.machine", "model.transformer"},
    # Data: what finds documents, which imports of models use too, is below what prepares them.
    "model.data.errors": set(),
    "model.data.shards": {"model.data.errors", "model.files"},
    "model.data.sources": {"model.data.errors", "model.data.shards", "model.extras", "model.files"},
    "model.convert": {
        "model.checkpoint", "model.data.errors", "model.data.sources", "model.dtypes",
        "model.extras", "model.files", "model.first_error", "model.owner_code", "model.plural",
        "model.text", "model.transformer",
    },
    "model.data": {
        "model.convert.foreign", "model.convert.hf.tokenizer", "model.data.errors",
        "model.data.shards", "model.data.sources", "model.extras", "model.files",
        "model.first_error", "model.plural",
        "model.text",
    },
    "model.training": {
        "model.checkpoint", "model.convert.exportable", "model.convert.family",
        "model.convert.foreign", "model.data", "model.device", "model.extras", "model.files",
        "model.first_error", "model.folder_lock", "model.machine", "model.optional_fields",
        "model.plural", "model.text",
        "model.transformer",
    },
    "model.evaluation": {
        "model.checkpoint", "model.data", "model.device", "model.inference", "model.owner_code",
        "model.text", "model.training", "model.transformer",
    },
    "model.extraction": {
        "model.checkpoint", "model.data", "model.device", "model.dtypes", "model.extras",
        "model.files", "model.first_error", "model.folder_lock", "model.inference", "model.openmp",
        "model.plural", "model.text", "model.transformer", "model.version",
    },
    "model.sae.training": {
        "model.checkpoint", "model.data", "model.extraction", "model.files",
        "model.inference", "model.sae", "model.transformer",
    },
    "service.log": set(),
    "service.body_writer": set(),
    "service.threads": set(),
    "service.client": set(),
    "service.settings": {
        "model.checkpoint.run_folder", "model.convert.by_role.computation",
        "model.data.sources.read_options", "model.dtypes", "model.inference.engine.config",
        "model.inference.options", "model.optional_fields", "model.training.configuration.config",
        "model.training.configuration.presets", "model.transformer.config",
    },
    "service.cli.program_name": set(),
    "service.cli.busy": set(),
    "service.cli.terminal": set(),
    "service.cli.variables": {"service.settings"},
    "service.cli.flags": {"service.cli.variables", "service.settings"},
    "service.cli.settings_command": {"service.cli.flags", "service.settings"},
    "service.engine": {"model", "service.settings"},
    "service.http.schemas": {"model.files", "model.operations"},
    "service.errors": {"model", "service.engine", "service.http.schemas"},
    "service.metrics": {"model", "service.engine"},
    "service.access": {"model", "service.engine", "service.errors", "service.settings"},
    "service.models": {
        "model", "service.access", "service.engine", "service.errors", "service.metrics",
        "service.settings", "service.threads",
    },
    "service.http": {
        "model", "service.access", "service.body_writer", "service.engine", "service.errors",
        "service.metrics", "service.models", "service.threads",
    },
    "service.openai": {
        "model", "service.access", "service.errors", "service.http", "service.models",
    },
    "service.client_methods": set(),
    "service.generate_client": {
        "model.operations", "service.client_methods", "service.http.schemas",
    },
    "service.connections": {
        "service.body_writer", "service.errors", "service.metrics", "service.settings",
    },
    "service.tracing": {
        "model", "service.access", "service.engine", "service.http", "service.metrics",
        "service.models", "service.settings",
    },
    "service.application": {
        "model", "service.access", "service.connections", "service.engine", "service.errors",
        "service.http", "service.log", "service.metrics", "service.models", "service.openai",
        "service.settings", "service.tracing",
    },
    "service.cli.commands": {
        "model", "service.access", "service.application", "service.cli.busy",
        "service.cli.program_name", "service.cli.terminal", "service.cli.variables",
        "service.client", "service.errors", "service.models", "service.settings",
    },
    "service.cli.interrupts": set(),
    "service.cli.main": {
        "model.openmp", "model.version", "service.cli.commands", "service.cli.interrupts",
        "service.cli.settings_command", "service.cli.terminal", "service.cli.variables",
        "service.settings",
    },
    "service.cli.start": {"service.cli.interrupts", "service.cli.main"},
    "logitd": {"model.llm", "service.cli.start", "service.client"},
}  # fmt: skip
"""Each room, a folder or a single module, with the rooms that it may import. A room imports only
earlier rooms of this list. Names are paths in the repository, with dots in place of slashes."""
ORDER = {room: place for place, room in enumerate(ROOMS)}
ONE_ROOM = {
    "torch": {"model"},
    "fastapi": {"service"},
    "starlette": {"service"},
    "uvicorn": {"service"},
    "uvloop": {"service"},
    "asyncio": {"service"},
    "anyio": {"service"},
    "gguf": {"model.convert.gguf_file"},
    "httpx": {"model.data.sources.download", "service.client", "service.cli.commands"},
    "llguidance": {"model.inference.constraints.compiler"},
    "opentelemetry": {"service.tracing.otlp"},
    "pickle": {"model.convert.pt_file", "model.training.run.state"},
    "pyarrow": {"model.data.sources.records", "model.extraction.shards"},
    "ray": {"model.extraction.on_ray", "model.extraction.ray_cluster"},
    "yaml": {"model.convert.litgpt"},
    "subprocess": {
        "model.inference.constraints.sandbox",
        "model.inference.kernels.cpu.library",
        "model.owner_code",
    },
    "threading": {
        "model.checkpoint.hashed_file",
        "model.inference.constraints.compiler",
        "model.training.stopping.signals",
        "service.engine",
        "service.tracing.otlp",
    },
}
"""Libraries that only some rooms may import."""
SAME_AS = {"queue": "threading", "concurrent": "threading"}
ENGINE = "model.inference.engine"
ENGINE_TENSORS = {f"{ENGINE}.runner", f"{ENGINE}.outputs"}
"""Modules of the engine that may import torch and NumPy."""
CLIENT_NEEDS = sys.stdlib_module_names | {"httpx", "numpy"}
"""Libraries of the Python client, which needs none of the server's libraries."""
PACKAGES = ("model", "service", "logitd")


def modules(package: str) -> Iterator[tuple[str, set[str]]]:
    """Modules of a package, each with its imports."""
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, imports(path.read_text(encoding="utf-8"))


@cache  # several tests read all modules
def imports(source: str) -> set[str]:
    """Imports of a source, including those within functions, with imported names as
    `module.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    bare = sorted(name for name in found if name.partition(".")[0] in ("model", "service"))
    assert not bare, f"{bare}: a user's own model.py would be imported instead"
    return {name.removeprefix("logitd.") for name in found}


def inside(name: str, rooms: Iterable[str]) -> bool:
    """True if a module is in one of the rooms."""
    return any(name == room or name.startswith(room + ".") for room in rooms)


def room_of(name: str) -> str:
    """The innermost room of a module; the module itself if there is none."""
    return max((room for room in ROOMS if inside(name, {room})), key=len, default=name)


def may_import(room: str, target: str) -> bool:
    """True if a room may import a module. No room may import a room that is listed later, even if
    that room is inside a room that it may import: `model.sae.training` inside `model.sae`, for
    example."""
    above = ORDER.get(room_of(target), -1) > ORDER.get(room, len(ORDER))
    return inside(target, ROOMS.get(room, set()) | {room}) and not above


def forbidden(name: str, imported: set[str]) -> Iterator[str]:
    """Forbidden imports of one module."""
    room = room_of(name)
    for target in sorted(imported):
        library = target.partition(".")[0]
        if library in PACKAGES and not may_import(room, target):
            yield f"{name} imports {target}: {room} may not"
        owners = ONE_ROOM.get(SAME_AS.get(library, library))
        if owners is not None and not inside(name, owners):
            yield f"{name} imports {library}: only {sorted(owners)} may"
        if inside(name, {"service.client"}) and library not in (*CLIENT_NEEDS, "service"):
            yield f"{name} imports {library}: the client needs httpx and NumPy alone"
        if library in ("torch", "numpy") and inside(name, {ENGINE}) and name not in ENGINE_TENSORS:
            yield f"{name} imports {library}: only {sorted(ENGINE_TENSORS)} may"


def violations() -> list[str]:
    """All forbidden imports."""
    return [
        wrong
        for package in PACKAGES
        for name, imported in modules(package)
        for wrong in forbidden(name, imported)
    ]


def test_imports_run_one_way() -> None:
    assert violations() == []
    assert {room_of(name) for package in PACKAGES for name, _ in modules(package)} <= {
        *ROOMS, *PACKAGES, "model.inference", "service.cli",
    }, "every module lies in a room"  # fmt: skip


def test_rooms_are_listed_after_their_imports() -> None:
    """This order rules out cycles."""
    listed: list[str] = []
    for room, below in ROOMS.items():
        for target in below - set(PACKAGES):
            above = [
                other for other in listed if inside(other, {target}) or inside(target, {other})
            ]
            assert above, f"{room} may import {target}, which is not listed before it"
        listed.append(room)


def test_serving_imports_nothing_of_the_trainer() -> None:
    """The test follows the imports of `logitd serve` from module to module."""
    sources = {name: imported for package in PACKAGES for name, imported in modules(package)}
    loaded: set[str] = set()
    ahead = {"service.cli.commands.serve"}
    while ahead:
        name = ahead.pop()
        loaded.add(name)
        for target in sources[name]:
            module = target if target in sources else target.rpartition(".")[0]
            if module in sources and module not in loaded:
                ahead.add(module)
    assert "model.inference.engine.engine" in loaded, "the way was followed"
    assert (
        sorted(name for name in loaded if inside(name, {"model.training", "model.convert"})) == []
    )


def test_rule_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds wrong imports anywhere, even within functions."""
    for file, source in {
        "model/a.py": "def f():\n    from logitd.service import app\n",
        "model/reading.py": "from concurrent.futures import ThreadPoolExecutor\n",
        "model/data/sources/files.py": "import httpx\n",
        "model/inference/engine/scheduler.py": "import torch\n",
        "service/b.py": "import torch.nn\n",
        "service/http/g.py": "from logitd.service.openai import chat\n",
        "service/openai/h.py": "from logitd.service.http import g\n",
        "service/f.py": "def f():\n    import llguidance.numpy\n",
        "service/c.py": "import logitd\n",
        "service/client/d.py": "import httpx, json\nfrom logitd.service import schemas\n",
        "service/client/e.py": "import pydantic\nfrom logitd.service.client import results\n",
        "logitd/__init__.py": (
            "from logitd.service.client import *\nfrom logitd.service import app\nimport torch"
        ),
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    monkeypatch.setattr("tests.test_layering.ROOT", tmp_path)
    assert [line.partition(":")[0] for line in violations()] == [
        "model.a imports service.app",
        "model.data.sources.files imports httpx",
        "model.inference.engine.scheduler imports torch",
        "model.reading imports concurrent",
        "service.b imports torch",
        "service.c imports logitd",
        "service.client.d imports service.schemas",
        "service.client.e imports pydantic",
        "service.f imports llguidance",
        "service.http.g imports service.openai.chat",
        "logitd imports service.app",
        "logitd imports torch",
    ]


def test_serving_loads_no_pickle() -> None:
    """Loading executes no code: torch.load is called only by the trainer and by the import of
    foreign files, and only for weights."""
    for path in sorted([*(ROOT / "model").rglob("*.py"), *(ROOT / "service").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert {"training", "convert"} & set(path.parts), f"{path} reads a pickle"
                safe = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert safe.get("weights_only") == "True", f"{path}: torch.load runs code"
