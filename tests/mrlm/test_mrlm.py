"""MRLM's quick start with tiny models: trained and frozen policies, settings under its names, its module paths."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
from transformers import AutoTokenizer

from jmarl.mrlm.algorithms.grpo import GRPOTrainer
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.config import CLASSES, ExperimentConfig, GRPOConfig, PPOConfig, TrainingConfig
from jmarl.mrlm.core import EnvironmentMode, LLMEnvironment, SimulatedEnvironment
from jmarl.mrlm.core.types import Message, Observation, Reward
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment
from jmarl.mrlm.keys import KEYS

SHORT = dict(max_new_tokens=3, progress=False)
PAIR = dict(grpo=GRPOConfig(group_size=2), **SHORT)  # with batch_size=2: 2 prompts with 2 completions each


class Letters(SimulatedEnvironment):
    """One turn; the reward is a hash of the letters."""

    reward_range = (0.0, 1.0)

    def __init__(self, modulus: int = 10):
        self.modulus = modulus

    def reset(self):
        return Observation([Message("user", "Write.")])

    def step(self, action):
        return Observation([], done=True), Reward(sum(map(ord, action.content)) % self.modulus / self.modulus)


class Talk(SimulatedEnvironment):
    """Overrides only `reset` and `step`. The reward is 1 per step; done after `length` steps (None: never)."""

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


class Broken(Letters):
    """Raises in its fifth step."""

    steps = [0]  # of the class: the object is copied

    def step(self, action):
        self.steps[0] += 1
        if self.steps[0] > 4:
            raise RuntimeError("no more")
        return super().step(action)


class ForTwo(Letters):
    """For two agents."""

    roles = ("a", "b")

    def reset(self):
        return [super().reset()] * 2

    def step(self, action):
        _, reward = super().step(action[0])
        return [Observation([], done=True)] * 2, reward


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(max_positions=512), tiny_tokenizer, seed) for seed in range(2)]


def test_module_paths_are_those_of_mrlm():
    from jmarl.envs.messages import SimulatedEnvironment as Defined
    from jmarl.mrlm.algorithms import GRPOTrainer as Exported
    from jmarl.mrlm.environments.code import CodeExecutionEnvironment, CodeProblemGenerator
    from jmarl.mrlm.environments.debate import DebateEnvironment, RuleBasedJudge
    from jmarl.mrlm.environments.tools import ToolUseEnvironment
    from jmarl.mrlm.environments.tools.builtin_tools import create_default_tool_registry

    assert SimulatedEnvironment is Defined and GRPOTrainer is Exported
    assert MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 3))).num_agents == 1
    assert DebateEnvironment(judge=RuleBasedJudge()).num_agents == 2
    assert ToolUseEnvironment(create_default_tool_registry()).num_agents == 1
    assert CodeExecutionEnvironment(CodeProblemGenerator()).num_agents == 1


def test_sections_have_the_keys_of_the_table():
    for section, cls in CLASSES.items():
        names = list(inspect.signature(cls).parameters)
        assert names == [field.name for field in dataclasses.fields(cls)]
        assert sorted({*names} - {"generation"}) == sorted(KEYS[section])  # of a model: a section in it


@pytest.mark.long
def test_the_quick_start_is_read_evaluated_and_saved(agents, tmp_path):
    """`tests/test_documents.py` trains it."""
    policy_env = LLMEnvironment(agents[0], agents[0].tokenizer, mode=EnvironmentMode.SERVER)
    eval_envs = [MathReasoningEnvironment(MathProblemGenerator()) for _ in range(4)]
    training = TrainingConfig(algorithm="ppo", num_epochs=50, batch_size=2, learning_rate=1e-2)
    config = ExperimentConfig(training=training, ppo=PPOConfig(clip_range=0.2, gamma=0.99), **SHORT)
    trainer = PPOTrainer(policy_env, eval_envs, config)
    cfg = trainer.config
    assert (cfg.algorithm, cfg.run.num_updates, cfg.episodes.num_prompts) == ("ppo", 50, 2)
    assert (cfg.episodes.gamma, cfg.sampling.max_new_tokens) == (0.99, 3)
    assert cfg.loss.clip_eps_low == cfg.loss.clip_eps_high == 0.2
    assert {"eval/reward", "eval/reward_ci95", "eval/measures/unparsable"} <= trainer.evaluate(num_episodes=2).keys()
    trainer.save_model(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path / "agent_0").vocab_size == agents[0].tokenizer.vocab_size


def test_a_client_is_frozen(agents):
    """`tests/learning/test_per_agent.py` says what that does."""
    team = [LLMEnvironment(agents[0]), LLMEnvironment(agents[1], mode=EnvironmentMode.CLIENT)]
    trainer = GRPOTrainer(team, ForTwo(), ExperimentConfig(grpo=GRPOConfig(group_size=3), **SHORT))
    assert trainer.config.run.frozen_agents == (1,) and trainer.config.episodes.num_generations == 3


@pytest.mark.long
def test_weights_lost_in_a_failed_training_raise(agents):
    trainer = GRPOTrainer(LLMEnvironment(agents[0]), Broken(), ExperimentConfig(TrainingConfig(batch_size=2), **PAIR))
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train(2)
    with pytest.raises(RuntimeError, match=r"train\(\) did not finish, .* make a new trainer"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("env", "settings", "turns"),
    [
        (Talk(), {}, 16),
        (Talk(max_turns=2), {}, 2),
        (Talk(), {"max_episode_length": 3}, 3),
        ([Talk(), MathReasoningEnvironment()], {"max_episode_length": 3}, 3),
        (Talk(max_turns=2), {"max_episode_length": 3}, 2),
    ],
)
def test_episodes_are_chains_of_at_most_so_many_turns(agents, env, settings, turns):
    episodes = GRPOTrainer(LLMEnvironment(agents[0]), env, ExperimentConfig(TrainingConfig(**settings), **PAIR)).config.episodes
    assert (episodes.num_turns, episodes.branching) == (turns, "chain")


@pytest.mark.long
def test_an_episode_continues_until_it_is_done(agents, tmp_path):
    """The return counts its steps, and joint actions are linear in the length, not exponential. There is no warning, which
    would be an error in tests."""
    training = TrainingConfig(batch_size=2, num_epochs=1, max_episode_length=3, checkpoint_dir=str(tmp_path))
    trainer = GRPOTrainer(LLMEnvironment(agents[0]), Talk(3), ExperimentConfig(training, **PAIR))
    assert trainer.train().rewards == [3.0]
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row["env_steps"] == 2 * 2 * 3


@pytest.mark.long
@pytest.mark.parametrize("env", [Talk(), [Talk(), Letters()]])
def test_truncated_episodes_warn_once_with_the_number_of_turns(agents, env):
    config = ExperimentConfig(TrainingConfig(batch_size=2, max_episode_length=3), **PAIR)
    trainer = GRPOTrainer(LLMEnvironment(agents[0]), env, config)
    message = "Talk: [24] episodes were not done after 3 turns and were truncated .* set max_turns"
    with pytest.warns(UserWarning, match=message) as warned:
        rewards = trainer.train(2).rewards
    assert len(warned) == 1 and (isinstance(env, list) or rewards == [3, 3])


def test_branching_can_be_set_to_tree(agents):
    config = ExperimentConfig(TrainingConfig(max_episode_length=2), branching="tree", **SHORT)
    assert GRPOTrainer(LLMEnvironment(agents[0]), Talk(2), config).config.episodes.branching == "tree"


@pytest.mark.long
def test_held_out_tasks_are_played_if_eval_every_is_set(agents):
    config = ExperimentConfig(TrainingConfig(batch_size=2, num_epochs=1, eval_episodes=2), eval_every=1, **PAIR)
    result = GRPOTrainer(LLMEnvironment(agents[0]), Letters(), config).train()
    assert result.before is not None and result.after is not None


def test_different_environments_are_mixed_and_equal_ones_merged(agents):
    policy = LLMEnvironment(agents[0])
    mixed = GRPOTrainer(policy, [Letters(5), Letters(5), Letters(9), MathReasoningEnvironment()], ExperimentConfig(**SHORT))
    assert list(mixed.env.environments) == ["Letters_0", "Letters_1", "MathReasoningEnvironment"]
    assert [env.env.simulated.modulus for env in list(mixed.env.environments.values())[:2]] == [5, 9]
    assert GRPOTrainer(policy, [Letters(), Letters()], ExperimentConfig(**SHORT)).env.env.simulated.modulus == 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: TrainingConfig(num_epoch=3), "TrainingConfig has no setting 'num_epoch'; did you mean 'num_epochs'"),
        (lambda p: TrainingConfig(zebra=True), r"has no setting 'zebra'; help\(TrainingConfig\) lists its settings"),
        (
            lambda p: PPOTrainer(p, Letters(), ExperimentConfig(TrainingConfig(num_epochs=3, num_iterations=4))),
            "num_epochs and num_iterations are the same setting",
        ),
        (lambda p: ExperimentConfig(training=PPOConfig()), r"training= is a TrainingConfig\(...\), got PPOConfig"),
        (
            lambda p: PPOTrainer(p, Letters(), ExperimentConfig(TrainingConfig(algorithm="grpo"))),
            "algorithm='grpo', but this is the trainer of 'ppo'",
        ),
        (lambda p: PPOTrainer(p, Letters(), GRPOConfig()), r"config= is an ExperimentConfig\(...\), got GRPOConfig"),
        (lambda p: PPOTrainer(p, Letters(), device="cuda"), "device='cuda', but JAX runs on cpu: leave device out"),
        (lambda p: LLMEnvironment(p.agent, device="cuda:1"), "device='cuda:1', but JAX runs on cpu"),
        (lambda p: ExperimentConfig(max_new_token=3), "no setting 'max_new_token'; did you mean 'max_new_tokens'"),
        (lambda p: ExperimentConfig(use_bf16=True), r"no setting 'use_bf16'; help\(jmarl.TrainConfig\) lists"),
        (lambda p: ExperimentConfig(frozen_agents=()), "'frozen_agents' is set by the trainer and its policies"),
        (lambda p: PPOTrainer(p.agent, Letters()), "policy 0 is a"),
        (lambda p: PPOTrainer(p, []), "eval_envs has no environment"),
        (lambda p: PPOTrainer([p, p], Letters()), "1 agents and the team has 2"),
        (lambda p: LLMEnvironment(p.agent, mode="both"), "'both' is not a valid EnvironmentMode"),
    ],
)
def test_mistakes_raise(agents, make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        trainer = make(LLMEnvironment(agents[0]))
        trainer.train(1)
