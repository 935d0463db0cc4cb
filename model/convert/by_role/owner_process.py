"""Program that runs an owner's model code and writes its logits for random ids.

It imports nothing of this project. It runs the owner's file with the user's rights, but without
network access. Only imports, classes, functions and the assignments that these need are executed,
not a training loop. If an assignment fails (`len(chars)` of a missing text), it is skipped, or its
value is taken from the checkpoint.

It reads a `Request` and the weights from its folder. It writes `answer.safetensors` (the ids, their
logits, and the logits after the last id is changed), or `problem.txt`.
"""

import ast
import ctypes
import dataclasses
import inspect
import itertools
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

REQUEST, WEIGHTS = "request.json", "weights.safetensors"
ANSWER, PROBLEM = "answer.safetensors", "problem.txt"

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto")
CONFIG_NAMES = ("config", "cfg", "conf", "args", "params", "hparams", "model_args", "model_config",
                "settings", "opt", "hyperparameters", "hp")  # fmt: skip


class Problem(Exception):
    """The model or its logits cannot be computed. The message is for the user."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The owner's code and the values of the checkpoint, under all usual names in lower case.

    file, expression   the owner's file, and a name in it or an expression that uses its names
    said               values from the checkpoint's settings and from the user
    shape              values that follow from the tensors
    flags              guesses about which layers have a bias
    rows, length       limit of the ids, and length of the sequences
    """

    file: str
    expression: str
    said: Mapping[str, Any]
    shape: Mapping[str, Any]
    flags: Mapping[str, Any]
    rows: int
    length: int

    @property
    def values(self) -> dict[str, Any]:
        return {**self.shape, **self.flags, **self.said}


class Values(dict[str, Any]):
    """A dictionary whose keys are also attributes. `asked` records the keys that were looked up."""

    def __init__(self, values: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(values)
        self.__dict__["asked"] = asked

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One way to make the model.

    top     values that override global names of the file
    over    values that override the defaults of parameters
    values  values for parameters without a default
    asked   names that the code looked up, over all attempts
    """

    top: Mapping[str, Any]
    over: Mapping[str, Any]
    values: Mapping[str, Any]
    asked: set[str]


def attempts(request: Request) -> Iterator[Attempt]:
    """The attempts to make: with the defaults of the owner's code, then with the shape of the
    tensors, then with all combinations of the flags."""
    said, shape = request.said, request.shape
    asked, none = set[str](), dict[str, Any]()
    for top, shown in ((said, none), (said, shape), ({**said, **shape}, shape)):
        yield Attempt(top, {**shown, **said}, request.values, asked)
    names = sorted((asked & request.flags.keys()) - said.keys())
    for values in itertools.product((True, False), repeat=len(names)):
        chosen = dict(zip(names, values, strict=True))
        for top in (said, {**said, **shape}) if names else ():
            yield Attempt(top, {**shape, **chosen, **said}, {**request.values, **chosen}, asked)


def main(folder: Path) -> int:
    leave_network()
    request = Request(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    try:
        model = build_model(request, load_file(folder / WEIGHTS))
        token_ids, logits, changed = run(model, request.rows, request.length)
    except Problem as problem:
        (folder / PROBLEM).write_text(str(problem), encoding="utf-8")
        return 1
    save_file({"token_ids": token_ids, "logits": logits, "changed": changed}, folder / ANSWER)
    return 0


def leave_network() -> None:
    """Block network access: by an audit hook, and by a separate namespace if the system allows
    it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET)

    def refuse(event: str, arguments: Any) -> None:
        if event in NETWORK_EVENTS:
            raise PermissionError(f"no network here ({event})")

    sys.addaudithook(refuse)


def build_model(request: Request, weights: Mapping[str, Tensor]) -> nn.Module:
    """The owner's model with the checkpoint's weights. Raises Problem."""
    problems, tried = list[Problem](), set[str]()
    for attempt in attempts(request):
        try:
            model = make(run_definitions(request, attempt.top), request, attempt)
            load(model, weights)
        except Problem as problem:
            problems.append(problem)
            tried = attempt.asked & request.flags.keys()
        else:
            return model.eval()
    said = str(problems[:3][-1])
    if flags := sorted(tried - request.said.keys()):
        said += (
            f". No combination of {' and '.join(flags)} fits; give the expression that makes the "
            f"model, such as '{request.expression}({flags[0]}=False)'"
        )
    raise Problem(said)


