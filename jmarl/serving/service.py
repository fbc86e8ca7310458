"""Answer requests with the agents of a team: from a request that was read to pieces of text, as they are written.

Tokenizers work in a thread of their own, so that a long prompt does not stop the streams of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jmarl.config import TrainConfig
from jmarl.models.hub.prompt_warnings import warn_of_plain_turns
from jmarl.serving.answers import HttpAnswer
from jmarl.serving.engine import SamplingEngine
from jmarl.serving.errors import HttpRefusal, gone, invalid
from jmarl.serving.prompts import TOOL_MARKS, encode_messages, encode_text_prompt
from jmarl.serving.records import SamplingRequest, Update
from jmarl.serving.requests import ChatRequest, RequestLimits, TextRequest, unknown_model
from jmarl.serving.text import Piece, RowText
from jmarl.team import Team

LONGEST = 1024  # tokens of a completion: its slot needs memory for all of them
NUM_SEEDS = 1 << 31
BODY, BODY_BASE, BODY_PER_TOKEN = 1 << 20, 1 << 16, 16  # bytes of a body: at most, for tools, for each token of the context


@dataclasses.dataclass(eq=False)
class Answering:
    """A request under way."""

    answer: HttpAnswer
    request: SamplingRequest
    texts: list[RowText]  # of each choice
    updates: asyncio.Queue[Update | Exception]
    run: Callable[..., Any]  # runs a function in the thread of the tokenizers
    likeliest: Callable[..., Any]  # see `SamplingEngine.likeliest`

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield the pieces of all choices, until all have ended. Raises `HttpRefusal` after `leave`, and engine errors."""
        try:
            while not all(text.finish for text in self.texts):
                update = await self.updates.get()
                if isinstance(update, Exception):
                    raise update
                text = self.texts[update.choice]
                if text.finish:  # a stop string has ended it, and its row did not know
                    continue
                piece = await self.run(text.add, update.ids, update.logprobs, update.ended, update.last)
                if piece.finish:
                    self.request.unwanted.add(update.choice)
                yield update.choice, piece
        finally:
            self.request.cancel()

    async def with_top(self, choice: int, piece: Piece) -> Piece:
        """Return a piece that ends with the newest token of a choice, with the likeliest tokens if they are asked for."""
        ids, count = [*self.texts[choice].ids], self.answer.request.top
        if not count or not piece.ids:
            return piece
        top = await asyncio.to_thread(self.likeliest, self.request, ids, len(ids) - len(piece.ids), count)
        return piece._replace(top=tuple(top))

    def leave(self) -> None:
        """Free the rows: the client has gone."""
        self.request.cancel()
        self.updates.put_nowait(gone())

    def num_tokens(self) -> int:
        """Return the number of tokens of all choices."""
        return sum(len(text.ids) for text in self.texts)


