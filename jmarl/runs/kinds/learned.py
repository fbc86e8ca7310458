"""Runs on a learned reward: the team learns from rollouts that a reward model scores, which is trained on new pairs in each
round."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig, flat
from jmarl.files.checkpoint import saved_steps
from jmarl.files.own_files import set_aside
from jmarl.files.run_directory import CannotGoOn, checkpoints_of
from jmarl.models.agent import Agent
from jmarl.models.hub.peft import merge
from jmarl.models.stack import to_host, unstack
from jmarl.preferences.reward_model import FOLDER, Fit, LearnedReward, fit_reward_model, save_reward_model
from jmarl.randomness import FIT
from jmarl.rollout.experience import Source
from jmarl.rollout.turns import Rollout
from jmarl.runs.kinds.rollouts import ROLLOUTS, rollout_source, shared
from jmarl.runs.kinds.rounds import Rounds, make_rounds
from jmarl.runs.run import PreparedRun
from jmarl.team import Team, policies
from jmarl.types import TeamState

logger = logging.getLogger(__name__)

INHERITED = (  # settings of a run that its reward models have too
    *("save_minutes", "strict_checkpoints", "progress", "per_agent", "remat", "compute_dtype", "long_prompts"),
    *("batch_size", "label_smoothing", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets"),
)


class LearnedRounds:
    """The rounds of a run on a learned reward: in each one new pairs, and a reward model that is trained on them.

    Args:
        rounds: sample the pairs.
        agent: what the first reward model starts from; that of a later round starts from the one before.
        algorithm: of the run.
        cfg: settings of the run.
        fit: `jmarl.fit`.
    """

    def __init__(self, rounds: Rounds, agent: Agent, algorithm: Algorithm, cfg: TrainConfig, fit: Fit):
        self.rounds, self.agent, self.algorithm, self.cfg, self.fit = rounds, agent, algorithm, cfg, fit
        self.env = LearnedReward(rounds.env)

    def new_round(self, step: int, state: TeamState) -> dict[str, float]:
        """Begin a round if one begins at this step: sample its pairs and train its reward model. Return its columns of the log.

        A resumed run first reads back the reward model of this round, or the one that the new round's starts from.
        """
        round_, update = divmod(step, self.rounds.updates)
        if step and self.env.model is None:
            self.rounds.resume(step)
            self._fit(round_ if update else round_ - 1, read_back=True)
        new = self.rounds.new_round(step, state)
        return {} if new is None else {"pairs": new.notes["pairs"]} | self._fit(round_)

    def _fit(self, round_: int, read_back: bool = False) -> dict[str, float]:
        """Train the reward model of a round, or continue from its last checkpoint if the run is resumed.

        read_back: it must have a checkpoint. Returns the evaluation on held-out pairs after training.
        """
        cfg, pairs = reward_config(self.cfg, self.algorithm, round_), self.rounds.replayed(round_)
        if read_back and not cfg.run.resume:
            raise ValueError(
                f"cannot resume: the reward model of round {round_} is not in {cfg.run.output_dir}; it was not saved, "
                "or is damaged"
            )
        params = None if self.env.model is None else self.env.model.params
        try:
            self.env.model, result = fit_reward_model(self.agent, pairs, cfg, params, fit=self.fit)
        except CannotGoOn as error:  # the pairs were sampled again, and differ if rewards are not the same each time
            if read_back:
                raise
            logger.warning("the reward model of round %d is trained from the beginning: %s", round_, error)
            set_aside(cfg.run.output_dir)
            self.env.model, result = fit_reward_model(self.agent, pairs, cfg.replace(resume=False), params, fit=self.fit)
        if cfg.run.output_dir:
            save_reward_model(Path(self.cfg.run.output_dir) / FOLDER, self.env.model)
        return {f"reward_model/{name}": x for name, x in (result.after or {}).items()}


def learned_source(run: PreparedRun, state: TeamState) -> Source:
    """Return the source of a run on a learned reward: rollouts, and before each round a new reward model. See `Kind.source`."""
    assert run.task.fit is not None, "reward models are trained by jmarl.fit"
    setup, task = run.setup, shared(run.setup, run.task)
    rounds = make_rounds(setup, task, state)
    agent = setup.team.reward_model or first_agent(setup.team, policies(state))
    learned = LearnedRounds(rounds, agent, rounds.algorithm, run.given, run.task.fit)
    rollouts = rollout_source(setup, task, learned.env)

    def play(step: int, state: TeamState) -> Rollout:
        start = time.monotonic()
        notes = learned.new_round(step, state)
        preparation_s = time.monotonic() - start if notes else 0.0
        rollout = rollouts.play(step, state)
        return rollout._replace(notes={**rollout.notes, **notes}, preparation_s=preparation_s)

    return rollouts._replace(play=play)


LEARNED = ROLLOUTS._replace(source=learned_source)


def first_agent(team: Team, initial: Sequence[Any]) -> Agent:
    """Return the first agent of a team as it was loaded."""
    spec = team.stacks[0]
    weights = merge(spec.config, to_host(unstack(initial[0], 0)))
    return Agent("first", spec.config, weights, spec.tokenizer, spec.generation_config)


def reward_config(cfg: TrainConfig, algorithm: Algorithm, round_: int) -> TrainConfig:
    """Return the settings for training a round's reward model. It has checkpoints if the run has, and resumes if it can."""
    preference, settings = algorithm.preference, flat(cfg)
    own = TrainConfig.of(
        algorithm="reward_model",
        mesh="agent=1",
        num_updates=preference.reward_updates,
        learning_rate=preference.reward_learning_rate,
        micro_batches=cfg.optimizer.micro_batches_of(preference.batch_size or 1),
        seed=int(np.random.default_rng((cfg.run.seed, round_, FIT)).integers(2**31)),
        save_every=None if cfg.run.saves else 0,
        output_dir=f"{cfg.run.output_dir}/reward_model_{round_}" if cfg.run.output_dir else "",
        **{name: settings[name] for name in INHERITED},
    )
    return own.replace(resume=cfg.run.resume and bool(saved_steps(checkpoints_of(own))))
