"""Types of the values in the settings of `logitd serve`: strings, and the rules that they must
follow."""

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator
from pydantic_settings import NoDecode

from logitd.model.inference.options import (
    parse_loss_limit,
    parse_memory,
    parse_target_gap,
    parse_target_ttft,
)
from logitd.service.settings.common import CommaList
from logitd.service.settings.model_source import ModelSource, listed, model_source, named


def _matches(pattern: str, rule: str) -> AfterValidator:
    """Check that the whole text matches a pattern."""

    def checked(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(rule)
        return text

    return AfterValidator(checked)


def _parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Check a string by parsing it. The value remains the unparsed string."""

    def checked(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(checked)


Origin = Annotated[
    str,
    _matches(
        r"\*|[a-z][a-z0-9+.-]*://[^\s/?#A-Z]+",
        "an origin is *, https://host or https://host:port, in lower case",
    ),
]
PathText = Annotated[
    str,
    _matches(r"/|(/[^\s/?#]+)+", "a path begins with / and does not end with it, except / itself"),
]
Collector = Annotated[
    str,
    _matches(
        r"https?://[^\s/?#@]+(/[^\s?#]*)?",
        "a collector is http://host:port or https://host:port, usually with port 4318; if it needs "
        "keys, put them into the variable OTEL_EXPORTER_OTLP_HEADERS",
    ),
]
Host = Annotated[
    str,
    _matches(
        r"\S+",
        "an address is a name or a number without white space, such as 127.0.0.1; 0.0.0.0 binds "
        "all interfaces of this machine",
    ),
]
AllowedHost = Annotated[
    str,
    _matches(
        r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+",
        "a host is *, a name or an address, without scheme, port and brackets, such as "
        "gpt.example.org",
    ),
]
AllowedHosts = Annotated[
    CommaList[AllowedHost],
    Field(
        description="names of this server that the Host header may contain, separated by commas; "
        "requests with other names get 403. * allows any name. Loopback names and "
        "--host are always accepted. Without this flag, other names are refused only "
        "on a loopback address without API keys"
    ),
]
MemoryText = Annotated[str, _parsed_by(parse_memory)]
TargetGapText = Annotated[str, _parsed_by(parse_target_gap)]
TargetTTFTText = Annotated[str, _parsed_by(parse_target_ttft)]
LossText = Annotated[str, _parsed_by(parse_loss_limit)]
Origins = Annotated[
    CommaList[Origin],
    Field(
        description="origins whose pages may read this server's replies in a browser, such as "
        "https://example.org, separated by commas; * allows any origin"
    ),
]
PublicPaths = Annotated[
    CommaList[PathText],
    Field(
        description="paths that need no API key, including all below them, separated by commas; "
        "/ is only the path / itself; /health never needs one"
    ),
]
_Source = Annotated[ModelSource, PlainValidator(model_source), PlainSerializer(str)]
ModelSources = Annotated[
    tuple[_Source, ...],
    NoDecode,
    BeforeValidator(listed),
    Field(min_length=1),
    AfterValidator(named),
]


def _names_of_stages(sources: tuple[ModelSource, ...]) -> tuple[ModelSource, ...]:
    """Check that each name can be part of a stage's name and occurs only once. Raises
    ValueError."""
    names = [source.served_name for source in sources]
    for name in names:
        if not re.fullmatch(r"[\w-]{1,60}", name):
            raise ValueError(
                f"{name!r} cannot be part of a stage's name: write NAME=DIR, with a NAME of 1 to "
                "60 letters, digits, _ and -"
            )
        if names.count(name) > 1:
            raise ValueError(
                f"two autoencoders have the name {name!r}: give each its own name, as NAME=DIR"
            )
    return sources


AutoencoderSources = Annotated[
    tuple[_Source, ...],
    NoDecode,
    BeforeValidator(listed),
    AfterValidator(_names_of_stages),
]
