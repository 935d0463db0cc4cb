"""Property tests: all of them run again with more examples, and scale with the profile."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[Function]:
    """The functions of a module, without those inside them."""
    yield from (node for node in ast.parse(source).body if isinstance(node, Function))


def decorators(function: Function) -> list[str]:
    return [ast.unparse(node) for node in function.decorator_list]


def unmarked(source: str) -> list[str]:
    """Tests with a property inside, which pytest cannot see, that do not carry its mark."""
    return [
        outer.name
        for outer in functions(source)
        if "pytest.mark.hypothesis" not in decorators(outer)
        if any(
            isinstance(inner, Function)
            and inner is not outer
            and any(name.startswith("given(") for name in decorators(inner))
            for inner in ast.walk(outer)
        )
    ]


def fixed(source: str) -> list[str]:
    """Properties with a number of examples that no profile changes, which only a slow test may
    state."""
    return [
        function.name
        for function in functions(source)
        if "pytest.mark.slow" not in decorators(function)
        for name in decorators(function)
        if "max_examples=" in name and "max_examples=examples(" not in name
    ]


def test_every_property_is_run_again_with_every_example() -> None:
    found = {
        str(path.relative_to(TESTS)): wrong
        for path in sorted(TESTS.rglob("test_*.py"))
        if "given(" in (source := path.read_text(encoding="utf-8"))
        if (wrong := unmarked(source) + fixed(source))
    }
    assert found == {}


def test_property_rules_can_fail() -> None:
    hidden = "def test_a():\n    @given(TEXTS)\n    def same(text): ...\n    same()\n"
    assert unmarked(hidden) == ["test_a"]
    assert unmarked("@pytest.mark.hypothesis\n" + hidden) == []
    assert unmarked("@given(TEXTS)\ndef test_a(text): ...\n") == []
    hard = "@settings(max_examples=9)\n@given(TEXTS)\ndef test_a(text): ...\n"
    assert fixed(hard) == ["test_a"]
    assert fixed("@pytest.mark.slow\n" + hard) == []
    assert fixed(hard.replace("9", "examples(9)")) == []
