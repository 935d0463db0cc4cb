"""The client's generated fields, results and methods match the operations."""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from logitd.model.operations.all import OPERATIONS
from logitd.model.operations.body import PositionRange
from logitd.model.operations.interventions import Difference, Intervention, Source
from logitd.model.operations.operation import Operation
from logitd.model.operations.processing import Processing
from logitd.service import client
from logitd.service.client import fields as client_fields
from logitd.service.client import results
from logitd.service.client_methods import PROPERTIES
from logitd.service.generate_client import FACTS, FOLDER, result_name, sources

DECIDED = {"logits": {"top_k", "stream"}}
"""Fields that the client's methods set themselves, by operation. Methods of operations that are not
listed set only `stream`."""


def tree(source: str) -> str:
    """A source file without layout or comments."""
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.dump(parsed)


def test_generated_files_are_current() -> None:
    for name, source in sources().items():
        written = (FOLDER / name).read_text(encoding="utf-8")
        form = tree if name.endswith(".py") else str
        assert form(written) == form(source), f"{name}: run `make client`"


def test_both_clients_have_a_method_for_each_operation() -> None:
    for kind in (client.Client, client.AsyncClient):
        assert {operation.name for operation in OPERATIONS} < set(vars(kind))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_fields_match_the_operation(operation: Operation) -> None:
    name = f"{operation.name.title().replace('_', '')}Fields"
    known = set(getattr(client_fields, name).__annotations__)
    required = set(operation.body.model_json_schema()["required"])
    decided = DECIDED.get(operation.name, {"stream"})
    assert known == set(operation.body.model_fields) - required - decided


@pytest.mark.parametrize("model", [Source, Difference, Processing, PositionRange, Intervention])
def test_fields_match_the_object(model: type[BaseModel]) -> None:
    aliases = {field.alias or name for name, field in model.model_fields.items()}
    assert set(getattr(client_fields, model.__name__).__annotations__) == aliases


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The reply models in an annotation, and their parts."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for inner in get_args(annotation):
        yield from models(inner)


def test_members_match_the_reply() -> None:
    replies = [get_args(operation.reply)[:1] or (operation.reply,) for operation in OPERATIONS
               if operation.form != "outputs"]  # fmt: skip
    seen = {model for (reply,) in replies for model in models(reply)}
    seen |= {part for model in FACTS for part in models(model)}
    assert len(seen) > 30
    for model in seen:
        name = result_name(model)
        members = {field.name: field for field in fields(getattr(results, name))}
        computed = {key for key in model.model_fields if f"def {key}(" in PROPERTIES.get(name, "")}
        assert set(members) - {"request_id"} == set(model.model_fields) - computed
        for key in members.keys() & model.model_fields.keys():
            needed = members[key].default is MISSING
            assert needed == model.model_fields[key].is_required(), f"{name}.{key}"
