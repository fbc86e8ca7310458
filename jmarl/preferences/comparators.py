"""Comparators: the writers of the completions that a team's own are compared with in rounds of preferences.

A comparator is the team itself, an earlier policy, another model or an HTTP service. It writes as many completions of the same
prompts as the team, and the environment rewards them like the team's. Left out: services without an OpenAI-compatible API, and
streaming.
"""

import os
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jmarl.config import TrainConfig
from jmarl.envs.base import Environment, special_tokens
from jmarl.envs.calls.copies import copies
from jmarl.envs.chat_api import MAX_CONCURRENT, WAIT_S, ChatAPI
from jmarl.files.checkpoint import saved_steps
from jmarl.logs.goodput import timed_sampler
from jmarl.models.hub.agents import load_agent
from jmarl.models.hub.messages import ChatPrompt, as_prompt
from jmarl.models.hub.tokenize import encode_answer
from jmarl.models.lora import join, split
from jmarl.models.sharding import place
from jmarl.models.stack import to_host
from jmarl.preferences.encoding import chat_for, end_token
from jmarl.processes import exchange
from jmarl.randomness import COMPARE, PROPOSE, Randomness
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import Rows, texts_of, tokenize_first_turn, tokens_of
from jmarl.team import Team, make_team, to_agents

KEY = "COMPARATOR_API_KEY"  # environment variable


class Candidates(NamedTuple):
    """The completions of P items, G per agent; the g-th completions of all agents are a joint action."""

    prompts: list[list[str]]  # [N][P]
    texts: list[list[list[str]]]  # [N][P][G]
    rewards: np.ndarray  # [P, G] mean over agents; NaN where invalid
    prompt_ids: Rows  # [N][P] token ids of the team's prompts
    ids: list[list[list[list[int]]]]  # [N][P][G] token ids as sampled; of other models' texts by the team's tokenizers
    fault: str = ""  # as in `Turn`


def play_items(
    team: Team, params: Sequence[Any], items: Sequence[dict], env: Environment, cfg: TrainConfig, randomness: Randomness
) -> Rollout:
    """Return a rollout in which a team writes `num_candidates` completions per item."""
    return play(timed_sampler(team, params), team, items, env, cfg.sampling, cfg.episodes, num_candidates(cfg), randomness)


def num_candidates(cfg: TrainConfig) -> int:
    """Return the completions of each prompt and agent of which pairs are made."""
    return cfg.preference.num_candidates or cfg.episodes.num_generations


def candidates_of(team: Team, rollout: Rollout, cfg: TrainConfig) -> Candidates:
    """Return the completions in a rollout of one turn that the team itself has played."""
    turn = rollout.turns[0]
    if not turn.acts.all():
        raise ValueError(
            "pairs need completions of all agents, and in this environment not all agents act in the first turn: choose an "
            "algorithm that learns from rollouts"
        )
    prompt_ids = tokenize_first_turn(team, turn.prompts, cfg.sampling, cfg.episodes)
    ids = tokens_of(team, turn.completions, len(turn.items))
    return Candidates(turn.prompts, turn.texts, turn.rewards.mean(-1), prompt_ids, ids, turn.fault)


def encode_foreign(
    team: Team, prompts: Sequence, texts: Sequence, ended: Sequence, cfg: TrainConfig
) -> list[list[list[list[int]]]]:
    """Encode texts [N][P][G] of another model, which answer prompts [N][P], by the team's tokenizers, cut at max_new_tokens.

    ended: [N][P][G] whether the model ended the text itself; the token that ends a completion is then appended."""
    limit, ids = cfg.sampling.max_new_tokens, []
    for n, (spec, *agent) in enumerate(zip(team.agent_specs, prompts, texts, ended, strict=True)):
        groups = []
        for prompt, *group in zip(*agent, strict=True):
            chat = chat_for(prompt, cfg.episodes.chat_settings.of(n))
            end, encode = end_token(spec, chat), partial(encode_answer, spec.tokenizer, chat=chat, special=())
            encoded = [encode(text) + [end] * bool(complete) for text, complete in zip(*group, strict=True)]
            groups.append([row[:limit] or [end] for row in encoded])
        ids.append(groups)
    return ids


class History:
    """The policies with which recent rounds began: the trained parameters of each stack (with LoRA the adapters).

    They are in files of `folder`, so that a resumed run has them, or in memory if folder is None.

    Args:
        lag: how many rounds back the comparator looks.
        folder: in the output directory, beside the checkpoints.
        updates: of a round.
    """

    def __init__(self, lag: int, folder: Path | None, updates: int = 1):
        self.lag, self.folder, self.updates = lag, folder, updates
        self.past: dict[int, list[np.ndarray]] = {}  # in memory

    def remember(self, round_: int, params: Sequence[Any]) -> None:
        """Store the policy with which a round begins, in place of an earlier one of this round, and remove old ones."""
        leaves = jax.tree.leaves(to_host([split(stack)[1] for stack in params]))
        if self.folder is None:
            self.past = {r: policy for r, policy in self.past.items() if r >= round_ - self.lag} | {round_: leaves}
            return
        exchange.from_first(partial(self._write, self.folder, round_, leaves))

    def _write(self, folder: Path, round_: int, leaves: Sequence[np.ndarray]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (temporary := self._file(round_).with_suffix(".tmp")).open("wb") as file:
            np.savez(file, *leaves)  # with a checksum of each array
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file(round_))
        oldest = min(saved_steps(folder.parent / "checkpoints"), default=0) // self.updates  # round of a resumed run
        for path in folder.glob("round_*.npz"):
            if path < self._file(max(0, min(round_, oldest) - self.lag)):
                path.unlink()

    def at(self, round_: int, params: Sequence[Any], team: Team) -> list[Any]:
        """Return the policy with which a round began, with the structure of params, on the devices of the team."""
        leaves = self.past[round_] if self.folder is None else self._read(round_)
        bases, trained = zip(*map(split, params), strict=True)
        policy = jax.tree.unflatten(jax.tree.structure(list(trained)), leaves)
        return [join(base, place(x, spec.mesh)) for base, x, spec in zip(bases, policy, team.stacks, strict=True)]

    def _read(self, round_: int) -> list[np.ndarray]:
        path = self._file(round_)
        if not path.is_file():
            raise ValueError(f"cannot resume: {path}, the policy that round {round_} began with, is missing")
        try:
            with np.load(path) as file:
                return [file[f"arr_{i}"] for i in range(len(file.files))]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"cannot resume: {path} is damaged ({error})") from error

    def _file(self, round_: int) -> Path:
        assert self.folder is not None
        return self.folder / f"round_{round_:06}.npz"