def run_definitions(request: Request, override: Mapping[str, Any]) -> types.ModuleType:
    """Run the definitions of the owner's file, but not the statements of a script, as a module.
    `override` replaces values of global names. Raises Problem."""
    file, values = Path(request.file), request.values
    sys.path.insert(0, str(file.parent))
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise Problem(f"{file.name} is not Python that this interpreter reads: {error}") from error
    module = types.ModuleType(file.stem)
    module.__file__ = str(file)
    sys.modules[file.stem] = module
    names, needed = vars(module), needed_assignments(tree, request.expression)
    for statement in tree.body:
        targets = assigned(statement)
        if not is_definition(statement) and not (targets & needed):
            continue
        try:
            exec(compile(ast.Module([statement], []), str(file), "exec"), names)
        except Exception as error:  # the owner's code may raise anything
            if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                raise Problem(
                    f"{statement.name} in {file.name}, line {statement.lineno}, cannot be defined: "
                    f"{type(error).__name__}: {error}"
                ) from error
            names |= {name: values[name.lower()] for name in targets if name.lower() in values}
        for name in targets & override.keys():
            if isinstance(names.get(name), int | float) and isinstance(override[name], int | float):
                names[name] = override[name]
    missing = needed - names.keys()
    names |= {name: values[name.lower()] for name in missing if name.lower() in values}
    return module


def is_definition(statement: ast.stmt) -> bool:
    """True for imports, classes and functions, and for a `try` that contains only imports and
    assignments."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef):
        return True
    if isinstance(statement, ast.Try):
        parts = [*statement.body, *(s for handler in statement.handlers for s in handler.body)]
        simple = ast.Assign | ast.Pass | ast.Import | ast.ImportFrom
        return all(isinstance(part, simple) for part in parts)
    return False


def assigned(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return {
        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
    }


def needed_assignments(tree: ast.Module, expression: str) -> set[str]:
    """Global names that the file's definitions or the expression use, directly or through other
    assignments."""
    uses: dict[str, set[str]] = {}
    needed = loaded(ast.parse(expression, mode="eval"))
    for statement in tree.body:
        if is_definition(statement):
            needed |= loaded(statement)
        for name in assigned(statement):
            uses.setdefault(name, set()).update(loaded(statement))
    pending = list(needed)
    while pending:
        for name in uses.get(pending.pop(), set()) - needed:
            needed.add(name)
            pending.append(name)
    return needed


def loaded(tree: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def make(module: types.ModuleType, request: Request, attempt: Attempt) -> nn.Module:
    """Make the model, without its weights, by evaluating the expression. If the value is a class or
    a function, call it with the known values of its parameters. Raises Problem."""
    torch.manual_seed(0)
    names = {**attempt.values, **vars(module)}
    try:
        made = eval(compile(request.expression, "<--code>", "eval"), names)
        if not isinstance(made, nn.Module) and callable(made):
            made = made(**arguments(made, module, attempt))
    except Problem:
        raise
    except Exception as error:  # the owner's code may raise anything
        if isinstance(error, NameError) and error.name in loaded(ast.parse(request.expression)):
            defined = [name for name, value in vars(module).items() if is_own(value, module)]
            raise Problem(
                f"{Path(request.file).name} does not define {error.name!r}; its classes and "
                f"functions are {', '.join(defined) or 'none'}"
            ) from error
        raise Problem(
            f"{type(error).__name__}: {error}. If the values of the checkpoint do not fit, give "
            "an expression that makes the model, such as 'GPT(vocab_size=65, n_head=4)'"
        ) from error
    if not isinstance(made, nn.Module):
        raise Problem(f"the expression makes a {type(made).__name__}; expected a torch module")
    return made.float().to("cpu")


def is_own(value: Any, module: types.ModuleType) -> bool:
    return isinstance(value, type | types.FunctionType) and value.__module__ == module.__name__


def arguments(
    made: Callable[..., Any], module: types.ModuleType, attempt: Attempt
) -> dict[str, Any]:
    """Arguments for a class or a function, by the names of its parameters. Raises Problem."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        attempt.asked.add(name.lower())
        needed = parameter.default is parameter.empty
        if name.lower() in attempt.over:
            given[name] = attempt.over[name.lower()]
        elif name.lower() in CONFIG_NAMES or config_class(parameter, module) is not None:
            given[name] = config_object(parameter, module, attempt)
        elif needed and name.lower() in attempt.values:
            given[name] = attempt.values[name.lower()]
        elif needed:
            called = getattr(made, "__name__", "GPT")
            raise Problem(
                f"{called} needs {name!r}, which the checkpoint does not contain: give an "
                f"expression that makes the model, such as '{called}(..., {name}=...)'"
            )
    return given


def config_class(parameter: inspect.Parameter, module: types.ModuleType) -> type | None:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = vars(module).get(annotation)
    return annotation if dataclasses.is_dataclass(annotation) else None  # type: ignore[return-value]


def config_object(parameter: inspect.Parameter, module: types.ModuleType, attempt: Attempt) -> Any:
    """A configuration object with the known values. Its class is the annotated one, or the file's
    only class that is named like a configuration, else `Values`."""
    named = config_class(parameter, module)
    classes = [named] if named else [
        value for name, value in vars(module).items()
        if isinstance(value, type) and is_own(value, module)
        and ("config" in name.lower() or name.lower().endswith("args"))
        and not issubclass(value, nn.Module)
    ]  # fmt: skip
    if len(classes) != 1:
        return Values({**attempt.values, **attempt.over}, attempt.asked)
    config = classes[0](**config_arguments(classes[0], attempt))
    if not dataclasses.is_dataclass(config):
        attempt.asked.update(name for name in attempt.values if hasattr(config, name))
        for name, value in attempt.over.items():
            if hasattr(config, name):
                setattr(config, name, value)
    return config


