"""Constraints: limit the next token ids to those with which the text can still match a pattern.

The compiler turns a regular expression, a JSON Schema, a list of choices or a grammar into a
`Constraint`. Each sequence has its own `Matcher`, which computes a mask over the vocabulary before
each sample and advances by the sampled token. Matchers share no mutable state, so a mask depends
only on the tokens of its sequence. The masks come from llguidance, which gets the checkpoint's
vocabulary and split pattern. It is an optional dependency that only this module imports. Other
modules apply masks (`model/inference/sampling/sampler.py`), protect the server from sources that
are too expensive to compile (`model/inference/constraints/sandbox.py`) and cache compiled
constraints (`service/models/constraints.py`).

The four kinds:

regex        the whole text matches, in the syntax of Rust's `regex` crate
json_schema  the text is one JSON value that the schema allows (`json_schema.py`), on one line as
             Python's `json.dumps` writes it, with properties in the order of the schema; names of
             additional properties may repeat; sizes are bounded, so that the text ends
             (`json_bounds.py`)
choice       the text is one of a list
grammar      the text is a sentence of a context-free grammar, in llguidance's dialect of Lark

If a grammar allows only one continuation, the model must generate exactly the tokens into which the
tokenizer encodes it. If the vocabulary lacks tokens for single bytes (its tokens are characters or
words), any tokens that spell the text are allowed.

A constraint applies to text, so special tokens never match it. If the text is complete but could
also continue, the end-of-text token is allowed too. If it cannot continue, the sequence ends
without that token. llguidance gets its own end token, one id beyond the vocabulary, so vocabularies
with and without an end-of-text token need no separate code. Without an end-of-text token, a text
that could continue always continues.
"""

import json
import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from logitd.model.inference.constraints.heap import Heap
from logitd.model.inference.constraints.json_bounds import bounded
from logitd.model.inference.constraints.json_schema import check_combinations, enforceable
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import Tokenizer

Kind = Literal["regex", "json_schema", "choice", "grammar"]

LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 5_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 5_000,
    "max_grammar_size": 10_000,
    "verbose_errors": False,
}
"""Limits set for llguidance: the lexer's initial work, the work of lexer and parser for one mask
(about 8 ms each), and the states that the lexer of one sequence keeps (about 1 KiB each).

The parser compares each new item with all items of its row, and a mask may have all of its items in
one row. So the time of a mask can grow with the square of `step_max_items`."""

JSON_LAYOUT: Mapping[str, str | bool] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
"""The layout is fixed, because a small model may generate endless whitespace. Each character has a
fixed spelling, because a property `a` written as a Unicode escape would count as a different
property."""

WITHOUT_EFFECT = ("capture", "stop", "stop_capture", "temperature")
"""Rule attributes of llguidance's grammars that have no effect here, or a misleading effect."""

LOCATION = re.compile(r"at \d+\(\d+\): ")
"""Matches the line and column at the start of a compiler's message."""

QUICK_SECONDS = 0.002
"""Longest processor time of work on a constraint, such as compiling it, that is done between two
steps of the engine. It decides when the end of a text is noticed, never which text it is."""

MASK_CACHE_SIZE = 256
"""Number of unpacked masks to cache. While a string is generated, most masks are equal."""

NOTHING_FOLLOWS = "no text matches from here on"


class ConstraintsUnavailable(Exception):
    """Raised if constraints cannot be compiled for this model or in this installation; the message
    has the reason and the fix."""


@dataclass(frozen=True, slots=True)
class Source:
    """A client's constraint. `text` holds the expression, the grammar, or the schema or list of
    choices as JSON."""

    kind: Kind
    text: str