class Comparator:
    """Writes the completions that the team's are compared with.

    Args:
        team: the team.
        cfg: settings of the run.
        kind: see `Preference.comparator`.
        initial: the team's parameters before training, of each stack.
        history: earlier policies, for the kind `history`.
    """

    def __init__(self, team: Team, cfg: TrainConfig, kind: str, initial: Sequence[Any], history: History | None = None):
        self.team, self.cfg, self.kind, self.history = team, cfg, kind, history
        self.writers, self.initial = team, initial
        if kind == "model":
            agent = load_agent(cfg.preference.comparator_model or "")
            writers, self.initial = make_team([agent] * team.num_agents, shared_weights=True)
            self.writers = writers.in_context(cfg.run.long_context)

    def answer(self, params: Sequence[Any], items: Sequence[dict], env: Environment, number: int, round_: int) -> Candidates:
        """Return the comparator's completions of items.

        Its random draws differ from the team's, those of the environment are the same, so that both get the same tasks.

        Args:
            params: of the current policy.
            items: what the completions are about.
            env: writes the prompts and rewards completions.
            number: of the list of items, for the random numbers.
            round_: number of the round.
        """
        randomness = Randomness(self.cfg.run.seed, number, COMPARE, env_purpose=PROPOSE)
        if self.kind == "api":
            return self._request(items, env, randomness.environment_rng())
        if self.history is not None:
            params = self.history.at(max(0, round_ - self.history.lag), params, self.team)
        elif self.kind != "current":
            params = self.initial
        rollout = play_items(self.writers, params, items, env, self.cfg, randomness)
        if self.kind != "model":
            return candidates_of(self.team, rollout, self.cfg)
        turn = rollout.turns[0]
        ended = to_agents(self.writers, [to_host(done.ended) for done in turn.completions])
        tokens = tokens_of(self.writers, turn.completions, len(items))
        texts = texts_of(self.writers, tokens, shown=special_tokens(env))  # without the end token, whatever rewards read
        return self._encode(turn.prompts, texts, [rows[: len(items)] for rows in ended], turn.rewards.mean(-1))

    def _request(self, items: Sequence[dict], env: Environment, rng: np.random.Generator) -> Candidates:
        """Return the completions of the HTTP service."""
        group = num_candidates(self.cfg)
        states, prompts = env.reset(copies(items), rng)
        ask = partial(complete, count=group, cfg=self.cfg)

        def ask_all() -> list[list[list[tuple[str, bool]]]]:
            with ThreadPoolExecutor(MAX_CONCURRENT) as threads:
                return [list(threads.map(partial(ask, agent=n), texts)) for n, texts in enumerate(prompts)]

        replies = exchange.from_first(ask_all)
        texts = [[[text for text, _ in prompt] for prompt in agent] for agent in replies]
        ended = [[[complete for _, complete in prompt] for prompt in agent] for agent in replies]
        actions = [sum(agent, []) for agent in texts]
        answer = env.step([state for state in states for _ in range(group)], actions, rng)
        return self._encode(prompts, texts, ended, answer.result.total.reshape(len(items), group))

    def _encode(self, prompts: list, texts: list, ended: Sequence, rewards: np.ndarray) -> Candidates:
        """Return texts [N][P][G] of another model as candidates."""
        prompt_ids = tokenize_first_turn(self.team, prompts, self.cfg.sampling, self.cfg.episodes)
        return Candidates(prompts, texts, rewards, prompt_ids, encode_foreign(self.team, prompts, texts, ended, self.cfg))


def complete(prompt: Any, count: int, cfg: TrainConfig, agent: int = 0) -> list[tuple[str, bool]]:
    """Return `count` completions of a prompt by an OpenAI-compatible service, and whether each was ended and not cut off.

    The prompt is sent as a chat if it is one for the agent of the team."""
    prompt = as_prompt(prompt)
    chat = bool(chat_for(prompt, cfg.episodes.chat_settings.of(agent)))
    model, url = cfg.preference.comparator_model or "", cfg.preference.comparator_url or ""
    service = ChatAPI(url, model, chat, KEY, wait_s=WAIT_S, name="comparator")
    settings = cfg.sampling
    return service.complete(
        prompt.messages if isinstance(prompt, ChatPrompt) else prompt,
        count,
        max_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )
