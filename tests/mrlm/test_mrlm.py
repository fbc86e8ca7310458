"""MRLM's quick start, with tiny models: policies that learn, policies that do not, settings by its names."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from jmarl.envs.math.problems import MathProblemGenerator
from jmarl.envs.math.reasoning import MathReasoningEnvironment
from jmarl.envs.messages import EnvironmentMode, Message, Observation, Reward, SimulatedEnvironment
from jmarl.mrlm.trainers import ExperimentConfig, GRPOConfig, GRPOTrainer, LLMEnvironment, PPOConfig, PPOTrainer, TrainingConfig

SHORT = dict(max_new_tokens=3, progress=False)


class Long(SimulatedEnvironment):
    """Pays by the letters."""

    reward_range = (0.0, 1.0)

    def __init__(self, most: int = 10):
        self.most = most

    def reset(self):
        return Observation([Message("user", "Write.")])

    def step(self, action):
        return Observation([], done=True), Reward(sum(map(ord, action.content)) % self.most / self.most)


class Talk(SimulatedEnvironment):
    """Overrides `reset` and `step` alone. Pays 1 a step, and is done after so many; None: never."""

    def __init__(self, length: int | None = None, max_turns: int | None = None):
        self.length = length
        if max_turns is not None:
            self.max_turns = max_turns

    def reset(self):
        self.steps = 0
        return Observation([Message("user", "Go on.")])

    def step(self, action):
        self.steps += 1
        return Observation([Message("user", "Go on.")], done=self.steps == self.length), Reward(1.0)


class Broken(Long):
    """Does not last."""

    steps = [0]  # of the class: the object is copied

    def step(self, action):
        self.steps[0] += 1
        if self.steps[0] > 4:
            raise RuntimeError("no more")
        return super().step(action)


class Both(Long):
    """For two."""

    roles = ("a", "b")

    def reset(self):
        return [super().reset()] * 2

    def step(self, action):
        _, reward = super().step(action[0])
        return [Observation([], done=True)] * 2, reward


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(max_positions=512), tiny_tokenizer, seed) for seed in range(2)]


def weights(trainer) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(trainer.params[0])]


def test_the_quick_start_runs(agents, tmp_path):
    policy_env = LLMEnvironment(agents[0], agents[0].tokenizer, mode=EnvironmentMode.SERVER)
    eval_envs = [MathReasoningEnvironment(MathProblemGenerator()) for _ in range(4)]
    training = TrainingConfig(algorithm="ppo", num_epochs=50, batch_size=2, learning_rate=1e-2)
    config = ExperimentConfig(training=training, ppo=PPOConfig(clip_range=0.2, gamma=0.99), **SHORT)
    trainer = PPOTrainer(policy_env, eval_envs, config)
    cfg = trainer.config
    assert (cfg.algorithm, cfg.run.num_updates, cfg.episodes.num_prompts, cfg.episodes.gamma, cfg.sampling.max_new_tokens) == (
        "ppo",
        50,
        2,
        0.99,
        3,
    )
    assert cfg.loss.clip_eps_low == cfg.loss.clip_eps_high == 0.2
    before = weights(trainer)
    assert len(trainer.train(num_iterations=2).rewards) == 2
    assert any((x != y).any() for x, y in zip(before, weights(trainer), strict=True))
    assert {"eval/reward", "eval/reward_ci95", "eval/reward/unparsable"} <= trainer.evaluate(num_episodes=3).keys()
    trainer.save_model(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "agent_0").vocab_size == agents[0].tokenizer.vocab_size


def test_a_client_stays_as_it_was_loaded(agents):
    team = [LLMEnvironment(agents[0]), LLMEnvironment(agents[1], mode=EnvironmentMode.CLIENT)]
    training = TrainingConfig(num_iterations=1, learning_rate=1e-2)
    trainer = GRPOTrainer(team, Both(), ExperimentConfig(training, grpo=GRPOConfig(group_size=3), **SHORT))
    assert trainer.config.run.frozen_agents == (1,) and trainer.config.episodes.num_generations == 3
    before = weights(trainer)
    trainer.train()
    moved = [[bool((x[agent] != y[agent]).any()) for x, y in zip(before, weights(trainer), strict=True)] for agent in range(2)]
    assert any(moved[0]) and not any(moved[1])


def test_a_training_that_broke_off_says_so(agents):
    trainer = GRPOTrainer(LLMEnvironment(agents[0]), Broken(), ExperimentConfig(**SHORT))
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train(2)
    with pytest.raises(RuntimeError, match=r"train\(\) did not finish, .* make a new trainer"):
        trainer.evaluate()


def test_an_episode_goes_on_until_it_is_done(agents):
    """The return counts its steps. Nothing is told, as warnings are errors here."""
    trainer = GRPOTrainer(LLMEnvironment(agents[0]), Talk(3), ExperimentConfig(**SHORT))
    assert (trainer.config.episodes.num_turns, trainer.config.episodes.branching) == (16, "chain")
    assert trainer.train(1).rewards == [3.0]


@pytest.mark.parametrize(
    ("env", "said", "turns"),
    [
        (Talk(), {}, 16),
        (Talk(max_turns=2), {}, 2),
        (Talk(), {"max_episode_length": 3}, 3),
        ([Talk(), MathReasoningEnvironment()], {"max_episode_length": 3}, 3),
        (Talk(max_turns=2), {"max_episode_length": 3}, 2),
    ],
)
def test_a_cut_is_told(agents, env, said, turns):
    """Once, and with the number of turns."""
    config = ExperimentConfig(TrainingConfig(batch_size=2, **said), grpo=GRPOConfig(group_size=2), **SHORT)
    trainer = GRPOTrainer(LLMEnvironment(agents[0]), env, config)
    told = f"Talk: [24] episodes were not done after {turns} turns and were truncated .* set max_turns"
    with pytest.warns(UserWarning, match=told) as warned:
        rewards = trainer.train(2).rewards
    assert len(warned) == 1 and (isinstance(env, list) or rewards == [turns, turns])


@pytest.mark.parametrize("length", [2, 4])
def test_max_episode_length_makes_a_chain(agents, tmp_path, length):
    """So joint actions grow with the length, not with a power of it."""
    training = TrainingConfig(num_epochs=1, batch_size=1, max_episode_length=length, checkpoint_dir=str(tmp_path))
    GRPOTrainer(LLMEnvironment(agents[0]), Talk(length), ExperimentConfig(training, **SHORT)).train()
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["env_steps"] == 4 * length


def test_a_tree_may_be_asked_for(agents):
    config = ExperimentConfig(TrainingConfig(max_episode_length=2), branching="tree", **SHORT)
    assert GRPOTrainer(LLMEnvironment(agents[0]), Talk(2), config).config.episodes.branching == "tree"


def test_held_out_tasks_are_played_where_they_are_asked_for(agents):
    config = ExperimentConfig(TrainingConfig(num_epochs=1), eval_every=1, **SHORT)
    result = GRPOTrainer(LLMEnvironment(agents[0]), Long(), config).train()
    assert result.before is not None and result.after is not None


def test_different_environments_are_a_mixture_and_equal_ones_are_one(agents):
    policy = LLMEnvironment(agents[0])
    many = GRPOTrainer(policy, [Long(5), Long(5), Long(9), MathReasoningEnvironment()], ExperimentConfig(**SHORT))
    assert list(many.env.environments) == ["Long_0", "Long_1", "MathReasoning"]
    assert [env.env.simulated.most for env in list(many.env.environments.values())[:2]] == [5, 9]
    assert GRPOTrainer(policy, [Long(), Long()], ExperimentConfig(**SHORT)).env.env.simulated.most == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: TrainingConfig(num_epoch=3), "TrainingConfig has no setting 'num_epoch'; did you mean 'num_epochs'"),
        (lambda p: TrainingConfig(use_bf16=True), "has no setting 'use_bf16'; it has algorithm, num_epochs, .*, log_every$"),
        (lambda p: TrainingConfig(num_epochs=3, num_iterations=3), "num_epochs and num_iterations are the same setting"),
        (lambda p: ExperimentConfig(training=PPOConfig()), r"here stands a TrainingConfig\(...\), got PPOConfig"),
        (lambda p: PPOTrainer(p, Long(), ExperimentConfig(TrainingConfig(algorithm="grpo"))), "algorithm='grpo', and this is"),
        (lambda p: PPOTrainer(p, Long(), ExperimentConfig(grpo=GRPOConfig(group_size=2))), "section grpo is not for"),
        (lambda p: ExperimentConfig(max_new_token=3), "'max_new_token' is unknown; did you mean 'max_new_tokens'"),
        (lambda p: ExperimentConfig(use_bf16=True), r"'use_bf16' is unknown; help\(TrainConfig\) lists what it may be"),
        (lambda p: ExperimentConfig(frozen_agents=()), "'frozen_agents' is set by the trainer and its policies"),
        (lambda p: PPOTrainer(p.agent, Long()), "policy 0 is a"),
        (lambda p: PPOTrainer(p, []), "eval_envs has no environment"),
        (lambda p: PPOTrainer([p, p], Long()), "1 agents and the team has 2"),
        (lambda p: LLMEnvironment(p.agent, mode="both"), "'both' is not a valid EnvironmentMode"),
    ],
)
def test_mistakes_are_told(agents, make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer = make(LLMEnvironment(agents[0]))
        trainer.train(1)
