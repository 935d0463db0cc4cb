"""API keys: who may ask.

Every key has a name, by which the log and the metrics know its callers. Keys come from a setting, a
file, or both. Of a key only its SHA-256 is kept here, and no message, log line or metric holds a
key, nor what a client sent for one. How much a key may ask for is counted in `key_limits.py`. Does
not cover how callers share the server (`callers.py`).
"""

import hmac
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType

from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from logitd.model.files import read_text
from logitd.service.access.key_limits import KeyLimit, KeyLimits
from logitd.service.errors import LIMIT, ApiError

NO_KEY = "none"
"""The name of callers without a key of ours, so that no key may have it."""
CALLER = "logitd.caller"
"""Where a request's scope holds the name of its key; absent where no keys are asked for."""

ADMIN = "/admin"
"""What is below asks for the administrator's key and no other."""
MIN_KEY_LENGTH = 8
KEY_FILE_BYTES = 2**20
"""Of a file of keys, which may be read while requests are answered: ten thousand keys."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMIT = re.compile(r"(per-minute|at-once)=")
MAX_LIMIT = 1_000_000
_KEY = re.compile(r"[!-~]+")  # what a header can hold without quotes or encodings


class ApiKeyError(ValueError):
    """Keys that cannot be used. The message says which and why, and tells none of them."""


@dataclass(frozen=True)
class ApiKeys:
    """The keys that are accepted, as name -> SHA-256. None at all: no key is asked for."""

    digests: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    limits: Mapping[str, KeyLimit] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    """Of the keys that have limits of their own."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.digests)

    def name_of(self, presented: bytes) -> str | None:
        """The name of a key, None if it is not one of these. Takes as long for any other key: every
        digest is compared to its end."""
        digest, match = sha256(presented).digest(), None
        for name, known in self.digests.items():
            if hmac.compare_digest(digest, known):
                match = name
        return match


class KeyRing:
    """The keys that are accepted now: a file of them may be read again while the server runs."""

    def __init__(self, keys: ApiKeys, limit: KeyLimit) -> None:
        """`limit` is that of a key without one of its own."""
        self._keys = keys
        self.limits = KeyLimits(limit, keys.limits)

    @property
    def names(self) -> tuple[str, ...]:
        return self._keys.names

    def name_of(self, presented: bytes) -> str | None:
        """The name of a key, None if it is not one of those that are accepted now."""
        return self._keys.name_of(presented)

    def replace(self, keys: ApiKeys) -> None:
        """Accept these from now on. Raises ApiKeyError where that would let everybody in, or ask
        for a key where nobody had one: either takes another server."""
        if bool(keys.names) != bool(self._keys.names):
            raise ApiKeyError("whether keys are asked for at all is settled when the server starts")
        self._keys = keys
        self.limits.replace(keys.limits)


