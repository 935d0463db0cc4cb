"""API keys: decides which requests are accepted.

Each key has a name, shown in the log and the metrics. Keys come from a setting, a file, or both.
Only the SHA-256 of a key is kept. No message, log line or metric contains a key, or anything that a
client sent as a key. `key_limits.py` counts the requests of each key.
"""

import hmac
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from pydantic import SecretStr
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from logitd.model.files import read_text
from logitd.service.access.held import held
from logitd.service.access.key_limits import KeyLimit, KeyLimits
from logitd.service.errors import LIMIT, ApiError

logger = logging.getLogger("logitd")

NO_KEY = "none"
"""Name of callers without a valid key; no key may have this name."""
CALLER = "logitd.caller"
"""ASGI scope key for the name of the request's API key; absent if the server has no keys."""

ADMIN = "/admin"
"""Paths below this one need the administrator's key instead of an API key."""
COMPUTED = ("/features/", "/weights")
"""Prefixes of the paths whose GET requests need computation: the logits of a feature, the matrices
of a head, and their names at a step of the history, which is loaded."""
MIN_KEY_LENGTH = 8
SAFE_KEY_LENGTH = 16
"""Keys with fewer characters than this are accepted with a warning."""
KEY_FILE_BYTES = 2**20
"""Maximum size of a key file in bytes, enough for ten thousand keys. The limit is small because the
file may be read while requests are answered."""
MAX_LIMIT = 1_000_000
_ENTRY = re.compile(r"(.*?=.*?|[^=]*)((?:\s+[\w-]+=\S*)*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # characters that a header can hold without quotes or encodings


class ApiKeyError(ValueError):
    """Raised if API keys cannot be used. The message gives the name or place of the key and the
    reason, never the key itself."""


@dataclass(frozen=True)
class ApiKeys:
    """The accepted keys: the SHA-256 of each key, and the limits of keys that do not use the
    default limits, both by key name. If there are no keys, requests need none."""

    digests: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    limits: Mapping[str, KeyLimit] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.digests)

    def name_of(self, presented: bytes) -> str | None:
        """The name of a key; None if it is unknown. All digests are compared completely, so every
        key takes the same time."""
        digest, match = sha256(presented).digest(), None
        for name, known in self.digests.items():
            if hmac.compare_digest(digest, known):
                match = name
        return match


class KeyRing:
    """The accepted keys. They can be read again while the server runs."""

    def __init__(self, keys: ApiKeys, limit: KeyLimit) -> None:
        """`limit` applies to keys that have no limit of their own."""
        self.keys = keys
        self.limits = KeyLimits(limit, keys.limits)

    @property
    def names(self) -> tuple[str, ...]:
        return self.keys.names

    def replace(self, keys: ApiKeys) -> None:
        """Accept only these keys from now on. Raises ApiKeyError if the server had no keys before
        (the new keys would lock everyone out), or if `keys` is empty (this would let everyone
        in)."""
        if bool(keys.names) != bool(self.names):
            raise ApiKeyError("a running server cannot start or stop requiring API keys")
        self.keys = keys
        self.limits.replace(keys.limits)


