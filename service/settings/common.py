"""What the settings of several commands share: where values come from, and flags of one meaning."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    DotEnvSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from logitd.model.dtypes import DTypeName
from logitd.model.inference.options import KernelChoice, KernelTarget, KVCacheDType, Quantization

PREFIX = "LOGITD_"
"""Of the variables that every command reads."""

BUNDLED_CHECKPOINT = Path(__file__).parents[3] / "checkpoints" / "python-small"


def settings_of(command: str, shorter: Mapping[str, str] | None = None) -> SettingsConfigDict:
    """How a command's settings are read; `shorter` are second names of flags, which no field of
    Python can have."""
    return SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=".env",
        extra="ignore",  # .env serves several commands
        cli_prog_name=f"logitd {command}",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_show_env_vars=True,
        allow_inf_nan=False,
        frozen=True,
        cli_shortcuts=shorter or {},
    )


def own_prefix(command: str) -> str:
    """Of the variables that one command alone reads, and reads before those of all."""
    return f"{PREFIX}{command}_".upper()


class CommandSettings(BaseSettings):
    """Where the settings of a command come from, the first that has a value first: its flags,
    `LOGITD_COMMAND_FLAG` in the environment and in .env, `LOGITD_FLAG` in both, the default.

    So one .env can give two commands different values of what both have.
    """

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
        prefix = own_prefix(str(settings_cls.model_config["cli_prog_name"]).split()[-1])
        own = EnvSettingsSource(settings_cls, env_prefix=prefix)
        own_in_file = DotEnvSettingsSource(
            settings_cls,
            env_file=dotenv_settings.env_file,
            env_prefix=prefix,
            dotenv_filtering="only_existing",
        )
        return init_settings, own, own_in_file, env_settings, dotenv_settings


def split_list(value: Any) -> Any:
    """A list as people write it in a flag or a variable: its items with commas between them."""
    if not isinstance(value, str):
        return value
    return [item.strip() for item in value.split(",")] if value.strip() else []


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

CheckpointPath = Annotated[
    Path, Field(description="checkpoint directory: one that `logitd train` or `import` wrote")
]
Device = Annotated[
    str, Field(description="auto, cpu, cuda or cuda:N; auto is CUDA if there is one")
]
DType = Annotated[
    DTypeName,
    Field(
        description="dtype of the computation; auto is bfloat16 on CUDA, and on a CPU that "
        "multiplies it where decoding is native, else float32"
    ),
]
StoredDType = Annotated[
    DTypeName, Field(description="dtype of the stored weights; auto is that of the source")
]
Kernels = Annotated[
    KernelChoice,
    Field(
        description="how decode steps are computed on a CPU: native is built for this processor, "
        "torch needs no compiler; auto is native where it is available"
    ),
]
Target = Annotated[
    KernelTarget,
    Field(
        description="kind of processor whose native kernels compute, prompts included: a lower one "
        "than this gives the bits that it gives on every processor; auto is the best one here"
    ),
]
Quantize = Annotated[
    Quantization,
    Field(
        description="int8 quantizes the matrices to 8 bits when loading, int4 to 4 but for the head"
    ),
]
KVCacheCells = Annotated[
    KVCacheDType,
    Field(
        description="what keys and values are kept in: int8 rounds them to 8 bits, which takes a "
        "quarter of float32's memory and time to read, half of bfloat16's; auto is --dtype"
    ),
]
Threads = Annotated[
    int,
    Field(
        ge=0,
        le=1024,
        description="compute threads; 0 is one per available processor, which is the most",
    ),
]
AsJson = Annotated[bool, Field(description="print JSON instead of tables")]
