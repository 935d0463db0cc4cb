"""Stated settings: reads what the settings of a file say about the fields of a computation.

`names.py` lists the usual keys of each field. `unknown_settings.py` finds the settings that nothing
understands.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from logitd.model.convert.by_role import names as words

Settings = Mapping[str, Any]

ANY_EPS = ("eps", "epsilon")
"""Names of settings that may state the eps of a norm or of an optimizer."""
OFF, ON = ("none", "null", "false", "off", "no", "disabled", ""), ("true", "on", "yes")
_QK = re.compile(r"(^|_)(qk|kq|q|k|query|key)(_|$|norm|rms)")


def setting(settings: Settings, field: str) -> tuple[Any, str]:
    """The value of a field in a file's settings, and the key under which it is stored; (None, "")
    if it is not set."""
    return next(((value, key) for key, value in settings_of(field, settings)), (None, ""))


def settings_of(field: str, settings: Settings) -> list[tuple[str, Any]]:
    """The keys that usually store a field, and their values. The usual order decides."""
    by_name = {words.snake_case(str(key)): (str(key), value) for key, value in settings.items()}
    keys = words.SETTINGS.get(field, ())
    return [by_name[key] for key in keys if key in by_name and by_name[key][1] is not None]


def counts_of(field: str, settings: Settings) -> list[tuple[str, int]]:
    """The keys that usually store a field, and their values that are counts. A list of several
    values has an entry for each."""
    return [
        (key, count)
        for key, value in settings_of(field, settings)
        for count in (value if isinstance(value, list) else [value])
        if is_count(count)
    ]


def may_be_optimizers(key: str, settings: Settings) -> bool:
    """True if a setting of this name may be the eps of an optimizer whose other settings are next
    to it."""
    optimizer = any(words.matches(words.OPTIMIZER_SETTING, name) for name in settings)
    return optimizer and key.lower() in ANY_EPS


def states_rms(settings: Settings) -> bool:
    """True if the name of a setting that is on, or the text of a setting about norms, names the RMS
    norm. Settings about the norms of queries and keys do not count, and neither does a name if a
    text says that the norm is another one."""
    about = {
        key: value
        for name, value in settings.items()
        if not _QK.search(key := words.snake_case(name)) and not is_off(value)
    }
    texts = [v for key, v in about.items() if isinstance(v, str) and words.NORM_SETTING.search(key)]
    named = any(words.RMS_SETTING.search(key) for key in about)
    return any(map(words.names_rms, texts)) or (named and not texts)


def is_off(value: Any) -> bool:
    """True if a setting turns a feature off."""
    return value in (False, None) or (isinstance(value, str) and value.lower() in OFF)


def is_on(value: Any) -> bool:
    """True if a setting only turns a feature on."""
    return value in (True,) or (isinstance(value, str) and value.lower() in ON)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def as_number(value: Any) -> Any:
    """A text that is a number, such as "1e-5" in YAML, as a number; other values unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# Readers of one value; they return None for a value that they do not understand.


def read_count(value: Any) -> int | None:
    return value if is_count(value) else None


def read_eps(value: Any) -> float | None:
    number = as_number(value)
    return float(number) if is_number(number) and 0 < number < 1 else None


def read_theta(value: Any) -> float | None:
    number = as_number(value)
    return float(number) if is_number(number) and number > 1 else None


def of_type(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else None
