"""Whom a team's completions are compared with: itself, its past, another model, or an HTTP service.

A comparator answers the same prompts with as many completions for each agent, which the environment judges like the team's own.
Left out: services without an OpenAI-compatible address, and streaming.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment
from jmarl.envs.chat_api import MAX_CONCURRENT, WAIT_S, ChatAPI
from jmarl.models.hub.agents import load_agent
from jmarl.models.lora import join, split
from jmarl.models.sharding import mesh_of, place
from jmarl.randomness import COMPARE, PROPOSE, Randomness
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import Rows, sample_team, tokenize_first_turn, tokens_of
from jmarl.team import Team, make_team, to_agents
from jmarl.training.preferences.encoding import encode_text, ending

KEY = "COMPARATOR_API_KEY"


class Candidates(NamedTuple):
    """What was written on P items: G completions an agent, of which those of one number are a joint action."""

    prompts: list[list[str]]  # [N][P]
    texts: list[list[list[str]]]  # [N][P][G]
    rewards: np.ndarray  # [P, G] mean over agents; NaN where invalid
    prompt_ids: Rows  # [N][P] token ids as the team reads them
    ids: list[list[list[list[int]]]]  # [N][P][G] token ids: as sampled; of another model's or a service's texts the team's


def candidates_of(team: Team, rollout: Rollout, cfg: TrainConfig) -> Candidates:
    """Of a rollout of one turn by the team."""
    turn = rollout.turns[0]
    if not turn.acts.all():
        raise ValueError(
            "pairs are made of what all agents write, and here not all of them act in the first turn: choose a row of rollouts"
        )
    prompt_ids = tokenize_first_turn(team, turn.prompts, cfg.sampling, cfg.episodes)
    ids = tokens_of(team, turn.completions, len(turn.items))
    return Candidates(turn.prompts, turn.texts, turn.rewards.mean(-1), prompt_ids, ids)


def played(
    team: Team, params: Sequence[Any], items: Sequence[dict], env: Environment, cfg: TrainConfig, number: int
) -> Rollout:
    """What a team writes as a comparator: other random draws than the policy's own, in an environment that draws the same."""
    sample, randomness = partial(sample_team, team, params), Randomness(cfg.run.seed, number, COMPARE, env_purpose=PROPOSE)
    return play(sample, team, items, env, cfg.sampling, cfg.episodes, cfg.episodes.num_generations, randomness)


def draws_of(cfg: TrainConfig, number: int) -> np.random.Generator:
    """The environment's random numbers where the team proposes: its comparator meets the same tasks."""
    return Randomness(cfg.run.seed, number, PROPOSE).environment_rng()


def encoded(team: Team, texts: Sequence, ended: Sequence, cfg: TrainConfig) -> list[list[list[list[int]]]]:
    """Texts [N][P][G] that the team did not write as its token ids, with an end behind those that were ended by their writer,
    cut at max_new_tokens."""
    specs = team.agent_specs
    ends = [ending(spec, cfg.episodes.chat) for spec in specs]

    def ids(n: int, text: str, complete: bool) -> list[int]:
        row = encode_text(specs[n], text) + [ends[n]] * bool(complete)
        return row[: cfg.sampling.max_new_tokens] or [ends[n]]

    return [
        [[ids(n, *one) for one in zip(*of_prompt, strict=True)] for of_prompt in zip(texts[n], ended[n], strict=True)]
        for n in range(team.num_agents)
    ]


def ended_of(team: Team, rollout: Rollout) -> list[np.ndarray]:
    """Which completions [N][P, G] of a rollout's first turn were ended by the agent."""
    turn = rollout.turns[0]
    return [x[: len(turn.items)] for x in to_agents(team, [jax.device_get(done.ended) for done in turn.completions])]


