"""Download: a text at a web address, fetched once and cached.

A file is kept in the cache folder ($XDG_CACHE_HOME or ~/.cache, then logitd/texts) under the
SHA-256 of its URL; delete it to fetch it again. It is written under a temporary name and renamed
when it is complete. Does not log in, resume or look at the contents.
"""

import hashlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from logitd.model.data.sources.document import TextError
from logitd.model.data.sources.progress import Downloaded, Downloading, Report
from logitd.model.files import whole_file

MB = 1_000_000
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
"""Seconds without a byte, and to connect."""
REPORT_EVERY = 2.0
"""Seconds between two progress reports."""


@dataclass(frozen=True)
class Download:
    """A text in the cache."""

    url: str
    path: Path
    sha256: str
    size: int  # bytes

    def record(self) -> dict[str, Any]:
        """The download as a checkpoint records it."""
        return {"url": self.url, "sha256": self.sha256, "bytes": self.size}


def is_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def download(url: str, *, max_mb: int, report: Report) -> Download:
    """Return the text at an address, from the cache or else from its server. Raises TextError if it
    cannot be fetched or is larger than `max_mb` million bytes; then nothing is kept."""
    address = _checked(url)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", address.path.rpartition("/")[2])[-60:]  # has the suffix
    path = cache_folder() / f"{hashlib.sha256(str(address).encode()).hexdigest()[:32]}-{name}"
    if not (cached := path.is_file()):
        _fetch(address, path, max_mb * MB, report)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    fetched = Download(url, path, sha256, path.stat().st_size)
    report(Downloaded(url, fetched.size, path, from_cache=cached))
    return fetched


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "logitd" / "texts"


def _checked(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise TextError(f"{url} is not an address: {error}") from error
    if not address.host:
        raise TextError(f"{url} is not an address: it does not name a server")
    if address.userinfo:
        raise TextError(
            f"the address of a text on {address.host} contains a user name or a password, which "
            "the checkpoint's card would show: fetch the file yourself and name it with --data"
        )
    return address


def _fetch(address: httpx.URL, path: Path, limit: int, report: Report) -> None:
    """Write the server's reply of at most `limit` bytes to `path`, or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            _stream(address, file, limit, report)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TextError(
            f"{address} cannot be downloaded ({type(error).__name__}: {error}); nothing was kept. "
            "Try again, or fetch the file yourself and name it with --data"
        ) from error
    except OSError as error:
        raise TextError(
            f"{address} cannot be kept in {cache_folder()}: {error.strerror or error}; set "
            "XDG_CACHE_HOME to another folder"
        ) from error


def _stream(address: httpx.URL, file: IO[bytes], limit: int, report: Report) -> None:
    headers = {"accept-encoding": "identity"}  # so that lengths are those of the file
    client = httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers)
    with client, client.stream("GET", address) as reply:
        if reply.status_code != 200:
            raise TextError(f"{reply.url} answers {reply.status_code} {reply.reason_phrase}")
        length = reply.headers.get("content-length", "")
        plain = length.isdecimal() and "content-encoding" not in reply.headers
        total = int(length) if plain else None
        done, reported = 0, time.monotonic()
        for block in reply.iter_bytes():
            done += len(block)
            if max(done, total or 0) > limit:
                raise TextError(
                    f"{address} has {f'{total:,}' if total else f'more than {limit:,}'} bytes, "
                    f"above the limit of {limit // MB:,} MB: raise it with --max-download-mb"
                )
            file.write(block)
            if time.monotonic() - reported >= REPORT_EVERY:
                report(Downloading(str(address), done, total))
                reported = time.monotonic()
