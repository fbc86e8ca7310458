"""A reward model of joint actions, and training on its scores: marlhf and marlhf_iter.

The model is a decoder with a value head that reads what all agents read and wrote and gives one number behind the last token.
It is trained on pairs by the Bradley-Terry loss (row reward_model), with those of every fifth prompt held out; then the team is
trained on its scores, normalised to mean 0 and std 1 over what it learned from, by any row that learns from rollouts
(`rl_algorithm`). The task's own reward makes the pairs and is logged, but the team never sees it. marlhf does this once,
marlhf_iter in rounds. The trained reward model lies in `reward_model/` of the output directory, for `load_reward_model`. Left
out: several turns.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import DEFAULTS, Algorithm, resolve
from jmarl.config import Preference, TrainConfig, flat
from jmarl.envs.base import Answer, Environment
from jmarl.envs.reward_values import RewardResult
from jmarl.learning.setup import Setup
from jmarl.models.heads import without_value_head
from jmarl.models.hub.agents import Agent, load_agent, save_pretrained
from jmarl.models.hub.peft import merge
from jmarl.models.hub.tokenize import by_agent
from jmarl.models.lora import model_of
from jmarl.models.stack import unstack
from jmarl.randomness import FIT
from jmarl.sampling.generate import bucket
from jmarl.team import Team, make_team
from jmarl.training.files.checkpoint import saved_steps
from jmarl.training.files.interrupt import Interrupted
from jmarl.training.files.run_directory import CannotGoOn, checkpoints_of, set_aside
from jmarl.training.fit import fit
from jmarl.training.loop import Source
from jmarl.training.preferences.encoding import (
    Encoded,
    encode_answers,
    encode_pairs,
    ending,
    pair_batches,
    pair_scores,
    text_of,
)
from jmarl.training.preferences.pair_rounds import Rounds
from jmarl.training.preferences.pairs import Pair, Prompt, held_out
from jmarl.training.records import FitResult, Played
from jmarl.training.rollouts import evaluation_of, rollout_source
from jmarl.types import TeamState

logger = logging.getLogger(__name__)

HELD_OUT = 5  # the pairs of every fifth prompt are held out
FOLDER, HEAD = "reward_model", "value_head.safetensors"  # of an output directory, and what it has beside a model's files


class RewardModel(NamedTuple):
    """Scores joint actions: (score - mean) / std."""

    team: Team  # of one
    params: list[Any]
    algorithm: Algorithm
    mean: float = 0.0
    std: float = 1.0

    def score(self, prompts: Sequence[Sequence[Prompt]], completions: Sequence[Sequence[str]]) -> np.ndarray:
        """[B] of joint actions: what each agent read [N][B] and wrote [N][B], a list of B texts for each of N agents."""
        (spec,), coded = self.team.stacks, []
        sizes = [len(x) for x in (*prompts, *completions)]
        if any(isinstance(x, str) for x in (prompts, completions, *prompts, *completions)) or len(set(sizes)) > 1:
            raise ValueError("prompts and completions are [N][B]: for each agent a list of its texts, all of one length")
        if len(prompts) != len(completions):
            raise ValueError(f"prompts of {len(prompts)} agents and completions of {len(completions)}: give both of all agents")
        end = ending(spec, False)
        for i, (read, wrote) in enumerate(zip(zip(*prompts, strict=True), zip(*completions, strict=True), strict=True)):
            texts = joint_prompt(read), [joint_answer(wrote)]
            coded.append([encode_answers(spec, *texts, False, end, f"joint action {i}")])
        return (scores_of(self, coded)[:, 0] - self.mean) / self.std


def joint_prompt(prompts: Sequence[Prompt]) -> str:
    """What a reward model reads of what N agents read."""
    return by_agent(map(text_of, prompts))


def joint_answer(texts: Sequence[str]) -> str:
    """What it reads of what they wrote."""
    return "\n" + by_agent(texts)


def joint_pair(pair: Pair) -> Pair:
    """What a reward model reads of a pair of N agents, as one of a single agent."""
    prompt, chosen, rejected = joint_prompt(pair.prompts), joint_answer(pair.chosen), joint_answer(pair.rejected)
    return Pair((prompt,), (chosen,), (rejected,), pair.rewards)


def scores_of(model: RewardModel, coded: Sequence[Sequence[Encoded]], at_once: int = 16) -> np.ndarray:
    """Scores [M, G] of G joint actions each behind one prompt [M][1], as they come out of the value head."""
    found = []
    for i in range(0, len(coded), at_once):
        part = coded[i : i + at_once]
        batch = pair_batches(model.team, part, None, bucket(len(part), 1), model.algorithm)
        found.append(pair_scores(model.team, model.params, batch, model.algorithm)[: len(part), 0])
    return np.concatenate(found)


def save_reward_model(directory: str | os.PathLike, model: RewardModel) -> None:
    """Write a reward model as a Hugging Face directory (adapters merged), with its value head, mean and std in a small file."""
    from safetensors.numpy import save_file

    (spec,), directory = model.team.stacks, Path(directory)
    params = jax.device_get(unstack(model.params[0], 0))
    (directory / HEAD).unlink(missing_ok=True)  # written last: what is not whole has none
    save_pretrained(directory, spec.config, merge(spec.config, without_value_head(params)), spec.tokenizer)
    about = {"mean": repr(model.mean), "std": repr(model.std), "compute_dtype": model.algorithm.compute_dtype}
    save_file({name: np.asarray(params[name]) for name in ("value", "value_bias")}, directory / HEAD, metadata=about)
    shutil.copymode(directory / "config.json", directory / HEAD)  # safetensors gives the file to its owner alone


def load_reward_model(directory: str | os.PathLike) -> RewardModel:
    """The reward model of a directory that `save_reward_model` wrote; a run of marlhf does so in `reward_model/`."""
    from safetensors import safe_open

    path = Path(directory) / HEAD
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no {HEAD}, the value head of a reward model: give {FOLDER}/ of a run's output directory, or a "
            "directory that jmarl.training.preferences.reward_model.save_reward_model wrote"
        )
    with safe_open(path, framework="numpy") as file:
        head, about = {name: file.get_tensor(name)[None] for name in ("value", "value_bias")}, file.metadata()
    team, (params,) = make_team([load_agent(directory)])
    algorithm = resolve(TrainConfig.of(algorithm="reward_model", compute_dtype=about["compute_dtype"]))
    return RewardModel(team, [params | jax.tree.map(jnp.asarray, head)], algorithm, float(about["mean"]), float(about["std"]))


def fit_reward_model(
    agent: Agent,
    pairs: Sequence[Pair],
    cfg: TrainConfig,
    params: list[Any] | None = None,
    eval_pairs: Sequence[Pair] | None = None,
) -> tuple[RewardModel, FitResult]:
    """Train a reward model on pairs of N agents, from an agent's weights or from params of an earlier one; returns it and how
    it ranked held-out pairs before and after. cfg: with algorithm reward_model; eval_pairs: None holds out the pairs of every
    fifth prompt."""
    if cfg.episodes.chat:
        raise ValueError("chat=True is not there for a reward model: what it reads are texts of all agents; leave it out")
    team, fresh = make_team([agent], lora=cfg.lora.lora_rank > 0)
    start, fresh = (fresh if params is None else params), None  # at most one of them stays in memory
    joint = [joint_pair(pair) for pair in pairs]
    trained, held = held_out(joint, HELD_OUT) if eval_pairs is None else (joint, [joint_pair(pair) for pair in eval_pairs])
    result = fit(team, trained, cfg, params=start, eval_data=held)
    if result.interrupted:
        raise Interrupted(f"while a reward model was trained, after {int(result.state.step)} of {cfg.run.num_updates} updates")
    model = RewardModel(team, [model_of(stack) for stack in result.state.stacks], resolve(cfg))
    scores = scores_of(model, encode_pairs(team, trained, False))
    return model._replace(mean=float(scores.mean()), std=float(max(scores.std(), 1e-6))), result


class Learned:
    """An environment whose reward is the score of a reward model, which is set later; the task's own is among the metrics, as
    `task`."""

    def __init__(self, env: Environment):
        self.env = env
        self.model: RewardModel | None = None

    def reset(self, items, rng):
        states, prompts = self.env.reset(items, rng)
        return list(zip(states, zip(*prompts, strict=True), strict=True)), prompts

    def step(self, states, actions, rng):
        assert self.model is not None
        answer = self.env.step([state for state, _ in states], actions, rng)
        scores = self.model.score(list(zip(*(read for _, read in states), strict=True)), actions)
        valid = ~answer.result.invalid
        rewards = np.where(valid, scores, np.nan)
        every = np.repeat(rewards[:, None], answer.result.rewards.shape[1], 1)
        parts = answer.result.parts | {"task": answer.result.total}
        result = RewardResult(rewards, parts, answer.result.invalid, every, answer.result.faults, answer.result.num_raised)
        return Answer(result, answer.done, answer.after)

    def observe(self, after):
        raise ValueError("a reward model scores single turns: set num_turns to 1")


class LearnedRounds:
    """The rounds of a run on a learned reward: pairs, the reward model made of them, and the environment that it rewards.

    agent: what the reward model starts from; in marlhf_iter each round's starts from the one before.
    """

    def __init__(self, rounds: Rounds, agent: Agent, algorithm: Algorithm, cfg: TrainConfig):
        self.rounds, self.agent, self.algorithm, self.cfg = rounds, agent, algorithm, cfg
        self.env = Learned(rounds.env)

    def begin(self, step: int, state: TeamState) -> dict[str, float]:
        """Before an update: make the pairs and the reward model of the round that begins there, if one does. Returns what is
        known of them, for the log. Where a run goes on in mid-round, its model is read back."""
        if step and self.env.model is None:
            self.resume(step)
        now, at = divmod(step, self.rounds.updates)
        made = self.rounds.begin(step, state)
        if made is not None:
            return {"pairs": float(len(made.pairs))} | self._learn(now)
        if self.env.model is None and at:
            self._learn(now, again=True)
        return {}

    def resume(self, step: int) -> None:
        """Read back the model that the next one starts from, where a resumed run begins a round."""
        self.rounds.resume(step)
        if step % self.rounds.updates == 0 and step < self.cfg.run.num_updates:
            self._learn(step // self.rounds.updates - 1, again=True)

    def _learn(self, round_: int, again: bool = False) -> dict[str, float]:
        """Train a round's model, or (`again`) read it back."""
        cfg, before = reward_config(self.cfg, self.algorithm, round_), self.env.model
        if again and not cfg.run.resume:
            raise ValueError(
                f"cannot resume: the reward model of round {round_} is not in {cfg.run.output_dir}; it was not kept, "
                "or is damaged"
            )
        pairs = self.rounds.replayed(round_)
        start = None if before is None else before.params
        try:
            self.env.model, result = fit_reward_model(self.agent, pairs, cfg, start)
        except CannotGoOn as error:  # the round's pairs were made anew, and are others where rewards are not the same each time
            if again:
                raise
            logger.warning("the reward model of round %d is trained anew: %s", round_, error)
            set_aside(cfg.run.output_dir)
            self.env.model, result = fit_reward_model(self.agent, pairs, cfg.replace(resume=False), start)
        if cfg.run.output_dir:
            save_reward_model(Path(self.cfg.run.output_dir) / FOLDER, self.env.model)
        return {} if result.after is None else {f"reward_model/{name}": x for name, x in result.after.items()}


