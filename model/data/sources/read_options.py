"""ReadOptions: options for reading documents from files, and the command-line flags that set them
in commands that read texts."""

from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import Field

TextField = Annotated[
    str,
    Field(
        description="field of JSON, CSV and Parquet that contains the text; '' reads all files as "
        "plain text"
    ),
]
SplitAt = Annotated[
    str | None,
    Field(
        min_length=1,
        description="separator of the documents in a file, for example '<|endoftext|>'",
    ),
]
MaxDownload = Annotated[
    int, Field(ge=1, description="size limit of a downloaded file, in millions of bytes")
]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    text_field: TextField = "text"
    split_at: SplitAt = None
    max_download_mb: MaxDownload = 1000

    @classmethod
    def of(cls, settings: object) -> "ReadOptions":
        """The options, copied from the attributes of `settings` with the same names."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


AS_USUAL = ReadOptions()
