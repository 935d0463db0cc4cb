"""Flags: parameters of all kinds of fields, groups, and suggestions for mistyped flags."""

import shlex
from typing import Annotated, ClassVar, Literal

import click
import pytest
from pydantic import Field, TypeAdapter
from pydantic_settings import CliPositionalArg

from logitd.service.cli.main import COMMANDS
from logitd.service.cli.settings_command import SettingsCommand
from logitd.service.settings.common import CommandSettings
from tests.service.cli.parsed import SETTINGS, context, parameters_of, parsed, words_of


@pytest.fixture(autouse=True)
def usual_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


class Examples(CommandSettings):
    """A field of each kind."""

    command = "examples"
    groups: ClassVar = {"places": "input", "count": "numbers", "rate": "numbers"}
    flag_names: ClassVar = {"as_json": "json"}

    places: CliPositionalArg[tuple[str, ...]] = Field((), description="where")
    count: int | None = Field(None, description="how often")
    rate: Annotated[float, Field(gt=0)] = Field(0.5, description="how fast")
    kind: Literal["auto"] | Literal["a", "b"] = Field("auto", description="which")
    many: tuple[int, ...] = Field((1, 2), description="how many")
    words: tuple[Literal["a", "b"], ...] = Field((), description="which of them")
    on: bool = Field(True, description="whether")
    as_json: bool = Field(False, description="JSON")
    n: int = Field(1, description="a short flag")


EXAMPLES = SettingsCommand("examples", Examples, "Show examples.", "logitd examples --on")


def read(*words: str) -> Examples:
    settings = EXAMPLES.main(list(words), standalone_mode=False)
    assert isinstance(settings, Examples)
    return settings


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--count", "3"], "count", 3),
        (["--rate=2"], "rate", 2.0),
        (["--kind", "b"], "kind", "b"),
        (["--many", "3, 4", "--many", "5"], "many", (3, 4, 5)),
        (["--words", "a,b"], "words", ("a", "b")),
        (["--no-on"], "on", False),
        (["--json"], "as_json", True),
        (["--as-json"], "as_json", True),
        (["-n", "7"], "n", 7),
        (["x", "--count", "3", "y,z"], "places", ("x", "y,z")),
        (["--", "-n", "--help"], "places", ("-n", "--help")),
    ],
)
def test_flags_set_values_of_each_kind(words: list[str], field: str, value: object) -> None:
    settings = read(*words)
    assert getattr(settings, field) == value
    assert field in settings.model_fields_set


def test_missing_flags_leave_fields_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read().model_fields_set == set()
    monkeypatch.setenv("LOGITD_COUNT", "4")
    assert read().count == 4


def test_texts_and_paths_are_not_split() -> None:
    prompts = ("Dear Sir,", ' "Hello", ', "two,\nlines")
    given = [word for prompt in prompts for word in ("--prompts", prompt)]
    assert parsed("train", *given).prompts == prompts
    assert parsed("eval", "--data", "Smith, John.txt", "--data", "b").data == (
        "Smith, John.txt",
        "b",
    )
    assert list(map(str, parsed("serve", "--sae", "a=x,b=y").sae)) == ["a=x,b=y"]


def test_quoted_items_of_a_split_list_may_contain_commas() -> None:
    stages = parsed("extract", "x", "--data=y", "--out=z", "--stages", 'a, "b,c"').stages
    assert stages == ("a", "b,c")


def test_help_says_which_flags_can_be_repeated() -> None:
    repeated = {
        param.name
        for command in SETTINGS
        for param in parameters_of(command)
        if "(can be repeated)" in str(getattr(param, "help", ""))
    }
    assert repeated == {"data", "prompts", "sae", "ignore_setting"}


def test_help_has_the_groups_in_order() -> None:
    text = EXAMPLES.get_help(context(EXAMPLES))
    places = [text.index(title) for title in ("Examples:", "Input:", "Numbers:", "--count INT")]
    assert places == sorted(places)
    assert text.count("Numbers:") == 1
    assert "--kind auto|a|b" in text
    assert "how many (default: 1,2) [env: LOGITD_MANY]" in " ".join(text.split())


@pytest.mark.parametrize("command", SETTINGS)
def test_all_flags_are_in_a_group(command: str) -> None:
    names = list(SETTINGS[command].model_fields)
    groups = SETTINGS[command].groups
    assert names[0] in groups
    assert groups.keys() <= set(names)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_examples_can_be_pasted(command: SettingsCommand) -> None:
    shown = command.get_help(context(command)).splitlines()
    examples = [line.strip().split("   ")[0] for line in shown if line.startswith("  logitd ")]
    assert examples
    for example in examples:
        program, name, *rest = shlex.split(example)
        assert (program, name) == ("logitd", command.name)
        parsed(name, *rest)


@pytest.mark.parametrize("command", SETTINGS)
def test_flags_have_distinct_words(command: str) -> None:
    words = words_of(command)
    assert len(words) == len(set(words))
    assert {"-h", "--help"} <= set(words)


@pytest.mark.parametrize("command", SETTINGS)
def test_choices_are_valid_values(command: str) -> None:
    for param in parameters_of(command):
        if isinstance(param.type, click.Choice):
            for choice in param.type.choices:
                value = [choice] if param.multiple else choice
                field = SETTINGS[command].model_fields[str(param.name)]
                assert TypeAdapter(field.rebuild_annotation()).validate_python(value) is not None


@pytest.mark.parametrize("command", SETTINGS)
def test_mistyped_flags_get_a_suggestion(command: str) -> None:
    """In each mistyped flag, one letter is added, missing, or swapped with the next."""
    known = [word for word in words_of(command) if len(word) >= 7]
    for word in known:
        middle = len(word) // 2 + 1
        slips = (
            word[:middle] + word[middle + 1 :],
            word[:middle] + "x" + word[middle:],
            word[: middle - 1] + word[middle] + word[middle - 1] + word[middle + 1 :],
        )
        for slip in slips:
            if slip not in known:
                with pytest.raises(click.NoSuchOption) as caught:
                    parsed(command, slip)
                assert word in (caught.value.possibilities or []), slip
