"""Build: creates the owner's model with values from the checkpoint. `weights.py` loads its weights.

The expression is a class, a function, or any other expression that creates the model. A parameter
gets the checkpoint's value with the same name. `attempts` lists different ways to choose among
these values. The attempt that fits the weights can be repeated later.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logitd.model.owner_code.process.define import (
    as_default,
    flags_of,
    is_config_name,
    loaded,
    parse,
    record,
    run_definitions,
)
from logitd.model.owner_code.process.problem import Problem
from logitd.model.owner_code.process.weights import load

CONFIG_NAMES = ("config", "cfg", "conf", "args", "params", "hparams", "model_args", "model_config",
                "settings", "opt", "hyperparameters", "hp")  # fmt: skip
ID_NAME = re.compile(r"(.+_)?(id|idx|index|token)|pad|bos|eos|eot|sep|cls|unk|mask")
"""Names of values that may be the id of a special token."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The owner's code, and values from the checkpoint. Each value appears under all of its usual
    names, in lower case.

    file, expression   the owner's file, and a name in it or an expression that uses the file's
                       names
    said               values from the checkpoint's settings and from the user
    shape              values that follow from the shapes of the tensors
    flags              guesses about which parts have a bias
    doubtful           values that may belong to the optimizer. They replace no default of the code
    unpassed           descriptions of the checkpoint's values that JSON cannot express. The code
                       must not look them up
    call               expression that returns logits; it may use `model`, `ids` and names of the
                       file. None means `model(ids)`
    chosen             values of the attempt that created the model earlier; None tries all attempts
    seed               seed of what the code draws when the model is created
    """

    file: str
    expression: str
    said: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    doubtful: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unpassed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    call: str | None = None
    chosen: Mapping[str, Any] | None = None
    seed: int = 0

    @property
    def values(self) -> dict[str, Any]:
        return {**self.doubtful, **self.shape, **self.flags, **self.said}

    @property
    def expressions(self) -> list[str]:
        return [self.expression] if self.call is None else [self.expression, self.call]


class Section(dict[str, Any]):
    """A dictionary whose keys are also attributes, because the owner's code may read either."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Values(Section):
    """The values of an attempt. The attempt notes each key that is looked up, and each default that
    is used."""

    def __init__(self, attempt: "Attempt") -> None:
        super().__init__({**attempt.values, **attempt.over})
        self.__dict__["attempt"] = attempt

    def __getitem__(self, name: str) -> Any:
        self.attempt.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.attempt.asked.add(name)
        doubtful = name in self.attempt.doubtful and name not in self.attempt.over
        if name in self and (default is None or not doubtful):
            return super().get(name)
        self.attempt.keep(name, default)
        return default

    def __getattr__(self, name: str) -> Any:
        self.attempt.asked.add(name)
        return super().__getattr__(name)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One way to create the model.

    top     values that override global variables of the file
    over    values that override the defaults of parameters
    values  values for parameters without a default
    asked   names that the code has looked up in any attempt so far
    names   values of variables whose assignment fails; names have their exact case
    kept    the code's own values of parameters and variables that nothing has replaced, if they are
            numbers, flags, strings, or lists of them
    doubtful
            names in `values` that replace no default
    unpassed
            names of values that cannot be passed
    """

    top: Mapping[str, Any]
    over: Mapping[str, Any]
    values: Mapping[str, Any]
    asked: set[str]
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kept: dict[str, Any] = dataclasses.field(default_factory=dict)
    doubtful: frozenset[str] = frozenset()
    unpassed: frozenset[str] = frozenset()

    def keep(self, name: str, value: Any) -> None:
        if is_plain(value):
            self.kept[name] = list(value) if isinstance(value, list | tuple) else value

    def named_ids(self) -> list[int]:
        """The numbers among the values whose names are those of an id, such as that of padding."""
        return [
            value
            for name, value in {**self.over, **self.kept}.items()
            if type(value) is int and ID_NAME.fullmatch(name.lower())
        ]

    def within(self, section: Mapping[str, Any]) -> "Attempt":
        """The attempt for a part of the configuration, whose values take precedence."""
        own = {name.lower(): value for name, value in section.items()}
        return dataclasses.replace(self, over={**self.over, **own}, values={**self.values, **own})

    @property
    def chosen(self) -> dict[str, Mapping[str, Any]]:
        """The values that are needed to repeat the attempt."""
        return {"top": self.top, "over": self.over, "values": self.values, "names": self.names}


@dataclasses.dataclass(frozen=True)
class Built:
    """The model with its weights, the module that defines it, and the attempt that created it."""

    model: nn.Module
    module: types.ModuleType
    attempt: Attempt

    def named_ids(self, rows: int) -> list[int]:
        """The ids below `rows` that the values name, and then all numbers in the owner's file, the
        largest first: a constant may be the id of an end of text."""
        source = Path(self.module.__file__ or "").read_text(encoding="utf-8", errors="replace")
        found = [*self.attempt.named_ids(), *sorted(integers_in(source), reverse=True)]
        return [value for value in found if 0 <= value < rows]


def is_plain(value: Any) -> bool:
    """True for numbers, flags, strings, and lists of them."""
    parts = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(part, bool | int | float | str) for part in parts)


def integers_in(source: str) -> set[int]:
    digits = re.findall(r"(?<![\w.])\d[\d_]{,9}(?![\w.])", source)
    return {int(each.replace("_", "")) for each in digits}


def attempts(request: Request) -> Iterator[Attempt]:
    """Yield the attempts in order: with the defaults of the owner's code, then with the values that
    follow from the tensors' shapes, then with all combinations of the flags. If the request has
    `chosen`, yield only that attempt."""
    said, shape = request.said, request.shape
    asked, none = set[str](), dict[str, Any]()
    made = functools.partial(
        Attempt,
        asked=asked,
        doubtful=frozenset(request.doubtful),
        unpassed=frozenset(request.unpassed),
    )
    if request.chosen is not None:
        yield made(**request.chosen)
        return
    for top, shown in ((said, none), (said, shape), ({**said, **shape}, shape)):
        yield made(top, {**shown, **said}, request.values)
    names = sorted((asked & request.flags.keys()) - said.keys())
    for values in itertools.product((True, False), repeat=len(names)):
        chosen = dict(zip(names, values, strict=True))
        for top in (said, {**said, **shape}) if names else ():
            yield made(top, {**shape, **chosen, **said}, {**request.values, **chosen})


def build_model(request: Request, weights: Mapping[str, Tensor]) -> Built:
    """The owner's model with the checkpoint's weights, in evaluation mode. Raises Problem."""
    problems, tried, asked = list[Problem](), set[str](), set[str]()
    for attempt in attempts(request):
        asked = attempt.asked
        try:
            file = Path(request.file)
            torch.manual_seed(request.seed)
            module = run_definitions(
                file, request.expressions, request.values, attempt.top, attempt.names
            )
            model = make(module, request, attempt)
            load(model, weights)
        except Problem as problem:
            problems.append(problem)
            tried = attempt.asked & request.flags.keys()
        else:
            asked.update(name.lower() for name, _ in read_defaults(file))
            _refuse_unpassed(request, asked)
            names = {**attempt.names, **record(file, request.expressions, module)}
            known = {**attempt.values, **attempt.over}
            for name, value in list(vars(module).items()):
                if is_plain(value) and request.doubtful.get(name.lower(), value) != value:
                    attempt.keep(name, value)
                for flag, own in flags_of(value).items():
                    asked.add(flag.lower())
                    if flag.lower() not in known or (is_plain(own) and known[flag.lower()] != own):
                        attempt.keep(flag, own)
            given = known.keys() | attempt.kept.keys()
            for name, default in read_defaults(file):
                if name not in given and name.lower() not in given:
                    attempt.keep(name, default)
            return Built(model.eval(), module, dataclasses.replace(attempt, names=names))
    _refuse_unpassed(request, asked)
    said = str(problems[:3][-1])
    if flags := sorted(tried - request.said.keys()):
        said += (
            f". No combination of {' and '.join(flags)} fits; give the expression that creates the "
            f"model, such as '{request.expression}({flags[0]}=False)'"
        )
    raise Problem(said)


def _refuse_unpassed(request: Request, asked: Collection[str]) -> None:
    """Raise Problem if the code has looked up a value that cannot be passed to it."""
    for name in sorted(request.unpassed.keys() & asked):
        raise Problem(
            f"the code reads {name!r}, but the checkpoint's value cannot be passed to it "
            f"({request.unpassed[name]}). Give an expression that creates the model as it was "
            f"trained, such as 'GPT(..., {name}=...)'"
        )


def make(module: types.ModuleType, request: Request, attempt: Attempt) -> nn.Module:
    """Create the model, without its weights, by evaluating the expression. If the result is a class
    or a function, it is called with the known values of its parameters. Raises Problem."""
    torch.manual_seed(request.seed)
    names = {**attempt.values, **vars(module)}
    try:
        for name in loaded(ast.parse(request.expression)) - names.keys():
            if name.lower() in CONFIG_NAMES:
                names[name] = config_object(None, module, attempt)
        made = eval(compile(request.expression, "<--code>", "eval"), names)
        if not isinstance(made, nn.Module) and callable(made):
            made = made(**arguments(made, module, attempt))
    except Problem:
        raise
    except Exception as error:  # the owner's code may raise anything
        if isinstance(error, NameError) and error.name in loaded(ast.parse(request.expression)):
            tree, kinds = parse(Path(request.file)), ast.ClassDef | ast.FunctionDef
            defined = [part.name for part in tree.body if isinstance(part, kinds)]
            raise Problem(
                f"{Path(request.file).name} does not define {error.name!r}; its classes and "
                f"functions are {', '.join(defined) or 'none'}"
            ) from error
        raise Problem(
            f"{type(error).__name__}: {error}. If the values of the checkpoint do not fit, give "
            "an expression that creates the model, such as 'GPT(vocab_size=..., n_head=...)'"
        ) from error
    if not isinstance(made, nn.Module):
        raise Problem(f"the expression returns a {type(made).__name__}; expected a torch module")
    return made.float().to("cpu")


def arguments(
    made: Callable[..., Any], module: types.ModuleType, attempt: Attempt
) -> dict[str, Any]:
    """Arguments for calling a class or a function, by the names of its parameters. Raises
    Problem."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            for key, default in read_keys(name, made, module):
                attempt.asked.add(key.lower())
                if key.lower() in attempt.over and key not in given:
                    given[key] = attempt.over[key.lower()]
                elif key not in given:
                    attempt.keep(key, default)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        attempt.asked.add(name.lower())
        needed = parameter.default is parameter.empty
        value = attempt.over.get(name.lower())
        named = config_class(parameter, module)
        if isinstance(value, dict) and named is None and needed and is_config_name(name):
            given[name] = config_object(None, module, attempt.within(value))
        elif name.lower() in attempt.over:
            given[name] = fitted(value, parameter, module, attempt)
        elif name.lower() in CONFIG_NAMES or named is not None:
            given[name] = config_object(named, module, attempt)
        elif needed and name.lower() in attempt.values:
            given[name] = fitted(attempt.values[name.lower()], parameter, module, attempt)
        elif needed and is_used_as_object(name, made, module):
            given[name] = config_object(None, module, attempt)
        elif needed:
            called = getattr(made, "__name__", "GPT")
            raise Problem(
                f"{called} needs {name!r}, which the checkpoint does not contain: give an "
                f"expression that creates the model, such as '{called}(..., {name}=...)'"
            )
        else:
            attempt.keep(name, parameter.default)
    return given


