"""Flags as plain data: every word and every choice that help and completion name is understood."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, CliPositionalArg, SettingsError

from logitd.service.cli.arguments.flags import Flag, flags_of, known_words
from logitd.service.cli.main import COMMANDS
from logitd.service.settings.common import settings_of

ARGUMENTS = {name: [f for f in flags_of(COMMANDS[name]) if not f.words] for name in COMMANDS}
VALUES = {"int": "1", "float": "0.5", "path": "here", "text": "words", "json": "{}"}


def refusal(command: str, *given: str) -> str:
    """What is said of words after the arguments that a command needs; "" if they are taken."""
    needed = [flag.name for flag in ARGUMENTS[command] if flag.required]
    try:
        CliApp.run(COMMANDS[command], cli_args=[*needed, *given], cli_exit_on_error=False)
    except (SettingsError, ValidationError) as error:
        return str(error)
    return ""


def example(flag: Flag) -> list[str]:
    if not flag.value:
        return []
    return [flag.choices[0] if flag.choices else VALUES[flag.value.split(",")[0]]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_word_is_understood(command: str) -> None:
    """All on one command line: to make the parser takes longer than to parse a hundred words."""
    words = [
        word
        for flag in flags_of(COMMANDS[command])
        for name in flag.words
        for word in (name, *example(flag))
    ]
    assert "error parsing CLI" not in refusal(command, *words)
    assert "error parsing CLI" in refusal(command, *words, "--no-such-word")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_choice_is_one(command: str) -> None:
    """The first of every flag together, then the second of those that have one, and so on."""
    choosing = [flag for flag in flags_of(COMMANDS[command]) if flag.words and flag.choices]
    for nth in range(max((len(flag.choices) for flag in choosing), default=0)):
        chosen = [
            (flag.words[0], flag.choices[nth]) for flag in choosing if nth < len(flag.choices)
        ]
        said = refusal(command, *chain.from_iterable(chosen))
        assert "Input should be" not in said, (chosen, said)


@pytest.mark.parametrize("command", COMMANDS)
def test_known_words_are_all_of_them(command: str) -> None:
    known = known_words(COMMANDS[command])
    assert len(known) == len(set(known))
    for name in COMMANDS[command].model_fields:
        word = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        assert word in known or name in {flag.name for flag in ARGUMENTS[command]}
    assert "--help" in known


@dataclass(frozen=True)
class Size:
    """Of something."""

    rows: int
    kind: Literal["a", "b"] | None = None


class Examples(BaseSettings):
    """One of each kind."""

    model_config = settings_of("examples", {"many": "several"})

    place: CliPositionalArg[str] = Field(description="where")
    count: int | None = Field(None, description="how often")
    rate: Annotated[float, Field(gt=0)] = Field(0.5, description="how fast")
    kind: Literal["a", "b"] = Field("a", description="which")
    many: tuple[int, ...] = Field((1, 2), description="how many\n    at a time")
    kinds: tuple[Literal["a", "b"], ...] = Field((), description="which of them")
    on: bool = Field(True, description="whether")
    size: Size | None = Field(None, description="how large")


def test_each_kind_in_plain_words() -> None:
    found = {flag.name: flag for flag in flags_of(Examples)}
    variable = "LOGITD_{}".format
    assert found["place"] == Flag("place", (), "text", (), None, True, "where", variable("PLACE"))
    assert (found["count"].value, found["count"].default) == ("int", None)
    assert (found["rate"].value, found["rate"].default) == ("float", "0.5")
    assert (found["kind"].value, found["kind"].choices) == ("a|b", ("a", "b"))
    assert found["many"].words == ("--several", "--many")
    assert (found["many"].value, found["many"].default) == ("int,int", "1,2")
    assert found["many"].description == "how many at a time"
    assert (found["kinds"].value, found["kinds"].default) == ("a|b,...", None)
    assert (found["on"].words, found["on"].value) == (("--on", "--no-on"), "")
    assert found["on"].default == "yes"
    assert (found["size"].value, found["size"].choices) == ("json", ())