class Compiler:
    """Compiles constraints for one vocabulary. Thread-safe.

    Raises ConstraintsUnavailable if llguidance is missing or cannot read the vocabulary, or if the
    model has no vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_text:
            raise ConstraintsUnavailable(
                "a constraint needs text, and this model has no vocabulary: use "
                "allowed_token_ids to limit the ids"
            )
        try:
            import llguidance
        except ImportError as error:
            raise ConstraintsUnavailable(
                "constraints (regex, json_schema, choice, grammar) need llguidance, which is not "
                "installed: pip install llguidance, or the extra `constrain`"
            ) from error
        self.heap = Heap()
        self._llguidance = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)
        # For lookahead llguidance encodes text, which needs all 256 bytes in the vocabulary.
        self._looks_ahead = all(bytes([byte]) in tokenizer.tokens for byte in range(256))
        self.vocab_size = tokenizer.vocab_size
        self.ends = tokenizer.ends
        added = {text.encode(): i for text, i in tokenizer.added_tokens.items()}
        tokens = tokenizer.tokens | added  # for equal texts, the id that encoding returns
        try:
            self._vocabulary = llguidance.LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
                encoder=tokens,
                special_tokens={},
                pattern=tokenizer.pattern,
                eos_token=self.vocab_size,
                n_vocab=self.vocab_size + 1,
            )
        except ValueError as error:
            raise ConstraintsUnavailable(
                f"constraints cannot be compiled for this vocabulary: {error}"
            ) from error
        self._seen: dict[bytes, tuple[np.ndarray, bool]] = {}
        self._thread = ThreadPoolExecutor(1, "matcher")
        self._thread_is_busy = threading.Lock()
        # Ids without text: special tokens, and the gaps in published encodings.
        self._no_text = np.ones(self.vocab_size, dtype=np.bool_)
        self._no_text[list(tokens.values())] = False

    def compile(self, source: Source) -> "Constraint":
        """Compile a source. Raises ConstraintError with the compiler's message if it is invalid or
        too large."""
        grammar = _grammar(source, looks_ahead=self._looks_ahead)
        began = time.thread_time()
        matcher = self.matcher(source, grammar)
        seconds = time.thread_time() - began
        allowed, complete = self.look(matcher)
        if complete:
            raise ConstraintError(
                "the constraint matches only the empty text, so there is nothing to generate"
            )
        return Constraint(source, self, grammar, allowed, seconds)

    def matcher(self, source: Source, grammar: str) -> Any:
        """A new llguidance matcher, before the first token. It is not a copy of another matcher,
        because copies share a lexer, so the state and cost of one copy would depend on the
        others."""
        matcher = self._llguidance.LLMatcher(
            self._vocabulary, grammar, log_level=0, limits=self._limits
        )
        if matcher.is_error():
            words = _readable(matcher.get_error())
            # A client did not write the grammar around an expression or choices: drop locations.
            raise ConstraintError(words if source.kind == "grammar" else LOCATION.sub("", words))
        return matcher

    def begin(self, source: Source, grammar: str) -> "Future[Any] | None":
        """Begin to compile a matcher in another thread; None if one is being compiled there."""
        if not self._thread_is_busy.acquire(blocking=False):
            return None
        compiling = self._thread.submit(self.matcher, source, grammar)
        compiling.add_done_callback(lambda _: self._thread_is_busy.release())
        return compiling

    def look(self, matcher: Any) -> tuple[np.ndarray, bool]:
        """The mask of an llguidance matcher (read-only booleans over the vocabulary), and whether
        only the end of the text may follow. Raises ConstraintError if nothing may follow, not even
        the end."""
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise ConstraintError(_readable(matcher.get_error()))
        mask = self._seen.get(bits)  # another thread may clear the cache
        if mask is None:
            if len(self._seen) >= MASK_CACHE_SIZE:
                self._seen.clear()
            mask = self._seen[bits] = self._unpacked(bits)
        return mask

    def _unpacked(self, bits: bytes) -> tuple[np.ndarray, bool]:
        mask = np.unpackbits(
            np.frombuffer(bits, np.uint8), count=self.vocab_size + 1, bitorder="little"
        ).view(np.bool_)
        allowed, ends = mask[: self.vocab_size], bool(mask[self.vocab_size])
        allowed[self._no_text] = False
        goes_on = bool(allowed.any())
        if not goes_on and not ends:
            raise ConstraintError(NOTHING_FOLLOWS)
        allowed[list(self.ends)] = ends
        allowed.flags.writeable = False
        return allowed, not goes_on


class Constraint:
    """A compiled constraint, shared by sequences. Implements the engine's `TokenConstraint`."""

    def __init__(
        self, source: Source, compiler: Compiler, grammar: str, allowed: np.ndarray, seconds: float
    ) -> None:
        self.source = source
        self.compiler = compiler
        self.allowed = allowed  # the first mask
        self.is_quick = seconds <= QUICK_SECONDS  # compile time, for use between two steps
        self._grammar = grammar

    @property
    def kind(self) -> Kind:
        return self.source.kind

    @property
    def vocab_size(self) -> int:
        return self.compiler.vocab_size

    def matcher(self) -> "Matcher":
        return Matcher(self)

    def start(self) -> Any:
        """A new llguidance matcher."""
        return self.compiler.matcher(self.source, self._grammar)

    def begin(self) -> "Future[Any] | None":
        """Begin to compile a new llguidance matcher; None if another one is being compiled."""
        return self.compiler.begin(self.source, self._grammar)