def config_arguments(made: type, attempt: Attempt) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(made).parameters.items():
        attempt.asked.add(name.lower())
        needed = attempt.values if parameter.default is parameter.empty else attempt.over
        if name.lower() in (known := {**needed, **attempt.over}):
            given[name] = known[name.lower()]
    return given


def load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the weights. Only masks and tables may be missing or unused. Raises Problem."""
    problems: list[str] = []
    for names in renamed(weights, model):
        try:
            missing, unexpected = model.load_state_dict(names, strict=False)
        except RuntimeError as error:
            raise Problem(
                f"the weights do not fit the owner's model: {str(error)[:500]}"
            ) from error
        buffers = {name for name, _ in model.named_buffers()}
        learned = [name for name in missing if name not in buffers]
        tied = [name for name in learned if shared(model, name, names)]
        left = [name for name in unexpected if is_weight(name, names[name])]
        if len(learned) == len(tied) and not left:
            return
        problems.append(
            f"the owner's model and the checkpoint have different tensors: the checkpoint lacks "
            f"{learned[:3] or 'none'}, and the model lacks {left[:3] or 'none'}"
        )
    raise Problem(problems[0])  # that of the unchanged names


def renamed(weights: Mapping[str, Tensor], model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The weights by their own names; without a common first part; and prefixed by each child's
    name."""
    yield dict(weights)
    heads = {name.partition(".")[0] for name in weights}
    if len(heads) == 1:
        yield {name.partition(".")[2]: tensor for name, tensor in weights.items()}
    for child, _ in model.named_children():
        yield {f"{child}.{name}": tensor for name, tensor in weights.items()}


def shared(model: nn.Module, name: str, weights: Mapping[str, Tensor]) -> bool:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return any(
        other != name and other in weights and parameters[other] is parameters.get(name)
        for other in parameters
    )


def is_weight(name: str, tensor: Tensor) -> bool:
    last = name.rpartition(".")[2]
    marks = ("mask", "tril", "cos", "sin", "freq", "position_ids", "rope")
    if tensor.dim() == 4 and last == "bias":
        return False
    return tensor.is_floating_point() and not any(mark in last for mark in marks)


@torch.no_grad()
def run(model: nn.Module, rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ids (2, T), their logits (2, T, rows), and the logits after the last id is changed."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, rows, (2, length), generator=generator)
    other = token_ids.clone()
    other[:, -1] = (other[:, -1] + 1) % rows
    return token_ids, logits_of(model, token_ids, rows), logits_of(model, other, rows)


def logits_of(model: nn.Module, token_ids: Tensor, rows: int) -> Tensor:
    """Logits (B, T, rows). If the model returns only the last position, it is called for every
    prefix. Raises Problem."""
    logits = call(model, token_ids, rows)
    if logits.dim() == 2 and len(logits) == token_ids.numel():
        logits = logits.view(*token_ids.shape, -1)  # (B * T, V) to (B, T, V)
    if logits.dim() == 3 and logits.shape[1] == token_ids.shape[1]:
        return logits[..., :rows].float().contiguous()
    last = [call(model, token_ids[:, : end + 1], rows) for end in range(token_ids.shape[1])]
    stacked = [out[:, -1] if out.dim() == 3 else out for out in last]
    if any(out.shape[0] != len(token_ids) for out in stacked):
        raise Problem(
            f"the model returns {list(logits.shape)} for ids {list(token_ids.shape)}; expected "
            "logits (batch, positions, vocabulary)"
        )
    return torch.stack(stacked, dim=1)[..., :rows].float().contiguous()  # (B, T, V)


def call(model: nn.Module, token_ids: Tensor, rows: int) -> Tensor:
    """Call the model, and return the first tensor of its output whose last axis is the vocabulary.
    Raises Problem."""
    try:
        try:
            inspect.signature(model.forward).bind(token_ids)
        except TypeError:
            returned = model(token_ids, token_ids)  # some require targets
        else:
            returned = model(token_ids)
    except Exception as error:  # the owner's code may raise anything
        raise Problem(
            f"its forward failed on ids of shape {list(token_ids.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    for tensor in tensors_in(returned):
        if tensor.dim() in (2, 3) and tensor.shape[-1] >= rows and tensor.is_floating_point():
            return tensor
    raise Problem(f"its forward returns a {type(returned).__name__} without logits of {rows} ids")


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name in ("logits", *value):
            if name in value:
                yield from tensors_in(value[name])
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif hasattr(value, "logits"):
        yield from tensors_in(value.logits)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main(Path(sys.argv[1])))
