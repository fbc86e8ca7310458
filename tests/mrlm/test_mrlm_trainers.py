"""MRLM's policies and the trainers beside PPO: conversations, system prompts, self-play, DPO and SFT in its sense."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest

from jmarl.config import Chat, TrainConfig
from jmarl.envs.messages import as_text_environment
from jmarl.envs.vector import LockStep
from jmarl.mrlm.algorithms import DPOTrainer, GRPOTrainer, PPOTrainer, SFTTrainer
from jmarl.mrlm.algorithms.trainer import with_system_prompts
from jmarl.mrlm.config import DPOConfig, ExperimentConfig, PPOConfig, SFTConfig, TrainingConfig
from jmarl.mrlm.core import EnvironmentMode, LLMEnvironment, SimulatedEnvironment
from jmarl.mrlm.core.types import Message, Observation, Reward
from jmarl.mrlm.environments.code import CodeExecutionEnvironment, CodeProblemGenerator
from jmarl.mrlm.environments.debate import DebateEnvironment, RuleBasedJudge

DAY = datetime.date(2026, 1, 2)


class Copy(SimulatedEnvironment):
    """Two turns: write the digit that was shown. Knows the answer."""

    reward_range = (0.0, 1.0)
    max_turns = 2

    def reset(self):
        self.turn, self.digit = 0, int(self.rng.integers(10))
        return Observation([Message("user", f"Write {self.digit}.")])

    def step(self, action):
        self.turn += 1
        right = float(action.content.strip() == str(self.digit))
        return Observation([Message("user", "Again.")], done=self.turn == 2), Reward(right / 2, {"right": right})

    def solve(self):
        return str(self.digit)


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    return [random_agent(tiny_config(max_positions=1024), tiny_tokenizer, seed) for seed in range(2)]


def policy(agent, **options) -> LLMEnvironment:
    return LLMEnvironment(agent, generation_config={"max_new_tokens": 3}, **options)


def config(algorithm: str, section=None, **training) -> ExperimentConfig:
    settings = TrainingConfig(algorithm=algorithm, **{"batch_size": 4, "learning_rate": 1e-2, **training})
    return ExperimentConfig(settings, **({} if section is None else {algorithm: section}), progress=False)


# --- policies -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_conversation_has_all_messages_and_rewards(agents):
    env = policy(agents[0], system_prompt="Be brief.", reward_fn=lambda messages: float(len(messages)))
    assert [m.role for m in env.reset().messages] == ["system"]
    first, reward = env.step(Message("user", "Hello"))
    assert [m.role for m in first.messages] == ["system", "user", "assistant"] and reward.value == 3.0
    env.set_reward_function(lambda messages: Reward(0.5, {"half": 0.5}))
    second, reward = env.step(Message("user", "More"))
    assert len(second.messages) == 5 and reward.components == {"half": 0.5}
    assert env.get_conversation() == list(second.messages)
    env.reset()
    assert env.step(Message("user", "Hello"))[0] == first  # equal conversations are equal
    env.set_reward_function(None)
    assert env.step(Message("user", "More"))[1].value == 0.0


@pytest.mark.long
def test_answers_follow_the_generation_config(agents):
    import transformers

    def answers(**options) -> set[str]:
        envs = [LLMEnvironment(agents[0], seed=seed, **options) for seed in range(4)]
        return {env.step(Message("user", "Hello"))[0].messages[-1].content for env in envs}

    greedy = transformers.GenerationConfig(max_new_tokens=3, do_sample=False)
    assert LLMEnvironment(agents[0], generation_config=greedy).sampling == {"max_new_tokens": 3, "temperature": 0.0}
    sampled = answers(generation_config={"max_new_tokens": 3})
    assert len(sampled) > 1 == len(answers(generation_config=greedy))
    assert max(map(len, sampled)) <= 3 * max(map(len, agents[0].tokenizer.get_vocab()))


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"max_new_token": 3}, "generation_config has no setting 'max_new_token'; did you mean 'max_new_tokens'"),
        ({"num_beams": 4}, "num_beams can only be 1: completions are sampled, never searched by beams"),
        ({"num_return_sequences": 2}, "num_return_sequences can only be 1: the group"),
    ],
)
def test_generation_settings_that_cannot_act_raise(agents, generation, message):
    with pytest.raises(ValueError, match=message):
        LLMEnvironment(agents[0], generation_config=generation)


def test_a_step_takes_a_message(agents):
    with pytest.raises(TypeError, match="step takes a message"):
        policy(agents[0]).step("Hello")


# --- rollouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_trained_policy_has_the_new_weights_and_talks_with_them(agents):
    env = policy(agents[0])
    trainer = GRPOTrainer(env, Copy(), config("grpo", max_grad_norm=1.0))
    assert trainer.config.episodes.chat and trainer.config.sampling.max_new_tokens == 3
    trainer.train(1)
    np.testing.assert_array_equal(env.agent.params["embed"], np.asarray(trainer.params[0]["embed"])[0])
    assert env.agent.name == agents[0].name
    env.step(Message("user", "Hello"))


@pytest.mark.long
def test_prompts_begin_with_the_system_prompt_in_the_template(agents):
    trainer = GRPOTrainer(policy(agents[0], system_prompt="Be brief."), Copy(), config("grpo"))
    states, [[prompt]] = trainer.env.reset(trainer.env.tasks("train", 1), np.random.default_rng(0))
    assert [m["role"] for m in prompt.messages] == ["system", "user"] and prompt.messages[0]["content"] == "Be brief."
    answer = trainer.env.step(states, [["4"]], np.random.default_rng(0))
    [[later]] = trainer.env.observe(answer.after)[1]
    assert later.messages[0] == prompt.messages[0]
    assert "eval/reward" in trainer.evaluate(2)


def test_without_a_template_the_system_prompt_is_text(agents, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    trainer = GRPOTrainer(policy(agents[0], tokenizer=tokenizer, system_prompt="Be brief."), Copy(), config("grpo"))
    _, [[prompt]] = trainer.env.reset(trainer.env.tasks("train", 1), np.random.default_rng(0))
    assert prompt.startswith("Be brief.\n\nWrite ") and not trainer.config.episodes.chat


def test_one_policy_debates_against_itself_on_both_sides(agents):
    env = policy(agents[0])
    trainer = PPOTrainer(env, DebateEnvironment(speeches=1, judge=RuleBasedJudge()), config("ppo", PPOConfig(gamma=0.9)))
    assert trainer.config.algorithm == "ippo" and trainer.team.num_agents == 2
    assert trainer.team.stacks[0].members == ((0, 1),)  # one set of weights
    tasks = trainer.env.tasks("train", 4)
    assert [task["swapped"] for task in tasks] == [False, True] * 2 and tasks[0]["motion"] == tasks[1]["motion"]


def test_policies_in_one_team_sample_alike(agents):
    other = LLMEnvironment(agents[1], generation_config={"max_new_tokens": 4})
    with pytest.raises(ValueError, match="policies 0 and 1 have the generation settings"):
        GRPOTrainer([policy(agents[0]), other], DebateEnvironment(speeches=1), config("grpo"))


@pytest.mark.parametrize("cls", [GRPOTrainer, DPOTrainer, SFTTrainer])
def test_a_frozen_policy_alone_cannot_be_trained(agents, cls):
    data = [{"prompt": "a", "chosen": "b", "rejected": "c"}] if cls is DPOTrainer else Copy()
    with pytest.raises(ValueError, match="no policy is trained"):
        cls(policy(agents[0], mode=EnvironmentMode.CLIENT), data, None)


# --- given data ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_dpo_prefers_the_chosen_completions(agents):
    pairs = [{"prompt": [{"role": "user", "content": f"{n} plus 1"}], "chosen": str(n + 1), "rejected": "no"} for n in range(4)]
    trainer = DPOTrainer(policy(agents[0], system_prompt="Count."), pairs, config("dpo", DPOConfig(beta=0.2)))
    assert trainer.config.preference.beta == 0.2 and trainer.data[0].prompts[0].messages[0]["content"] == "Count."
    before = trainer.evaluate()
    assert before["eval/margin"] == pytest.approx(0, abs=1e-4)  # the policy is the reference
    trainer.train(num_iterations=4)
    after = trainer.evaluate()
    assert after["eval/loss"] < before["eval/loss"] and after["eval/accuracy"] == 1.0


def test_dpo_of_a_team_is_of_joint_pairs(agents, tmp_path):
    """`comlrl/test_preference_trainers.py` trains one."""
    pairs = [{"prompt": "a", "chosen": ["b", "c"], "rejected": ["d", "e"]}] * 4
    trainer = DPOTrainer([policy(agent) for agent in agents], pairs, config("dpo"))
    assert trainer.config.algorithm == "madpo" and trainer.data[0].chosen == ("b", "c")
    trainer.save_model(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent_0", "agent_1"]


@pytest.mark.long
def test_sft_imitates_the_solver_and_models_the_world(agents):
    env = policy(agents[0])
    trainer = SFTTrainer(env, [Copy()], config("sft", SFTConfig(mode="combined")))
    assert (trainer.config.loss.bc_weight, trainer.config.loss.world_model_weight) == (0.5, 0.5)
    assert {t.reward for t in trainer.data} == {1.0}
    first, second = trainer.data[:2]
    assert first.observations[1].messages[0]["content"] == "Again." and second.observations[1] == "Done. Reward: 0.5"
    losses = trainer.train(num_iterations=8).losses
    assert losses[-1] < losses[0]
    assert 0 <= trainer.evaluate(2)["eval/reward"] <= 1
    np.testing.assert_array_equal(env.agent.params["embed"], np.asarray(trainer.params[0]["embed"])[0])


def test_max_trajectories_limits_given_and_collected_trajectories(agents):
    given = [{"prompt": "a", "completion": str(n)} for n in range(1200)]
    assert len(SFTTrainer(policy(agents[0]), [], config("sft"), trajectory_dataset=given).data) == 1200  # all by default
    limited = config("sft", SFTConfig(max_trajectories=3))
    trainer = SFTTrainer(policy(agents[0]), [], limited, trajectory_dataset=given)
    assert [t.actions for t in trainer.data] == [("0",), ("1",), ("2",)]
    assert len(SFTTrainer(policy(agents[0]), Copy(), limited).data) == 3
    assert len(SFTTrainer(policy(agents[0]), Copy(), config("sft", SFTConfig(max_trajectories=300))).data) == 300
    assert len(SFTTrainer(policy(agents[0]), Copy(), config("sft")).data) == 2 * 256  # two messages per task


def evaluations(directory) -> list[dict]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "eval/updates" in row]


@pytest.mark.long
def test_eval_every_evaluates_sft_on_held_out_trajectories(agents, tmp_path):
    """Given ones, or those that solvers write."""
    given = [{"prompt": "a", "completion": str(n)} for n in range(6)]
    settings = dict(num_epochs=2, eval_every=1, eval_episodes=2, save_every=0, checkpoint_dir=str(tmp_path))
    run = config("sft", SFTConfig(max_trajectories=4), **settings)
    solved = SFTTrainer(policy(agents[0]), Copy(), run)
    trainer = SFTTrainer(policy(agents[0]), [], run, trajectory_dataset=given)
    assert [(len(x.data), len(x.eval_data)) for x in (solved, trainer)] == [(4, 2)] * 2
    trainer.train()
    assert [row["eval/updates"] for row in evaluations(tmp_path)] == [0, 1, 2]
    assert all(np.isfinite(row["eval/loss"]) for row in evaluations(tmp_path))
    with pytest.raises(ValueError, match="held_out=20 leaves nothing to train on: data has 6 rows"):
        SFTTrainer(policy(agents[0]), [], config("sft", eval_every=1), trajectory_dataset=given)


@pytest.mark.long
def test_eval_episodes_counts_the_held_out_pairs_of_dpo(agents, tmp_path):
    pairs = [{"prompt": "a", "chosen": str(n), "rejected": "no"} for n in range(6)]
    few = config("dpo", eval_every=1, eval_episodes=2, num_epochs=1, checkpoint_dir=str(tmp_path), save_every=0)
    trainer = DPOTrainer(policy(agents[0]), pairs, few)
    assert (len(trainer.data), len(trainer.eval_data)) == (4, 2)
    trainer.train()
    assert [row["eval/updates"] for row in evaluations(tmp_path)] == [0, 1]
    given = DPOTrainer(policy(agents[0]), pairs, few, eval_dataset=pairs[:3])
    assert (len(given.data), len(given.eval_data)) == (6, 2)
    every = DPOTrainer(policy(agents[0]), pairs, config("dpo", eval_every=1), eval_dataset=pairs[:3])
    assert (len(every.data), len(every.eval_data)) == (6, 3)


def test_behavioral_cloning_sees_no_answers(agents):
    trainer = SFTTrainer(policy(agents[0]), Copy(), config("sft", SFTConfig(mode="behavioral_cloning", max_trajectories=2)))
    assert {len(t.observations) for t in trainer.data} == {1}


def test_low_rewards_are_left_out(agents):
    given = [{"prompt": "a", "completion": "b", "reward": reward} for reward in (0.1, 0.9)]
    keep = SFTConfig(filter_low_reward=True, min_reward_threshold=0.5)
    trainer = SFTTrainer(policy(agents[0]), [], config("sft", keep), trajectory_dataset=given)
    assert [t.reward for t in trainer.data] == [0.9]
    with pytest.raises(ValueError, match="no environment to evaluate in"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="min_reward=1.5 leaves no trajectory: the best has 1"):
        SFTTrainer(policy(agents[0]), Copy(), config("sft", SFTConfig(filter_low_reward=True, min_reward_threshold=1.5)))


@pytest.mark.long
def test_sft_imitates_both_sides_of_an_environment_for_two(agents):
    class Pair(Copy):
        roles = ("a", "b")

        def reset(self):
            return [super().reset()] * 2

        def step(self, action):
            observation, reward = super().step(action[0])
            return [observation] * 2, reward

        def solve(self):
            return [str(self.digit)] * 2

    trainer = SFTTrainer(policy(agents[0]), Pair(), config("sft", max_grad_norm=1.0))
    assert trainer.team.num_agents == 1 and len(trainer.data) == 2 * 2 * 256
    assert "eval/reward" in trainer.evaluate(2)


def test_sft_takes_one_policy(agents):
    with pytest.raises(ValueError, match="SFTTrainer trains one policy, got 2"):
        SFTTrainer([policy(agent) for agent in agents], Copy())


def test_sft_imitates_solutions_of_programming_problems(agents, box):
    env = CodeExecutionEnvironment(CodeProblemGenerator(difficulty_range=(1, 1)), sandbox=box)
    trainer = SFTTrainer(policy(agents[0]), env, config("sft", SFTConfig(mode="combined", max_trajectories=3)))
    assert len(trainer.data) == 3 and {t.reward for t in trainer.data} == {2.0}
    assert all(t.actions[0].startswith("```python\ndef ") and len(t.observations) == 2 for t in trainer.data)


def test_an_environment_without_a_solver_says_so(agents):
    class NoSolver(Copy):
        solve = SimulatedEnvironment.solve

    with pytest.raises(NotImplementedError, match="NoSolver has no solver of its own"):
        SFTTrainer(policy(agents[0]), NoSolver(), config("sft"))


def test_sft_is_evaluated_with_the_values_and_the_date_of_its_templates(agents, monkeypatch):
    given = dict(chat_template_kwargs={"enable_thinking": False}, chat_date="2026-01-02", progress=False)
    settings = ExperimentConfig(TrainingConfig(algorithm="sft", batch_size=4), sft=SFTConfig(max_trajectories=3), **given)
    trainer, calls = SFTTrainer(policy(agents[0]), Copy(), settings), []
    monkeypatch.setattr("jmarl.mrlm.algorithms.sft.evaluate", lambda *arguments: calls.append(arguments[-1].episodes))
    monkeypatch.setattr("jmarl.mrlm.algorithms.sft.numbers", lambda result: {})
    trainer.evaluate(2)
    assert calls[0].chat_settings == trainer.config.episodes.chat_settings == Chat(True, {"enable_thinking": False}, DAY)


def test_system_prompts_are_messages_for_the_agents_that_chat(agents):
    env = LockStep(as_text_environment(DebateEnvironment(speeches=1)))
    cfg = TrainConfig.of(chat=(False, True))
    one = with_system_prompts(env, [policy(agents[0], system_prompt="Be brief.")], cfg)
    two = with_system_prompts(env, [policy(agents[0]), policy(agents[1], system_prompt="Be long.")], cfg)
    assert one.prompts == [("Be brief.", False), ("Be brief.", True)] and two.prompts == [None, ("Be long.", True)]