class Matcher:
    """The progress of one sequence. Implements the engine's `TokenMatcher`."""

    def __init__(self, constraint: Constraint) -> None:
        self.complete = False
        self._constraint, self._heap = constraint, constraint.compiler.heap
        self._look, self._ends = constraint.compiler.look, constraint.compiler.ends
        self._state: Any = None  # of llguidance; None before the first token
        self._start: Future[Any] | None = None  # compiles it
        self._allowed: np.ndarray | None = constraint.allowed  # None: not computed yet
        self._ahead: list[int] = []  # tokens that `_state` has not consumed
        self._slow = False  # the last mask took more than QUICK_SECONDS

    def prepare(self) -> bool:
        """True if the first token takes little time."""
        if self._constraint.is_quick or self._state is not None:
            return True
        self._start = self._start or self._constraint.begin()
        return self._start is not None and self._start.done()

    def allowed(self) -> np.ndarray:
        """Mask of the next token (V,), computed once after each token. If the text is complete and
        cannot continue, the mask is all false and `complete` is set. Raises ConstraintError if an
        incomplete text cannot continue."""
        if self._allowed is None:
            began = time.thread_time()
            self._catch_up()
            self._allowed, self.complete = self._look(self._state)
            self._slow = time.thread_time() - began > QUICK_SECONDS
        return self._allowed

    def advance(self, token_id: int) -> None:
        """Append an allowed token. Raises ConstraintError for any other token, now or with the next
        mask."""
        if token_id in self._ends:
            self.complete = True
            return
        self._allowed = None
        self._ahead.append(token_id)
        if self._slow:
            return  # do it with the next mask: the engine limits the time of masks
        self._catch_up()
        if self._state.is_stopped():  # the text is complete, or cannot continue
            self.allowed()

    def _catch_up(self) -> None:
        """Start, and consume the tokens that were appended."""
        if self._state is None:
            self._heap.begin()
            self._state = self._start.result() if self._start else self._constraint.start()
            self._start = None
        ahead, self._ahead = self._ahead, []
        for token_id in ahead:
            if not self._state.consume_token(token_id):
                raise ConstraintError(_readable(self._state.get_error()))

    def __del__(self) -> None:
        if self._state is not None:
            self._state = None
            self._heap.end()