def fitted(
    value: Any, parameter: inspect.Parameter, module: types.ModuleType, attempt: Attempt
) -> Any:
    """The value for a parameter: an object of the parameter's configuration class instead of a
    dictionary, and a tuple instead of a list if the default is a tuple."""
    named = config_class(parameter, module)
    if isinstance(value, dict) and named is not None:
        return config_object(named, module, attempt.within(value))
    return as_default(value, parameter.default)


def config_class(parameter: inspect.Parameter, module: types.ModuleType) -> type | None:
    """The class in a parameter's annotation if it is a configuration class; otherwise None."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = vars(module).get(annotation)
    if not isinstance(annotation, type) or issubclass(annotation, nn.Module):
        return None
    is_config = dataclasses.is_dataclass(annotation) or is_config_name(annotation.__name__)
    return annotation if is_config else None


def is_used_as_object(name: str, made: Callable[..., Any], module: types.ModuleType) -> bool:
    """True if the code reads attributes or items of a parameter, so that the parameter is probably
    a configuration."""
    called = getattr(made, "__name__", "")
    return any(
        isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for part in parse(Path(str(module.__file__))).body
        if isinstance(part, ast.ClassDef | ast.FunctionDef) and part.name == called
        for node in ast.walk(part)
    )


def read_keys(
    name: str, made: Callable[..., Any], module: types.ModuleType
) -> Iterator[tuple[str, Any]]:
    """The keys that a class or function reads from its parameter `**name`, with their defaults;
    None if there is no constant default."""
    called = getattr(made, "__name__", "")
    for part in parse(Path(str(module.__file__))).body:
        if not isinstance(part, ast.ClassDef | ast.FunctionDef) or part.name != called:
            continue
        for node in ast.walk(part):
            match node:
                case ast.Subscript(ast.Name(id), ast.Constant(str(key))) if id == name:
                    yield key, None
                case ast.Call(
                    ast.Attribute(ast.Name(id), "get" | "pop"), [ast.Constant(str(key)), *rest]
                ) if id == name:
                    yield key, rest[0].value if rest and isinstance(rest[0], ast.Constant) else None


def read_defaults(file: Path) -> Iterator[tuple[str, Any]]:
    """The names that a file reads from a configuration with `getattr`, with their defaults; None if
    there is no constant default."""
    for node in ast.walk(parse(file)):
        match node:
            case ast.Call(
                ast.Name("getattr"),
                [
                    ast.Name(id=of) | ast.Attribute(attr=of),
                    ast.Constant(str(name)),
                    default,
                ],
            ) if of.lower() in CONFIG_NAMES:
                yield name, default.value if isinstance(default, ast.Constant) else None


def config_object(named: type | None, module: types.ModuleType, attempt: Attempt) -> Any:
    """A configuration object with the known values. Its class is `named` or, if that is None, the
    only class in the file with a name like a configuration's (`is_config_name`). If the file has no
    such class or several, the object is a `Values`."""
    classes = [named] if named else [
        value for name, value in vars(module).items()
        if isinstance(value, type) and is_config_name(name) and not issubclass(value, nn.Module)
    ]  # fmt: skip
    if len(classes) != 1:
        return Values(attempt)
    config = classes[0](**config_arguments(classes[0], module, attempt))
    if not dataclasses.is_dataclass(config):
        known = attempt.values.keys() | attempt.unpassed
        attempt.asked.update(name for name in known if hasattr(config, name))
        for name in attempt.values:
            if hasattr(config, name) and name not in attempt.over:
                attempt.keep(name, getattr(config, name))
        for name, value in attempt.over.items():
            if hasattr(config, name):
                setattr(config, name, as_default(value, getattr(config, name)))
    for name, _ in read_defaults(Path(str(module.__file__))):
        if not hasattr(config, name) and name.lower() in attempt.over:
            object.__setattr__(config, name, attempt.over[name.lower()])  # it may be frozen
    return config


def config_arguments(made: type, module: types.ModuleType, attempt: Attempt) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(made).parameters.items():
        attempt.asked.add(name.lower())
        needed = attempt.values if parameter.default is parameter.empty else attempt.over
        if name.lower() in (known := {**needed, **attempt.over}):
            given[name] = fitted(known[name.lower()], parameter, module, attempt)
        else:
            attempt.keep(name, parameter.default)
    return given
