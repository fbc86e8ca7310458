"""Whom a team's completions are compared with: itself, its past, another model, or an HTTP service.

A comparator answers the same prompts with as many completions for each agent, which the environment judges like the team's own.
Left out: services without an OpenAI-compatible address, and streaming.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.config import TrainConfig
from jmarl.environment import Environment
from jmarl.generate import Rows, tokenize, tokens_of
from jmarl.rollout import Rollout, play
from jmarl.team import Team, make_team
from jmarl.weights import load_agent

COMPARE = 3  # purpose of random keys, beside those of `generate`
TRIES, WAIT_S, TIMEOUT_S, AT_ONCE = 3, 0.5, 120.0, 8
KEY = "COMPARATOR_API_KEY"


class Candidates(NamedTuple):
    """What was written on P items: G completions an agent, of which those of one number are a joint action."""

    prompts: list[list[str]]  # [N][P]
    texts: list[list[list[str]]]  # [N][P][G]
    rewards: np.ndarray  # [P, G] mean over agents; NaN where invalid
    prompt_ids: Rows | None  # [N][P] token ids, where the team itself wrote; None: of another tokenizer
    ids: Any  # [N][P][G] token ids, likewise


def candidates_of(team: Team, rollout: Rollout, cfg: TrainConfig) -> Candidates:
    """Of a rollout of one turn."""
    turn = rollout.turns[0]
    count = len(turn.items)
    prompt_ids = tokenize(team, turn.prompts, cfg.sampling(), cfg.chat)
    return Candidates(turn.prompts, turn.texts, turn.rewards.mean(-1), prompt_ids, tokens_of(team, turn.completions, count))


def played(
    team: Team, params: Sequence[Any], items: Sequence[dict], env: Environment, cfg: TrainConfig, number: int
) -> Candidates:
    """A comparator that is a team: its completions are other random draws than the policy's own."""
    how: dict[str, Any] = dict(seed=cfg.seed, step=number, group=cfg.num_generations, purpose=COMPARE)
    return candidates_of(team, play(team, params, items, env, cfg.sampling(), cfg.episodes(), **how), cfg)


class Comparator:
    """Who answers, by the settings' `comparator`. initial: the team's parameters before training, of each stack."""

    def __init__(self, team: Team, cfg: TrainConfig, kind: str, initial: Sequence[Any]):
        self.team, self.cfg, self.kind, self.initial = team, cfg, kind, initial
        self.past: dict[int, list[Any]] = {}  # round -> parameters at its beginning, on the host
        if kind == "model":
            agent = load_agent(cfg.comparator_model or "")
            self.team, self.initial = make_team([agent] * team.num_agents, shared_weights=True)

    def remember(self, round_: int, params: Sequence[Any], lag: int) -> None:
        """Keep the policy of a round's beginning as long as it is looked back at."""
        self.past[round_] = jax.device_get(list(params))
        for old in [r for r in self.past if r < round_ - lag]:
            del self.past[old]

    def answer(
        self, params: Sequence[Any], items: Sequence[dict], env: Environment, number: int, round_: int, lag: int
    ) -> Candidates:
        """What the comparator writes on items in a round, while the policy has params."""
        if self.kind == "api":
            return self._asked(items, env, number)
        if self.kind == "history":
            params = self.past[max(0, round_ - lag)]
        elif self.kind != "current":
            params = self.initial
        found = played(self.team, params, items, env, self.cfg, number)
        return found._replace(prompt_ids=None, ids=None) if self.kind == "model" else found

    def _asked(self, items: Sequence[dict], env: Environment, number: int) -> Candidates:
        cfg, rng = self.cfg, np.random.default_rng((self.cfg.seed, number, COMPARE))
        states, prompts = env.reset(items, rng)
        group = cfg.num_generations
        with ThreadPoolExecutor(AT_ONCE) as threads:
            texts = [list(threads.map(lambda p: complete(p, group, cfg), of_agent)) for of_agent in prompts]
        actions = [[text for of_prompt in of_agent for text in of_prompt] for of_agent in texts]
        answer = env.step([state for state in states for _ in range(group)], actions, rng)
        return Candidates(prompts, texts, answer.result.total.reshape(len(items), group), None, None)


def complete(prompt: str, count: int, cfg: TrainConfig) -> list[str]:
    """`count` completions of a prompt by an OpenAI-compatible service: as chat where the team's prompts are chats."""
    base = (cfg.comparator_url or "").rstrip("/")
    body: dict[str, Any] = dict(n=count, max_tokens=cfg.max_new_tokens, temperature=cfg.temperature, top_p=cfg.top_p)
    body |= {"model": cfg.comparator_model} if cfg.comparator_model else {}
    body |= {"messages": [{"role": "user", "content": prompt}]} if cfg.chat else {"prompt": prompt}
    found = post(base + ("/chat/completions" if cfg.chat else "/completions"), body)
    try:
        texts = [choice["message"]["content"] if cfg.chat else choice["text"] for choice in found["choices"]]
    except (KeyError, TypeError) as error:
        raise RuntimeError(
            f"comparator at {base} answered {str(found)[:120]!r}, without choices: is the address right?"
        ) from error
    if len(texts) != count or not all(isinstance(text, str) for text in texts):
        raise RuntimeError(f"comparator at {base} was asked for {count} completions and gave {len(texts)}")
    return texts


def post(url: str, body: dict[str, Any]) -> Any:
    """The JSON that answers a JSON request. Tried again where the service is busy or away; refusals are errors at once."""
    key = os.environ.get(KEY)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    for left in reversed(range(TRIES)):
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            if left == 0 or error.code not in (429, 500, 502, 503, 504):
                told = error.read()[:200].decode(errors="replace")
                raise RuntimeError(f"comparator at {url} refused with {error.code}: {told}") from error
        except (OSError, ValueError) as error:  # URLError, time-outs, an answer that is no JSON
            if left == 0:
                raise RuntimeError(f"comparator at {url} cannot be used: {error}; tried {TRIES} times") from error
        time.sleep(WAIT_S * (TRIES - left))
    raise AssertionError("unreachable")
