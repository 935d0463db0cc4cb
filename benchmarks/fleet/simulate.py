"""Simulation of N servers under a load, step by step, from step times.

Requests arrive at random (a Poisson process) and go to the server with the fewest open requests, as
with a least-connections load balancer. A server is a simplified version of logitd's engine:
sequences get free slots in order of arrival; a step computes at most `prefill_chunk` tokens of
prompts, the oldest first, and decodes a token for each sequence whose prompt is computed; the last
chunk of a prompt also computes the first token. The time of a step is the time of its prompt tokens
plus the time of its decode batch.

The simulation leaves out cached prefixes, drafts, other endpoints, the network and HTTP, except for
`overhead`, a constant time for each request.
"""

import heapq
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepTimes:
    """Step times of one server, in seconds.

    prefill_token  additional time of a step for each prompt token
    decode         (sequences, seconds) of decode batches, in ascending order of sequences
    """

    prefill_token: float
    decode: tuple[tuple[int, float], ...]

    def decode_step(self, batch: int) -> float:
        """Seconds of a decode step. Interpolates linearly between the two nearest sizes, and
        extrapolates beyond the largest."""
        if batch == 0:
            return 0.0
        sizes = [size for size, _ in self.decode]
        place = bisect_left(sizes, batch)
        if place < len(sizes) and sizes[place] == batch:
            return self.decode[place][1]
        if len(sizes) == 1:
            return self.decode[0][1]
        low = min(max(place - 1, 0), len(sizes) - 2)
        (size, seconds), (next_size, next_seconds) = self.decode[low : low + 2]
        return seconds + (batch - size) * (next_seconds - seconds) / (next_size - size)

    @classmethod
    def of_bench(cls, found: dict[str, Any]) -> "StepTimes":
        """The step times in the JSON object that `logitd bench` prints as its last line."""
        prefill = found["engine"]["prefill"][-1]["tokens_per_second"]
        decode = tuple(
            (case["batch"], case["batch"] / case["tokens_per_second"])
            for case in found["engine"]["decode"]
        )
        return cls(1 / prefill, tuple(sorted(decode)))


@dataclass(frozen=True)
class Load:
    """Requests per second, and the number of tokens in each prompt and each completion."""

    rate: float
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class Server:
    """Settings of a server. `overhead` is the time in seconds that a request takes in addition to
    its steps."""

    slots: int = 16
    prefill_chunk: int = 256
    max_queue: int = 256
    overhead: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Results of all requests that arrived; times in seconds.

    first_tokens   time from arrival to first token of each answered request, in ascending order
    inter_token    mean time from one token of a sequence to its next
    seconds        time from the first arrival to the last token
    busy           share of that time in which servers computed
    """

    first_tokens: tuple[float, ...]
    inter_token: float
    tokens: int
    rejected: int
    seconds: float
    busy: float

    def quantile(self, share: float) -> float:
        """The `share` quantile of the time to the first token, in seconds."""
        return self.first_tokens[
            min(len(self.first_tokens) - 1, int(share * len(self.first_tokens)))
        ]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(eq=False)
class _Sequence:
    arrived: float
    prompt_left: int
    tokens_left: int
    first_token: float = 0.0


@dataclass(eq=False)
class _Replica:
    """One server: waiting requests, requests with a slot, and the step in progress."""

    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    prefilling: list[tuple[_Sequence, int]] = field(default_factory=list)
    decoding: list[_Sequence] = field(default_factory=list)
    computing: bool = False
    busy: float = 0.0

    @property
    def open(self) -> int:
        return len(self.waiting) + len(self.running)


def arrivals(load: Load, count: int, seed: int) -> list[float]:
    """The arrival times of a Poisson process."""
    draw, now, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(load.rate)
        moments.append(now)
    return moments


def simulate(
    times: StepTimes, load: Load, server: Server, replicas: int, moments: Sequence[float]
) -> Outcome:
    """Simulate requests that arrive at these moments, until all have their last token."""
    fleet = [_Replica() for _ in range(replicas)]
    ends: list[tuple[float, int]] = []  # ends of steps: time, server
    first_tokens: list[float] = []
    pauses, rejected, ended = 0.0, 0, moments[0]

    def begin(number: int, now: float) -> None:
        """Begin the next step of an idle replica, if it has anything to do."""
        replica = fleet[number]
        seconds = _plan(replica, times, server)
        replica.computing = bool(replica.prefilling or replica.decoding)
        replica.busy += seconds
        if replica.computing:
            heapq.heappush(ends, (now + seconds, number))

    coming = deque(moments)
    while coming or ends:
        if coming and (not ends or coming[0] <= ends[0][0]):
            now = coming.popleft()
            number = min(range(replicas), key=lambda one: fleet[one].open)
            replica = fleet[number]
            if replica.open - server.slots >= server.max_queue:
                rejected += 1
                continue
            replica.waiting.append(_Sequence(now, load.prompt_tokens, load.tokens))
            if not replica.computing:
                begin(number, now)
        else:
            now, number = heapq.heappop(ends)
            replica = fleet[number]
            for sequence in _account(replica, now):
                first_tokens.append(sequence.first_token - sequence.arrived + server.overhead)
                pauses += now - sequence.first_token
            ended = now
            begin(number, now)
    answered = len(first_tokens)
    tokens = answered * load.tokens
    gaps = tokens - answered
    span = ended - moments[0]
    busy = sum(replica.busy for replica in fleet) / (replicas * span) if span else 0.0
    return Outcome(
        tuple(sorted(first_tokens)), pauses / gaps if gaps else 0.0, tokens, rejected, span, busy
    )


def _plan(replica: _Replica, times: StepTimes, server: Server) -> float:
    """Admit requests, choose the work of a step, and return its duration; 0 if there is no work."""
    while replica.waiting and len(replica.running) < server.slots:
        replica.running.append(replica.waiting.popleft())
    room = server.prefill_chunk
    replica.prefilling, replica.decoding = [], []
    for sequence in replica.running:
        if sequence.prompt_left == 0:
            replica.decoding.append(sequence)
        elif room > 0:
            some = min(room, sequence.prompt_left)
            replica.prefilling.append((sequence, some))
            room -= some
    prompt_tokens = server.prefill_chunk - room
    return prompt_tokens * times.prefill_token + times.decode_step(len(replica.decoding))


def _account(replica: _Replica, now: float) -> list[_Sequence]:
    """Finish a step: record the new tokens, and return the sequences that have ended."""
    for sequence in replica.decoding:
        sequence.tokens_left -= 1
    for sequence, some in replica.prefilling:
        sequence.prompt_left -= some
        if sequence.prompt_left == 0:
            sequence.first_token = now
            sequence.tokens_left -= 1
    done = [s for s in replica.running if s.prompt_left == 0 and s.tokens_left == 0]
    replica.running = [s for s in replica.running if s not in done]
    return done
