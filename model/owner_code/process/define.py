"""Define: runs the definitions in an owner's file, but not the rest of the script.

Only the statements that bind or update a global name that the model's expression needs are
executed: imports, classes, functions, assignments, and also a loop that fills a table. A training
loop, for example, is not. If an assignment fails (for example `vocab_size = len(chars)`,
because a text file is missing), its name gets the value that it had when the model was imported
(`record`), or else a value from the checkpoint. If there is no such value, the assignment is
skipped. If an import statement fails, the error is reported when the imported name is first used.
"""

import __future__

import argparse
import ast
import importlib.machinery
import json
import symtable
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from logitd.model.owner_code.process.problem import Problem

PARENTS = 4
"""Number of parent folders of the file's folder that are searched for imported packages."""
RECORDED_BYTES, RECORDED_TEXT = 2**16, 256
"""Maximum size of a recorded value as JSON, in bytes, and maximum length of a recorded string, in
characters. A longer string is not recorded: it is probably training data from which other values
were computed."""


def run_definitions(
    file: Path,
    expressions: Sequence[str],
    values: Mapping[str, Any],
    override: Mapping[str, Any],
    recorded: Mapping[str, Any],
) -> types.ModuleType:
    """Run those definitions of a file that the expressions need. Returns a module with the defined
    names.

    values    values for variables whose assignment fails or is missing; names are in lower case
    override  values that replace the values of global variables; names are in lower case
    recorded  values for variables whose assignment fails; names have their exact case. They take
              precedence over `values`

    Raises Problem.
    """
    tree = parse(file)
    module = new_module(file, tree)
    names, needed, fixed = vars(module), needed_names(tree, expressions), fixed_names(tree)
    flags, unassigned = future_flags(tree), set[str]()
    for statement in tree.body:
        targets = changed(statement, fixed) & {*needed, "*"}
        if not targets:
            continue
        if updates(statement) and targets & unassigned:
            continue  # the known value is that after all updates
        earlier = targets & names.keys() if updates(statement) else set[str]()
        try:
            code = compile(ast.Module([statement], []), str(file), "exec", flags, True)
            exec(code, names)
        except (Exception, SystemExit) as error:  # the owner's code may raise anything
            reason = f"{type(error).__name__}: {error}"
            where = f"{file.name}, line {statement.lineno}"
            unassigned |= targets
            if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                raise Problem(
                    f"{statement.name} in {where}, cannot be defined: {reason}"
                ) from error
            for name in sorted(earlier):
                if name not in recorded and name.lower() not in values:
                    raise Problem(f"{where}, which updates {name}, failed: {reason}") from error
            if isinstance(statement, ast.Import | ast.ImportFrom):
                failed = FailedImport(f"{ast.unparse(statement)} in {where}, failed: {reason}")
                names |= dict.fromkeys(targets, failed)
            names |= {name: values[name.lower()] for name in targets if name.lower() in values}
            names |= {name: recorded[name] for name in targets if name in recorded}
        for name in targets & names.keys():
            if name in override and is_replaceable(names[name], override[name]):
                names[name] = as_default(override[name], names[name])
            for flag, own in flags_of(names[name]).items():
                known = override.get(flag.lower())
                if flag.lower() in override and is_replaceable(own, known):
                    setattr(names[name], flag, as_default(known, own))
    missing = needed - names.keys()
    names |= {name: values[name.lower()] for name in missing if name.lower() in values}
    return module


def flags_of(value: Any) -> dict[str, Any]:
    """The flags of a script, if the value is what `parse_args` returns."""
    return dict(vars(value)) if isinstance(value, argparse.Namespace) else {}


def is_replaceable(own: Any, value: Any) -> bool:
    """True if a global variable's own value is None, or if it is plain data and a value of the
    checkpoint is of the same kind or None."""
    kinds: Sequence[Any] = (int | float, str, list | tuple, dict)
    return own is None or any(
        isinstance(own, kind) and (value is None or isinstance(value, kind)) for kind in kinds
    )


def as_default(value: Any, default: Any) -> Any:
    """The value; a list as a tuple if the default is a tuple, which JSON cannot express."""
    return tuple(value) if isinstance(value, list) and isinstance(default, tuple) else value


def record(file: Path, expressions: Sequence[str], module: types.ModuleType) -> dict[str, Any]:
    """The values of the assignments that the expressions need, if they are small and JSON can
    express them. They are recorded because an assignment may read a file that is missing when the
    model is served."""
    tree, kept = parse(file), dict[str, Any]()
    needed, fixed = needed_names(tree, expressions), fixed_names(tree)
    for statement in tree.body:
        if not isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
            for name in changed(statement, fixed) & needed & vars(module).keys():
                value = vars(module)[name]
                if isinstance(value, str) and len(value) > RECORDED_TEXT:
                    continue
                try:
                    text = json.dumps(value, allow_nan=False)
                except (TypeError, ValueError, RecursionError):
                    continue
                if len(text) <= RECORDED_BYTES and json.loads(text) == value:
                    kept[name] = value
    return kept