def learned_source(
    setup: Setup, rounds: Rounds, agent: Agent, eval_items: Sequence[dict], algorithm: Algorithm, cfg: TrainConfig
) -> Source:
    """Return what a team learns from that a reward model rewards: its rollouts, and before each round a new reward model.

    setup: of the team; algorithm, cfg: of the run. Evaluations use the task's own reward.
    """
    learned = LearnedRounds(rounds, agent, algorithm, cfg)
    rollouts = rollout_source(setup, rounds.items, learned.env, eval_items)

    def play(step: int, state: TeamState) -> Played:
        start = time.monotonic()
        notes = learned.begin(step, state)
        preparation_s = time.monotonic() - start if notes else 0.0
        return rollouts.play(step, state)._replace(notes=notes, preparation_s=preparation_s)

    return rollouts._replace(play=play, evaluate=evaluation_of(setup.team, eval_items, rounds.env, setup.cfg))


def reward_config(cfg: TrainConfig, algorithm: Algorithm, round_: int) -> TrainConfig:
    """The settings by which a round's reward model is trained. Where the run keeps checkpoints it is kept too, and a run that
    goes on reads the one that is there."""
    preference, settings = algorithm.preference, flat(cfg)
    updates, rate, size = preference.reward_updates, preference.reward_learning_rate, preference.batch_size or 1
    kept: dict[str, Any] = {name: settings[name] for name in KEPT}
    kept |= dict(num_updates=updates, learning_rate=rate, save_every=None if cfg.run.saves else 0)
    kept |= dict(output_dir=f"{cfg.run.output_dir}/reward_model_{round_}" if cfg.run.output_dir else "")
    seed = int(np.random.default_rng((cfg.run.seed, round_, FIT)).integers(2**31))
    kept |= dict(seed=seed, micro_batches=min(cfg.optimizer.micro_batches, size))
    plain = TrainConfig.of(algorithm="reward_model", mesh="agent=1", **kept)
    return plain.replace(resume=cfg.run.resume and is_saved(plain))


def is_saved(cfg: TrainConfig) -> bool:
    """Whether there is a complete checkpoint of a run."""
    return bool(saved_steps(checkpoints_of(cfg)))


def policy_config(cfg: TrainConfig) -> TrainConfig:
    """The settings by which a run's team is trained on the scores."""
    name = cfg.preference.rl_algorithm or DEFAULTS["rl_algorithm"]
    return cfg.replace(algorithm=name, preference=Preference())


# Settings of the run that its reward models have too.
KEPT = (
    "save_minutes",
    "strict_checkpoints",
    "progress",
    "per_agent",
    "remat",
    "compute_dtype",
    "batch_size",
    "label_smoothing",
)
KEPT += ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