def _grammar(source: Source, *, looks_ahead: bool) -> str:
    """The grammar for llguidance. With `looks_ahead`, llguidance encodes text that is the only
    possible continuation, instead of allowing all tokens that spell it. Raises ConstraintError for
    parts that llguidance would accept but not enforce."""
    match source.kind:
        case "regex":
            lark = f"start: /{_quoted(source.text)}/"
        case "choice":
            texts = map(json.dumps, json.loads(source.text))
            lark = f"start: CHOICE\nCHOICE: {' | '.join(texts)}"
        case "grammar":
            _check_lark(source.text)
            lark = source.text
        case "json_schema":
            schema = bounded(enforceable(json.loads(source.text)))
            check_combinations(schema)
            schema["x-guidance"] = JSON_LAYOUT
            if looks_ahead:
                return json.dumps({"grammars": [{"json_schema": schema}]})
            lark = f"start: %json {json.dumps(schema)}"
    if not looks_ahead:  # at the end, to keep line numbers
        lark += '\n%llguidance {"no_forcing": true}'
    # Wrapped in JSON, because llguidance would parse a grammar that begins like JSON as JSON.
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _quoted(expression: str) -> str:
    """Escape a regular expression for use between slashes. White space stays as it is, because it
    separates and ends comments in verbose mode. A backslash before a line break or the end would
    change the meaning of what follows. It is valid only in a comment, so it becomes an escape that
    is invalid outside of comments."""
    plain = {"/": r"\/", "\\": r"\y"}
    return re.sub(r"\\[^\n]|[\\/]", lambda match: plain.get(match[0], match[0]), expression)


def _check_lark(text: str) -> None:
    # Shorten strings and expressions to one character, and remove comments.
    parts = re.compile(r'//.*|#.*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/')
    bare = parts.sub(lambda part: "" if part[0].startswith(("//", "#")) else part[0][0], text)
    if "%json" in bare:
        raise ConstraintError("%json is not supported in a grammar: use the field json_schema")
    if named := re.search(r"<[^>\n]*>", bare):
        raise ConstraintError(f"the token {named[0][:40]} cannot be part of a text")
    if re.search(r"~(?!\s*\d|\s*(?:[\"/]\w*|[\w-]+)\s*&\s*/)", bare):
        raise ConstraintError(
            "~ also allows bytes that are not UTF-8: add an expression that the text matches too, "
            "such as ~A & /(?s:.*)/"
        )
    for attributes in re.findall(r"^[ \t]*[!?]?[\w-]+[ \t]*\[(.*)\][ \t]*:", bare, re.MULTILINE):
        names = {attribute.partition("=")[0].strip() for attribute in attributes.split(",")}
        if refused := sorted(names.intersection(WITHOUT_EFFECT)):
            raise ConstraintError(f"the rule attribute {refused[0]} has no effect here: remove it")


def _readable(message: str) -> str:
    """The compiler's message on one line, without advice, file names or excerpts of the source."""
    if message.startswith("NoExtensionBias"):
        return NOTHING_FOLLOWS
    if message.startswith("lexer error: too many "):
        return (
            f"a text needs more than {LIMITS['max_lexer_states']} states of the lexer, or "
            "too many at once; shorten repetitions that overlap, such as (.*a.{9})+"
        )
    if row := re.search(r"Current row has (\d+) items", message):
        return (
            f"at one place of a text the parser has {row[1]} ways to go on, more than "
            f"{LIMITS['max_items_in_row']}; use fewer optional parts and alternatives"
        )
    if "Too many items (limit" in message:
        return (
            f"to find the next token, the parser needs more than {LIMITS['step_max_items']} items; "
            "use fewer optional parts and alternatives, or join short ones into one regular "
            "expression, such as /[a-z]/"
        )
    if "coerce_one_of" in message:
        return "the alternatives of oneOf may overlap; use anyOf, or exclude overlaps"
    location = LOCATION.match(message)
    if "(in regex): " in message:
        reason = message.rpartition("(in regex): ")[2].rpartition("\nerror: ")[2].partition("\n")[0]
        message = f"{location[0] if location else ''}invalid regular expression: {reason}"
    message = message[:1000]  # the substitution is quadratic in a word's length
    own = r"<non-verbose/>|^\s*\d+ \|.*$|^\s*\^\s*$|; either increase .*|\S*\.rs(:\d+)*"
    return " ".join(re.sub(own, "", message, flags=re.MULTILINE).split())[:300]