class History:
    """The policies that rounds began with, as far back as they are looked at: what is trained of each stack (with LoRA the
    adapters). They lie in files of `folder`, for a run that goes on, or where there is none in memory.

    oldest: the round that a run may go on from, of which files are still needed.
    """

    def __init__(self, lag: int, folder: Path | None, oldest: Callable[[], int] = lambda: 0):
        self.lag, self.folder, self.oldest = lag, folder, oldest
        self.past: dict[int, list[np.ndarray]] = {}

    def remember(self, round_: int, params: Sequence[Any]) -> None:
        """Keep the policy that a round begins with, in place of one kept of that round before, and let old ones go."""
        leaves = jax.tree.leaves(jax.device_get([split(of_stack)[1] for of_stack in params]))
        if self.folder is None:
            self.past = {r: of for r, of in self.past.items() if r >= round_ - self.lag} | {round_: leaves}
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (temporary := self._file(round_).with_suffix(".tmp")).open("wb") as file:
            np.savez(file, *leaves)  # with a checksum of each array
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file(round_))
        for path in self.folder.glob("*.npz"):
            if path < self._file(max(0, min(round_, self.oldest()) - self.lag)):
                path.unlink()

    def at(self, round_: int, params: Sequence[Any]) -> list[Any]:
        """The policy that a round began with, laid out like params."""
        if self.folder is None:
            leaves = self.past[round_]
        elif self._file(round_).is_file():
            try:
                with np.load(self._file(round_)) as file:
                    leaves = [file[f"arr_{i}"] for i in range(len(file.files))]
            except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
                raise ValueError(f"cannot resume: {self._file(round_)} is damaged ({error})") from error
        else:
            raise ValueError(f"cannot resume: {self._file(round_)}, the policy that round {round_} began with, is missing")
        bases, trained = zip(*map(split, params), strict=True)
        then = jax.tree.unflatten(jax.tree.structure(list(trained)), leaves)
        return [join(base, place(of, mesh_of(now))) for base, of, now in zip(bases, then, params, strict=True)]

    def _file(self, round_: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round_{round_:06}.npz"


class Comparator:
    """Who answers, by the settings' `comparator`. initial: the team's parameters before training, of each stack; history: kept
    policies, for that kind."""

    def __init__(self, team: Team, cfg: TrainConfig, kind: str, initial: Sequence[Any], history: History | None = None):
        self.team, self.cfg, self.kind, self.initial, self.history = team, cfg, kind, initial, history
        self.other: Team | None = None
        if kind == "model":
            agent = load_agent(cfg.preference.comparator_model or "")
            self.other, self.initial = make_team([agent] * team.num_agents, shared_weights=True)

    def answer(self, params: Sequence[Any], items: Sequence[dict], env: Environment, number: int, round_: int) -> Candidates:
        """What the comparator writes on items in a round, while the policy has params."""
        if self.kind == "api":
            return self._asked(items, env, number)
        if self.history is not None:
            params = self.history.at(max(0, round_ - self.history.lag), params)
        elif self.kind != "current":
            params = self.initial
        if self.other is None:
            return candidates_of(self.team, played(self.team, params, items, env, self.cfg, number), self.cfg)
        rollout = played(self.other, params, items, env, self.cfg, number)
        turn = rollout.turns[0]
        return self._foreign(turn.prompts, turn.texts, ended_of(self.other, rollout), turn.rewards.mean(-1))

    def _foreign(self, prompts: list, texts: list, ended: Sequence, rewards: np.ndarray) -> Candidates:
        prompt_ids = tokenize_first_turn(self.team, prompts, self.cfg.sampling, self.cfg.episodes)
        return Candidates(prompts, texts, rewards, prompt_ids, encoded(self.team, texts, ended, self.cfg))

    def _asked(self, items: Sequence[dict], env: Environment, number: int) -> Candidates:
        cfg, rng = self.cfg, draws_of(self.cfg, number)
        states, prompts = env.reset(items, rng)
        group = cfg.episodes.num_generations
        with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
            said = [list(threads.map(lambda p: complete(p, group, cfg), of_agent)) for of_agent in prompts]
        texts = [[[text for text, _ in row] for row in of_agent] for of_agent in said]
        ended = [[[complete for _, complete in row] for row in of_agent] for of_agent in said]
        actions = [[text for of_prompt in of_agent for text in of_prompt] for of_agent in texts]
        answer = env.step([state for state in states for _ in range(group)], actions, rng)
        return self._foreign(prompts, texts, ended, answer.result.total.reshape(len(items), group))


def complete(prompt: str, count: int, cfg: TrainConfig) -> list[tuple[str, bool]]:
    """`count` completions of a prompt by an OpenAI-compatible service, and whether each was ended, not cut off: as chat where
    the team's prompts are chats."""
    model, url = cfg.preference.comparator_model or "", cfg.preference.comparator_url or ""
    service = ChatAPI(url, model, cfg.episodes.chat, KEY, wait_s=WAIT_S, name="comparator")
    return service.complete(
        prompt, count, max_tokens=cfg.sampling.max_new_tokens, temperature=cfg.sampling.temperature, top_p=cfg.sampling.top_p
    )