class FailedImport:
    """The value of a name whose import failed. Each use raises ImportError with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def _refuse(self, *arguments: Any, **named: Any) -> Any:
        raise ImportError(self.reason)

    __getattr__ = __call__ = __mro_entries__ = _refuse


class ParentFolders:
    """Finds modules in the parent folders of the owner's file, because a package often imports
    itself by its own name. It runs after all other finders."""

    def __init__(self, file: Path) -> None:
        self._folders = [str(folder) for folder in file.parents[1 : PARENTS + 1][: -1 or None]]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if path is not None:
            return None
        return importlib.machinery.PathFinder.find_spec(name, self._folders)


def parse(file: Path) -> ast.Module:
    """Parse the owner's file. Raises Problem."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise Problem(f"{file.name} is not valid in this version of Python: {error}") from error


def new_module(file: Path, tree: ast.Module) -> types.ModuleType:
    """An empty module for the file. It can import the files in the same folder. If the file has
    relative imports, its folder becomes the module's package. The package's `__init__.py` is not
    run, because it may import the file."""
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    if not any(isinstance(finder, ParentFolders) for finder in sys.meta_path):
        sys.meta_path.append(ParentFolders(file))
    name = file.stem
    levels = max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)),
                 default=0)  # fmt: skip
    package = ""
    for folder in reversed(file.parents[:levels]):
        package = f"{package}.{folder.name}" if package else folder.name
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [str(folder)]
    module = types.ModuleType(f"{package}.{name}" if package else name)
    module.__file__, module.__package__ = str(file), package
    sys.modules[module.__name__] = module
    return module


def future_flags(tree: ast.Module) -> int:
    """The compiler flags that the file's imports from `__future__` set."""
    flags = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                flags |= getattr(__future__, alias.name).compiler_flag
    return flags


def changed(statement: ast.stmt, fixed: Collection[str] = ()) -> set[str]:
    """The names that a statement binds or updates, also inside a loop, an `if`, a `try` or a `with`
    ("*" for `import *`), but not inside functions and classes. A call whose result is dropped, such
    as `slopes.append(1)`, updates the object of its method, unless that is in `fixed`."""
    names, pending = set[str](), list[ast.AST]([] if is_main(statement) else [statement])
    while pending:
        node = pending.pop()
        match node:
            case ast.ImportFrom(module="__future__"):
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
                continue
            case ast.AnnAssign(value=None):
                continue
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                names.add(name)
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                names |= base(node)
            case ast.Expr(ast.Call(ast.Attribute() as method)):
                names |= base(method).difference(fixed)
            case ast.Expr(ast.Call(ast.Name("setattr"), [ast.Name(name), *_])):
                names.add(name)
        pending += ast.iter_child_nodes(node)
    return names


def is_main(statement: ast.stmt) -> bool:
    """True for `if __name__ == "__main__"`, which runs only in a script."""
    return isinstance(statement, ast.If) and "__name__" in loaded(statement.test)


def base(part: ast.expr) -> set[str]:
    """The name of the object of which this is an attribute or an item; empty if there is none."""
    while isinstance(part, ast.Attribute | ast.Subscript):
        part = part.value
    return {part.id} if isinstance(part, ast.Name) else set()


def fixed_names(tree: ast.Module) -> set[str]:
    """The names of modules, classes and functions, whose methods update nothing."""
    kinds = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
    nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
    return {name for node in nodes for name in changed(node)}


def updates(statement: ast.stmt) -> bool:
    """True unless the statement defines its names completely."""
    complete = ast.Assign | ast.AnnAssign | ast.ClassDef | ast.FunctionDef
    return not isinstance(statement, complete | ast.Import | ast.ImportFrom)


def needed_names(tree: ast.Module, expressions: Sequence[str]) -> set[str]:
    """The names of all classes with a name like a configuration's (`is_config_name`), and the
    global names that these classes and the expressions use, directly or through other
    definitions."""
    uses: dict[str, set[str]] = {}
    pending: list[str] = []
    for expression in expressions:
        pending += loaded(ast.parse(expression, mode="eval"))
    fixed = fixed_names(tree)
    for statement in tree.body:
        for name in changed(statement, fixed):
            uses.setdefault(name, set()).update(loaded(statement))
        if isinstance(statement, ast.ClassDef) and is_config_name(statement.name):
            pending.append(statement.name)
    needed = set(pending)
    while pending:
        for name in uses.get(pending.pop(), set()) - needed:
            needed.add(name)
            pending.append(name)
    return needed


def is_config_name(name: str) -> bool:
    return "config" in name.lower() or name.lower().endswith("args")


def loaded(tree: ast.AST) -> set[str]:
    """The global names that a syntax tree reads, including names in string annotations of
    parameters."""
    names = {
        str(node.annotation.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Constant)
    }
    outermost = symtable.symtable(ast.unparse(tree), "<owner>", "exec")
    tables = [outermost]
    for table in tables:  # grows
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is outermost or symbol.is_global())
        }
        tables += table.get_children()
    return names