class ApiKeyCheck:
    """ASGI middleware that rejects requests above the limits of their key and, except on public
    paths, requests without a valid key.

    The check takes place before the body is read, and on the same path that the router uses. The
    key must be in the header `Authorization: Bearer KEY`.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, public: Collection[str]) -> None:
        self._app = app
        self._ring = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        presented = bearer_token(scope["headers"])
        name = None if presented is None else self._ring.keys.name_of(presented)
        scope[CALLER] = name or NO_KEY
        if name is None and not is_public(scope["path"], self._public):
            await _unauthorized(presented is not None)(scope, receive, send)
        elif name is None or not counts(scope["method"], scope["path"]):
            await self._app(scope, receive, send)
        else:
            await self._limited(name, scope, receive, send)

    async def _limited(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            held(scope).enter_context(self._ring.limits.request(name))
        except ApiError as error:
            scope.setdefault("state", {})[LIMIT] = error.limit
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def counts(method: str, path: str) -> bool:
    """True if a request needs computation, and therefore counts toward the limits of its key."""
    return method == "POST" or (method in ("GET", "HEAD") and path.startswith(COMPUTED))


def is_public(path: str, public: Collection[str]) -> bool:
    """True if a path needs no API key. The public paths are /health, /admin (which has its own
    key), the paths in `public`, and all paths below these. If / is in `public`, only / itself is
    public, not the paths below it."""
    return any(
        path == prefix or (prefix != "/" and path.startswith(f"{prefix}/"))
        for prefix in ("/health", ADMIN, *public)
    )


def read_api_keys(listed: SecretStr | None, file: Path | None) -> ApiKeys:
    """The keys in the settings `api_keys` and `api_key_file`. Logs a warning for each short key.
    Raises ApiKeyError if a key cannot be used."""
    places: dict[str, str] = {}  # place by name or digest
    digests: dict[str, bytes] = {}
    limits: dict[str, KeyLimit] = {}
    for place, entry in [*_listed(listed), *_in_file(file)]:
        match = _ENTRY.fullmatch(entry)
        assert match is not None
        name, key = _name_and_key(place, match[1])
        if match[2]:
            limits[name] = _limit(place, match[2])
        digest = sha256(key.encode()).digest()
        for part, seen in (("name", f"name {name}"), ("key", f"key {digest.hex()}")):
            if (before := places.setdefault(seen, place)) != place:
                raise ApiKeyError(
                    f"{place} has the same {part} as {before}: give each entry its own {part}"
                )
        digests[name] = digest
    return ApiKeys(MappingProxyType(digests), MappingProxyType(limits))


def _listed(listed: SecretStr | None) -> Iterator[tuple[str, str]]:
    """The entries in the setting `api_keys`, each as a pair: its location in words, for messages,
    and its text."""
    if listed is not None:
        for number, entry in enumerate(listed.get_secret_value().split(","), start=1):
            yield f"entry {number} of the API keys", entry.strip()


def _in_file(file: Path | None) -> list[tuple[str, str]]:
    """The entries in the key file, each as a pair: its location in words, for messages, and its
    text."""
    if file is None:
        return []
    try:
        lines = read_text(file, KEY_FILE_BYTES).splitlines()
    except OSError as error:
        raise ApiKeyError(f"the API key file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ApiKeyError(f"the API key file {file} is not UTF-8 text") from error
    entries = [
        (f"line {number} of the API key file {file}", line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not entries:
        raise ApiKeyError(f"the API key file {file} has no keys; write one NAME=KEY on each line")
    return entries


def _limit(place: str, words: str) -> KeyLimit:
    """Parse limits such as `per-minute=60 at-once=4`. A limit that is left out becomes None, which
    means the default."""
    given: dict[str, int] = {}
    for word in words.split():
        name, _, number = word.partition("=")
        if name not in ("per-minute", "at-once"):  # do not repeat it: it may be part of a key
            raise ApiKeyError(
                f"{place} has an unknown limit; the limits are per-minute=N and at-once=N"
            )
        if name in given or not (number.isascii() and number.isdigit()) or int(number) > MAX_LIMIT:
            raise ApiKeyError(
                f"{place} has {word!r}; write per-minute=N and at-once=N at most once each, with "
                f"N from 0 (unlimited) to {MAX_LIMIT}"
            )
        given[name] = int(number)
    return KeyLimit(given.get("per-minute"), given.get("at-once"))


def _name_and_key(place: str, entry: str) -> tuple[str, str]:
    """Split an entry NAME=KEY. Error messages repeat neither part, because either part of a
    malformed entry may be a key."""
    name, separator, key = (part.strip() for part in entry.partition("="))
    if not separator:
        raise ApiKeyError(f"{place} is not of the form NAME=KEY")
    if not _NAME.fullmatch(name) or name == NO_KEY:
        raise ApiKeyError(
            f"{place} has a name that cannot be used; a name has 1 to 64 of the characters "
            f"A-Z, a-z, 0-9, '.', '_' and '-', and is not {NO_KEY!r}"
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ApiKeyError(
            f"{place} has a key of {len(key)} characters; at least {MIN_KEY_LENGTH} are needed. "
            "`openssl rand -hex 24` makes a good one"
        )
    if not _KEY.fullmatch(key):
        raise ApiKeyError(
            f"{place} has a key that a header cannot hold; a key consists of ASCII letters, "
            "digits and symbols, without spaces"
        )
    if len(key) < SAFE_KEY_LENGTH:
        logger.warning(
            "%s has a key of %d characters, which may be guessed; use at least %d: "
            "`openssl rand -hex 24` makes a good one", place, len(key), SAFE_KEY_LENGTH,
        )  # fmt: skip
    return name, key


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key in a request's headers; None if there is none, or more than one."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    return token if scheme.lower() == b"bearer" and token else None


def _unauthorized(presented: bool) -> Response:
    message = (
        "the API key is not one of this server's keys"
        if presented
        else "an API key is required: send the header 'Authorization: Bearer KEY'"
    )
    error = ApiError(401, "authentication_error", message, None, "invalid_api_key")
    response = error.response()
    response.headers["WWW-Authenticate"] = "Bearer"
    return response
