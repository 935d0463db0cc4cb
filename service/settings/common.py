"""The base class of all settings, and types of flags that several commands share."""

import csv
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from logitd.model.dtypes import DTypeName
from logitd.model.inference.options import KernelChoice, KernelTarget, KVCacheDType, Quantization
from logitd.service.settings.model_source import listed, model_source

PREFIX = "LOGITD_"
"""Prefix of the variables that every command reads."""

BUNDLED_CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "python-small"


class CommandSettings(BaseSettings):
    """Settings of a command. The first source that has a value wins: the flag,
    `LOGITD_COMMAND_FLAG` in the environment and then in .env, `LOGITD_FLAG` in the same two places,
    the default. So one .env can give two commands different values of a flag.

    command     name of the command
    groups      titles of the groups of flags, in the order of the help. Each key is the first
                field of a group. If a group is split into two parts, there is a key for each part
    flag_names  additional flags of fields, without dashes
    needs       fields that have an effect only with some values of earlier fields. Each has a test
                of the earlier values, and a message for users if the test fails
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        extra="ignore",  # several commands share one .env
        allow_inf_nan=False,
        frozen=True,
    )
    command: ClassVar[str]
    groups: ClassVar[Mapping[str, str]] = {}
    flag_names: ClassVar[Mapping[str, str]] = {}
    needs: ClassVar[Mapping[str, tuple[Callable[[Mapping[str, Any]], object], str]]] = {}

    @field_validator("*")
    @classmethod
    def _refuse_without_effect(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if name in cls.needs and value != cls.model_fields[name].default:
            acts, reason = cls.needs[name]
            if not acts(info.data):
                raise ValueError(reason)
        return value

    @classmethod
    def variables(cls, field: str) -> tuple[str, str]:
        """The two variables of a field: for this command only, and for all commands. The first
        takes precedence."""
        return f"{PREFIX}{cls.command}_{field}".upper(), f"{PREFIX}{field}".upper()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        assert isinstance(dotenv_settings, DotEnvSettingsSource)
        prefix = f"{PREFIX}{cls.command}_"
        own = EnvSettingsSource(settings_cls, env_prefix=prefix)
        own_in_file = DotEnvSettingsSource(
            settings_cls,
            env_file=dotenv_settings.env_file,
            env_prefix=prefix,
            dotenv_filtering="only_existing",
        )
        return init_settings, own, own_in_file, env_settings, dotenv_settings


def split_list(value: Any) -> Any:
    """Split a comma-separated flag or variable. An item in double quotes may contain commas. If the
    value is not a string, it is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        rows = list(csv.reader([value], skipinitialspace=True))
    except csv.Error:  # a text with a line break outside quotes is one item
        return [value]
    return [item.strip() for row in rows for item in row]


Item = TypeVar("Item")
CommaList = Annotated[tuple[Item, ...], NoDecode, BeforeValidator(split_list)]
"""Comma-separated items of a flag or a variable."""


def _one_checkpoint(given: Any) -> Any:
    """Refuse the models of a server: a variable may be meant for several commands."""
    if isinstance(given, str) and not os.path.exists(given):
        sources = [model_source(part) for part in listed(given) if part]
        if any(source.name is not None for source in sources):
            raise ValueError(
                f"{given!r} names models as `logitd serve` does, but this command needs one path: "
                "give it, and use LOGITD_SERVE_CHECKPOINT for the models of a server"
            )
    return given


CheckpointPath = Annotated[
    Path,
    BeforeValidator(_one_checkpoint),
    Field(description="directory of a checkpoint, or of a run, whose best checkpoint is used"),
]
Device = Annotated[str, Field(description="auto, cpu, cuda or cuda:N; auto uses CUDA if available")]
StoredDType = Annotated[
    DTypeName, Field(description="dtype of the stored weights; auto is the dtype of the source")
]
Threads = Annotated[
    int,
    Field(
        ge=0,
        le=1024,
        description="compute threads; 0 is one per available processor, which is also the maximum",
    ),
]
KVCacheCells = Annotated[
    KVCacheDType,
    Field(
        description="dtype of keys and values: int8 takes a quarter of float32's memory and "
        "reading time, and half of bfloat16's; auto is --dtype"
    ),
]
RunCode = Annotated[
    bool,
    Field(
        description="run a checkpoint's owner's code: with your permissions, in a process "
        "without network. Without this flag a checkpoint that needs such code is refused"
    ),
]
BatchCode = Annotated[
    bool,
    Field(
        description="let the owner's code compute several sequences in one batch, padded on the "
        "right: faster, but the last bits then depend on the batch"
    ),
]
Vocabulary = Annotated[
    str | None,
    Field(
        description="vocabulary instead of the source's: an encoding of tiktoken, such as "
        "gpt2 or cl100k_base; a file of ranks, a tokenizer.json, or a vocabulary as JSON or pickle "
        "(meta.pkl); "
        "bytes, printable or ascii; characters:TEXT, the sorted characters of a "
        "text, with ,first=N or ,last=N for N more ids before or after; "
        "words:FILE, a token per line or a JSON list; none, only token ids",
    ),
]
CodeCall = Annotated[
    str | None,
    Field(
        description="the call that returns logits, if it is not model(ids): an expression of "
        "model, ids, torch and names of the file, such as 'model(ids, mask=torch.ones_like(ids))'",
    ),
]
WITH_CODE = (
    lambda given: given.get("code"),
    "it says how the model's own code is used: add --code FILE.py:NAME",
)
"""The entry in `needs` for flags that have an effect only with --code."""
AsJson = Annotated[bool, Field(description="print JSON instead of tables")]


class ComputeSettings(CommandSettings):
    """Settings of a command that computes with a checkpoint (`ComputeOptions`)."""

    device: Device = "auto"
    dtype: DTypeName = Field(
        "auto",
        description="dtype of the computation; auto is bfloat16 on CUDA, and for native "
        "decoding on a CPU with bfloat16 products; otherwise float32",
    )
    threads: Threads = 0
    kernels: KernelChoice = Field(
        "auto",
        description="implementation of decode steps on a CPU: native is built for this "
        "processor, torch needs no compiler; auto is native if available",
    )
    kernel_target: KernelTarget = Field(
        "auto",
        description="kind of processor to build the native kernels for, including those for "
        "prompts: an older kind than this processor's computes the same bits on "
        "all processors of that kind or newer; auto is the best kind that this "
        "processor has",
    )
    quantize: Quantization = Field(
        "none",
        description="quantize the matrices while loading: int8 to 8 bits, int4 to 4 bits "
        "except the head",
    )
    run_code: RunCode = False