class TeamService:
    """A team whose agents answer requests.

    Args:
        team: the team.
        params: parameters [A, ...] of each stack.
        names: of the agents, for clients.
        cfg: settings of sampling and of the chat template, as those of the training.
        slots: rows of each parameter set that are sampled side by side.
        max_waiting: requests that may wait.
        max_tokens: longest completion that a request may ask for; None: `LONGEST`, or the training's.
        say: prints a line.
    """

    def __init__(
        self,
        team: Team,
        params: Sequence[Any],
        names: Sequence[str],
        cfg: TrainConfig,
        *,
        slots: int = 8,
        max_waiting: int = 64,
        max_tokens: int | None = None,
        say: Callable[[str], None] = print,
    ):
        self.agents = {name: agent for agent, name in enumerate(names)}
        self.specs, self.chat, self.cfg = team.agent_specs, cfg.episodes.chat_settings, cfg
        self.created = int(time.time())
        sampling = cfg.eval_sampling()
        context = max(spec.config.context for spec in team.stacks)
        longest = max(LONGEST, sampling.max_new_tokens) if max_tokens is None else max_tokens
        longest = min(longest, context)
        default, body = min(sampling.max_new_tokens, longest), min(BODY, BODY_BASE + BODY_PER_TOKEN * context)
        self.limits = RequestLimits(longest, default, sampling.temperature, sampling.top_p, slots, body)
        self.engine = SamplingEngine(team, params, sampling, slots, max_waiting, say)
        self.threads = ThreadPoolExecutor(1, "tokenizing")

    def start(self) -> None:
        """Start the engine, and compile the programs of the smallest pool. Warns of templates whose turns are plain text."""
        for agent, spec in enumerate(self.specs):
            warn_of_plain_turns(spec.tokenizer, dataclasses.replace(self.chat.of(agent), on=True), agent)
        self.engine.start()
        for agent in range(len(self.specs)):
            self.engine.compile(self.engine.size_of(agent, 1, self.limits.default_tokens))

    def stop(self) -> None:
        """Stop the engine, whatever is under way."""
        self.engine.stop()
        self.threads.shutdown(cancel_futures=True)

    async def run(self, f: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the thread of the tokenizers."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, f, *arguments)

    async def answer(self, asked: ChatRequest | TextRequest) -> Answering:
        """Begin to answer a request. Raises `HttpRefusal`."""
        asked.check(self.limits)
        messages, tools = asked.for_template() if isinstance(asked, ChatRequest) else ((), ())
        if asked.model not in self.agents:
            raise unknown_model(asked.model, [*self.agents])
        agent = self.agents[asked.model]
        spec = self.specs[agent]
        if isinstance(asked, ChatRequest):
            ids = await self.run(encode_messages, spec, messages, tools, self.chat.of(agent))
        else:
            ids = await self.run(encode_text_prompt, spec, asked.prompt)
        limit = self._limit(getattr(asked, asked.limit_field), len(ids), spec.config.context)
        if asked.n > (slots := self.engine.slots_of(self.engine.size_of(agent, len(ids), limit))):
            text = (
                f"n={asked.n} is not allowed for {len(ids)} tokens of messages and {limit} of completions: give at most {slots}"
            )
            raise invalid(text, "n")
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[Update | Exception]()

        def deliver(update: Update | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped, and its loop is closed
                loop.call_soon_threadsafe(updates.put_nowait, update)

        seed = secrets.randbelow(NUM_SEEDS) if asked.seed is None else asked.seed % NUM_SEEDS
        temperature = self.limits.temperature if asked.temperature is None else asked.temperature
        top_p = self.limits.top_p if asked.top_p is None else asked.top_p
        request = SamplingRequest(agent, ids, limit, seed, deliver, asked.n, temperature, top_p)
        self.engine.submit(request)
        texts = [self._row_text(spec.tokenizer, asked.stop, bool(tools)) for _ in range(asked.n)]
        answer = HttpAnswer(asked, tools, spec.tokenizer, ids)
        return Answering(answer, request, texts, updates, self.run, self.engine.likeliest)

    def _limit(self, asked: int | None, prompt: int, context: int) -> int:
        """Return the longest completion of a request. Raises `HttpRefusal` if there is no room for it."""
        limit = min(self.limits.default_tokens, max(1, context - prompt)) if asked is None else asked
        if prompt + limit <= context:
            return limit
        raise HttpRefusal(
            400,
            f"the messages have {prompt} tokens; with max_completion_tokens={limit} that is {prompt + limit}, more than the "
            f"context of {context}: shorten the messages or lower max_completion_tokens",
            "context_length_exceeded",
            "messages",
        )

    def _row_text(self, tokenizer: Any, stop: str | list[str], tools: bool) -> RowText:
        stops = [stop] if isinstance(stop, str) else stop or self.cfg.sampling.stop_texts
        return RowText(tokenizer, stops, TOOL_MARKS if tools else (), self.cfg.episodes.skip_special_tokens, whole=tools)