class ApiKeyCheck:
    """Pure ASGI: lets a request with a key through, within what the key may ask for; another one
    to public paths alone.

    Decides before the body is read, and by the path that is routed. `Authorization: Bearer KEY` is
    the one place where a key is looked for.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, public: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        presented = bearer_token(scope["headers"])
        name = None if presented is None else self._keys.name_of(presented)
        scope[CALLER] = name or NO_KEY
        if name is None and not is_public(scope["path"], self._public):
            await _unauthorized(presented is not None)(scope, receive, send)
        elif name is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            await self._limited(name, scope, receive, send)

    async def _limited(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(self._keys.limits.request(name))
            except ApiError as error:
                scope.setdefault("state", {})[LIMIT] = error.limit
                await error.response()(scope, receive, send)
            else:
                await self._app(scope, receive, send)


def is_public(path: str, public: Collection[str]) -> bool:
    """True if a path answers without an API key: /health, what has a key of its own, and each of
    `public`, with what is below it except for /."""
    return any(
        path == prefix or (prefix != "/" and path.startswith(f"{prefix}/"))
        for prefix in ("/health", ADMIN, *public)
    )


def read_api_keys(listed: SecretStr | None, file: Path | None) -> ApiKeys:
    """The keys of the settings `api_keys` and `api_key_file`; ApiKeyError if one cannot be used."""
    entries = [*_listed(listed), *_in_file(file)]
    places: dict[str, str] = {}  # where a name or a digest was seen
    digests: dict[str, bytes] = {}
    limits: dict[str, KeyLimit] = {}
    for place, entry in entries:
        named, *words = _split(entry)
        name, key = _name_and_key(place, named)
        if words:
            limits[name] = _limit(place, words)
        digest = sha256(key.encode()).digest()
        for what, seen in (("name", f"name {name}"), ("key", f"key {digest.hex()}")):
            if (before := places.setdefault(seen, place)) != place:
                raise ApiKeyError(f"{place} has the same {what} as {before}; each needs its own")
        digests[name] = digest
    return ApiKeys(MappingProxyType(digests), MappingProxyType(limits))


def _listed(listed: SecretStr | None) -> Iterator[tuple[str, str]]:
    """Entries of the setting, each with a way to speak of it."""
    if listed is not None:
        for number, entry in enumerate(listed.get_secret_value().split(","), start=1):
            yield f"entry {number} of the API keys", entry.strip()


def _in_file(file: Path | None) -> list[tuple[str, str]]:
    """The same of the lines of a file."""
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


def _split(entry: str) -> list[str]:
    """NAME=KEY, and the limits that follow it."""
    words = entry.split()
    count = sum(1 for _ in takewhile(_LIMIT.match, reversed(words)))
    return [" ".join(words[: len(words) - count]), *words[len(words) - count :]]


def _limit(place: str, words: Sequence[str]) -> KeyLimit:
    """What `per-minute=60 at-once=4` says; what is not said is as for other keys."""
    given: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name in given or not (number.isascii() and number.isdigit()) or int(number) > MAX_LIMIT:
            raise ApiKeyError(
                f"{place} has {word!r}; write per-minute=N and at-once=N once each, N being a "
                f"number up to {MAX_LIMIT}, 0 for as many as it likes"
            )
        given[name] = int(number)
    return KeyLimit(given.get("per-minute"), given.get("at-once"))


def _name_and_key(place: str, entry: str) -> tuple[str, str]:
    """The two halves of an entry. What is wrong may itself be a key, so no half is repeated."""
    name, separator, key = (part.strip() for part in entry.partition("="))
    if not separator:
        raise ApiKeyError(f"{place} is not of the form NAME=KEY")
    if not _NAME.fullmatch(name) or name == NO_KEY:
        raise ApiKeyError(
            f"{place} has a name that cannot be used; a name is 1 to 64 of the characters A-Z, "
            f"a-z, 0-9, '.', '_' and '-', and not {NO_KEY!r}"
        )
    if len(key) < MIN_KEY_LENGTH:
        raise ApiKeyError(
            f"{place} has a key of {len(key)} characters, at least {MIN_KEY_LENGTH} are needed; "
            "`openssl rand -hex 24` makes a good one"
        )
    if not _KEY.fullmatch(key):
        raise ApiKeyError(
            f"{place} has a key that a header cannot hold; a key is of ASCII letters, digits and "
            "signs, without blanks"
        )
    return name, key


def bearer_token(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """What stands for a key in a request's headers; None where nothing does, or several things."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    token = token.strip()
    return token if scheme.lower() == b"bearer" and token else None


def _unauthorized(presented: bool) -> Response:
    message = (
        "the API key is not one of this server's"
        if presented
        else "an API key is needed here: send the header 'Authorization: Bearer KEY'"
    )
    error = ApiError(401, "authentication_error", message, None, "invalid_api_key")
    response = error.response()
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def note_user(request: Request, user: str | None) -> None:
    """Let the request's line in the log say on whose behalf it came."""
    if user:
        request.state.user = user
