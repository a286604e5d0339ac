"""Trajectories that are played elsewhere: a player asks for turns, tokens in and tokens out, and reports the end. To
the run, each is an environment like any other.

All of this except `close` runs in the event loop's thread, where the HTTP server runs too.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ..errors import InputError, LockstepError
from ..json_file import to_json
from ..types import SamplingParams
from .calls import event_loop
from .environment import Branch, End, Environment, Turn

# Codes of `TurnRefused`.
OVER = "over"  # the rollout has ended
LIMIT = "limit"  # a limit of the run ended it
BUSY = "busy"  # another turn of the rollout is being sampled


class TurnRefused(LockstepError):
    """A turn is not sampled; `code` is one of those above."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(eq=False)
class _TurnRequest:
    """A turn that a player has asked for: all tokens before it, and what ends it besides the run's own limits."""

    token_ids: list[int]
    max_tokens: int | None
    stop_token_ids: tuple[int, ...]
    turn: asyncio.Future[Turn] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RolloutRegistry:
    """Where players find rollouts: `rollouts` that are not over, by each of their names. `address` is the host and port
    to serve at (port 0: any free one), `url` the server's (empty: none is running), `model` the model's name."""

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.address, self.url, self.model = address, "", ""
        self.rollouts: dict[str, RemoteEnvironment] = {}
        self._offered: asyncio.Queue[RemoteEnvironment] = asyncio.Queue()
        self._waits: set[asyncio.Timeout] = set()

    def offer(self, rollout: RemoteEnvironment) -> None:
        """Queue a rollout for `take`."""
        self._offered.put_nowait(rollout)

    async def take(self, seconds: float) -> RemoteEnvironment | None:
        """The next offered rollout that is not over; None if there is none within `seconds`, or before `end_waits`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds) as wait:
                self._waits.add(wait)
                try:
                    while (rollout := await self._offered.get()).over:
                        pass
                finally:
                    self._waits.remove(wait)
                return rollout
        return None

    def end_waits(self) -> None:
        """Let `take` return where it waits."""
        for wait in self._waits:
            with suppress(RuntimeError):  # it is ending already
                wait.reschedule(asyncio.get_running_loop().time())


class RemoteEnvironment(Environment):
    """One rollout. The tokens of its first request are its prompt; a later request whose tokens do not continue the
    trajectory begins a branch."""

    begin_alike = False
    begin_together = False  # a single player may play them one after another
    registry: ClassVar[RolloutRegistry]

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.names: list[str] = []  # further names in `RolloutRegistry.rollouts`
        self.row: dict[str, Any] = {}
        self.seed = 0
        self.over = ""  # once it is over: the code
        self._inbox: asyncio.Queue[_TurnRequest | End | LockstepError] = asyncio.Queue()
        self.turns: list[Turn] = []  # sampled so far
        self.given_answers = 0  # assistant messages in the first prompt, if it was a chat; they were not sampled here
        self._pending: _TurnRequest | None = None  # the turn that the run is sampling
        self._last_turn: tuple[list[int], Turn] | None = None  # and the tokens before it
        self._tokens: list[int] = []  # of the current branch so far

    @property
    def row_json(self) -> str:
        """The row as JSON, with texts in place of values that JSON lacks."""
        return to_json(self.row)

    @classmethod
    @asynccontextmanager
    async def playing(cls) -> AsyncIterator[None]:
        """A context that is held while rollouts are served."""
        yield

    async def begin(self) -> None:
        """Have the rollout played: by default, by the next player that asks for one."""
        self.registry.offer(self)

    # ---- called by the run ----

    async def start(self, row: dict[str, Any], seed: int) -> list[int]:
        if not self.registry.url:
            raise LockstepError("its rollouts are played over HTTP, and nothing answers there now")
        self.row, self.seed = row, seed
        self.registry.rollouts[self.id] = self
        await self.begin()
        given = await self._next()
        if isinstance(given, End):
            raise LockstepError("it was ended before its first turn")
        assert isinstance(given, list), "nothing was before it that it could not go on from"
        return given

    async def step(self, turn: Turn) -> list[int] | Branch | End:
        request, self._pending = self._pending, None
        assert request is not None, "a turn is sampled when it was asked for"
        self._last_turn, self._tokens = (request.token_ids, turn), request.token_ids + turn.token_ids
        self.turns.append(turn)
        request.turn.set_result(turn)
        return await self._next()

    def until(self, sampling: SamplingParams) -> SamplingParams:
        request = self._pending
        if request is None:  # refused meanwhile
            return sampling
        max_tokens = min(sampling.max_completion_length, request.max_tokens or sampling.max_completion_length)
        stops = (*sampling.stop_token_ids, *request.stop_token_ids)
        return replace(sampling, max_completion_length=max_tokens, stop_token_ids=stops)

    async def cut(self) -> End:
        self._refuse(
            LIMIT, "the trajectory is at a limit of the run (turns, or tokens); nothing more is sampled for it"
        )
        item: Any = None
        while not isinstance(item, (End, LockstepError)):  # a player that fails, perhaps because of the limit, gets 0
            item = await self._inbox.get()
        return item if isinstance(item, End) else End(0.0)

    def close(self) -> None:
        event_loop().call_soon_threadsafe(self._withdraw, "the rollout is over: it was scored, or left out")

    async def _next(self) -> list[int] | Branch | End:
        """What is given next, or the end. Raises the `LockstepError` of a player that failed."""
        try:
            item = await self._inbox.get()
        except asyncio.CancelledError:
            self._withdraw(
                "the rollout is over: its player took longer than task.environment_timeout, or the run ended"
            )
            raise
        if isinstance(item, LockstepError):
            raise item
        if isinstance(item, End):
            return item
        known = len(self._tokens)
        continues = item.token_ids[:known] == self._tokens and len(item.token_ids) > known
        return item.token_ids[known:] if continues else Branch(item.token_ids)

    def _refuse(self, code: str, why: str) -> None:
        """Sample nothing more, and refuse the turn that a player waits for, if any."""
        self.over = self.over or code
        request, self._pending = self._pending, None
        if request is not None:
            request.turn.set_exception(TurnRefused(code, why))
            request.turn.exception()  # marks it as retrieved, as perhaps nobody waits for it

    def _withdraw(self, why: str) -> None:
        """Sample nothing more, and let players no longer find the rollout."""
        self._refuse(OVER, why)
        for name in (self.id, *self.names):
            self.registry.rollouts.pop(name, None)

    # ---- called by the player ----

    async def turn(
        self, token_ids: list[int], max_tokens: int | None = None, stop_token_ids: tuple[int, ...] = ()
    ) -> Turn:
        """The turn after these tokens, sampled with the run's settings; `max_tokens` and `stop_token_ids` may end it
        earlier. A turn that is asked for twice is sampled once. Raises `TurnRefused`."""
        if self._last_turn is not None and token_ids == self._last_turn[0]:
            return self._last_turn[1]
        if self.over:
            raise TurnRefused(self.over, "the rollout is over; nothing more is sampled for it")
        if self._pending is None:
            self._pending = _TurnRequest(token_ids, max_tokens, stop_token_ids)
            self._inbox.put_nowait(self._pending)
        elif token_ids != self._pending.token_ids:
            raise TurnRefused(BUSY, "another turn of this rollout is under way; ask for one after another")
        return await asyncio.shield(self._pending.turn)

    def end(self, reward: float | Mapping[str, float] | None) -> None:
        """End the rollout with this reward; None leaves it to reward functions. Raises `TurnRefused` if it is over."""
        self._report(End(reward))

    def fail(self, reason: str) -> None:
        """Report a failure: the run leaves the rollout out, and logs the reason. Raises `TurnRefused` if it is over."""
        self._report(LockstepError(reason))

    def _report(self, item: End | LockstepError) -> None:
        if self.over == OVER:
            raise TurnRefused(OVER, "the rollout is over")
        self.over = OVER
        self._inbox.put_nowait(item)


def remote_environment(address: str, what: str) -> type[RemoteEnvironment]:
    """An environment that is played at `http://HOST:PORT`. Raises `InputError` naming `what` for another address."""
    host, port = None, None
    with suppress(ValueError):  # an invalid port or IPv6 address
        parts = urlsplit(address)
        extras = parts.netloc.rpartition("@")[0], parts.path.strip("/"), parts.query, parts.fragment
        if parts.scheme == "http" and not any(extras):
            host, port = parts.hostname, parts.port
    if not host or not port:
        raise InputError(f"{what}: an address must be http://HOST:PORT, as in http://127.0.0.1:8000")
    return type("Http", (RemoteEnvironment,), {"registry": RolloutRegistry((host, port))})
