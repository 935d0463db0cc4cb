"""What may have been meant."""

import pytest

from logitd.service.cli.arguments.flags import known_words
from logitd.service.cli.arguments.mistakes import did_you_mean
from logitd.service.cli.main import COMMANDS


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("sevre", "; did you mean serve?"),
        ("trian", "; did you mean train?"),
        ("extrat", "; did you mean extract?"),
        ("inport", "; did you mean import?"),
        ("compile", ""),
        ("", ""),
    ],
)
def test_of_a_command(word: str, meant: str) -> None:
    assert did_you_mean(word, COMMANDS) == meant


@pytest.mark.parametrize("command", COMMANDS)
def test_a_letter_too_many_or_too_few_or_two_in_each_others_place_is_seen(command: str) -> None:
    """Of every flag: whoever slips once is told, unless the slip is a flag itself."""
    known = known_words(COMMANDS[command])
    for word in known:
        if len(word) < 7:
            continue
        middle = len(word) // 2 + 1
        slips = (
            word[:middle] + word[middle + 1 :],
            word[:middle] + "x" + word[middle:],
            word[: middle - 1] + word[middle] + word[middle - 1] + word[middle + 1 :],
        )
        for slip in slips:
            if slip not in known:
                assert did_you_mean(slip, known) == f"; did you mean {word}?", slip
