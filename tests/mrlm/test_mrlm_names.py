"""MRLM's names at their module paths, or the sentence that refuses them; its messages and environments as scripts use them."""

from __future__ import annotations

import importlib
import json

import pytest

from jmarl.envs.messages import SimulatedAdapter
from jmarl.mrlm import names
from jmarl.mrlm.algorithms.data import PreferenceDataset, PreferencePair, Trajectory, TrajectoryDataset, rows_of
from jmarl.mrlm.core.types import (
    BaseEnvironment,
    EnvironmentMode,
    GenerationConfig,
    Message,
    MessageRole,
    Observation,
    Reward,
    SimulatedEnvironment,
)
from jmarl.mrlm.environments import DebateEnvironment, DebateTopic, MathReasoningEnvironment, ToolUseEnvironment
from jmarl.mrlm.environments.code import CodeExecutionEnvironment, CodeProblemGenerator
from jmarl.mrlm.environments.math import MathProblemGenerator
from jmarl.mrlm.environments.tools import CalculatorTool, ToolRegistry, ToolUseTask
from jmarl.preferences.pairs import load_pairs, load_trajectories

CONFIGS = "ExperimentConfig TrainingConfig ModelConfig PPOConfig GRPOConfig DPOConfig SFTConfig DistributedConfig"
TYPES = "EnvironmentMode Message MessageRole Observation Reward"

# module -> its names in MRLM's package, documents and examples that work here
HERE = {
    "": f"{TYPES} BaseEnvironment SimulatedEnvironment LLMEnvironment BaseTrainer PPOTrainer GRPOTrainer DPOTrainer SFTTrainer "
    "ExperimentConfig TrainingConfig ModelConfig PPOConfig GRPOConfig DPOConfig SFTConfig",
    "core": f"{TYPES} BaseEnvironment SimulatedEnvironment LLMEnvironment GenerationConfig",
    "core.types": f"{TYPES} GenerationConfig",
    "core.base": "BaseEnvironment SimulatedEnvironment",
    "core.simulated_environment": "SimulatedEnvironment",
    "core.llm_environment": "LLMEnvironment",
    "config": f"{CONFIGS} GenerationConfig EvalEnvConfig EnvironmentConfig load_config save_config",
    "config.training_config": f"{CONFIGS} GenerationConfig EvalEnvConfig EnvironmentConfig",
    "config.loader": "load_config save_config",
    "config.parser": "load_config",
    "algorithms": "BaseTrainer PPOConfig PPOTrainer GRPOTrainer DPOTrainer PreferenceDataset PreferencePair SFTTrainer "
    "TrajectoryDataset Trajectory",
    "algorithms.base_trainer": "BaseTrainer",
    "algorithms.ppo": "PPOConfig PPOTrainer",
    "algorithms.ppo.config": "PPOConfig",
    "algorithms.ppo.trainer": "PPOTrainer",
    "algorithms.grpo": "GRPOTrainer",
    "algorithms.grpo.trainer": "GRPOTrainer",
    "algorithms.dpo": "DPOTrainer PreferenceDataset PreferencePair",
    "algorithms.dpo.trainer": "DPOTrainer",
    "algorithms.dpo.dataset": "PreferenceDataset PreferencePair",
    "algorithms.sft": "SFTTrainer TrajectoryDataset Trajectory",
    "algorithms.sft.trainer": "SFTTrainer",
    "algorithms.sft.dataset": "TrajectoryDataset Trajectory",
    "environments": "CodeExecutionEnvironment MathReasoningEnvironment DebateEnvironment DebateTopic RuleBasedJudge "
    "ToolUseEnvironment ToolRegistry CalculatorTool WebSearchTool PythonREPLTool",
    "environments.code": "CodeExecutionEnvironment CodeProblemGenerator",
    "environments.code.code_env": "CodeExecutionEnvironment",
    "environments.code.problem_generator": "CodeProblemGenerator",
    "environments.math": "MathReasoningEnvironment MathProblemGenerator",
    "environments.math.math_env": "MathReasoningEnvironment",
    "environments.debate": "DebateEnvironment DebateTopic RuleBasedJudge",
    "environments.debate.judge": "RuleBasedJudge",
    "environments.tools": "ToolUseEnvironment Tool ToolRegistry ToolUseTask CalculatorTool WebSearchTool PythonREPLTool "
    "FileSystemTool create_default_tool_registry",
    "environments.tools.tool_env": "ToolUseEnvironment Tool ToolRegistry",
    "environments.tools.tool_registry": "Tool ToolRegistry",
    "environments.tools.builtin_tools": "CalculatorTool FileSystemTool create_default_tool_registry",
    "models": "HFModelWrapper generate_response",
    "models.hf_model": "HFModelWrapper",
    "models.generation": "generate_response",
    "utils": "", "training": "", "algorithms.utils": "", "environments.base": "",
}  # fmt: skip
ELSEWHERE = {
    "": "RolloutBatch",
    "core.types": "RolloutBatch",
    "config": "merge_configs ConfigParser",
    "config.parser": "ConfigParser",
    "algorithms.ppo": "compute_ppo_loss compute_value_loss compute_entropy_bonus compute_ppo_total_loss",
    "algorithms.ppo.loss": "compute_gae",
    "algorithms.ppo.utils": "normalize_advantages",
    "algorithms.grpo.loss": "compute_grpo_loss normalize_rewards_in_groups",
    "algorithms.dpo.loss": "compute_dpo_loss",
    "algorithms.sft.loss": "compute_behavioral_cloning_loss",
    "environments.code": "PythonExecutor ExecutionResult",
    "environments.code.executor": "CodeExecutor",
    "environments.math.solver": "extract_answer verify_answer",
    "environments.debate": "DebateJudge DebatePosition",
    "environments.debate.judge": "LLMJudge",
    "models": "generate_with_log_probs",
}


@pytest.mark.parametrize("module", HERE)
def test_the_names_of_mrlm_are_at_their_module_paths(module):
    found = importlib.import_module(f"jmarl.mrlm.{module}".rstrip("."))
    for name in HERE[module].split():
        assert getattr(found, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'zebra'"):
        getattr(found, "zebra")  # noqa: B009


@pytest.mark.parametrize("module", ELSEWHERE)
def test_names_that_are_elsewhere_say_where(module):
    for name in ELSEWHERE[module].split():
        with pytest.raises(ImportError, match=f"has no {name} here: .{{20}}"):
            exec(f"from jmarl.mrlm{module and '.' + module} import {name}", {})


@pytest.mark.parametrize(
    "module",
    [
        *names.LEFT_OUT_MODULES,
        "distributed.ddp",
        "distributed.gpu_utils",
        "cli.commands",
        "client.environment_client",
        "data.buffer",
    ],
)
def test_modules_that_are_not_here_say_what_is(module):
    with pytest.raises(ModuleNotFoundError, match=r"jmarl.mrlm.[\w.]+ is not here: .{20}"):
        importlib.import_module(f"jmarl.mrlm.{module}")


def test_an_unknown_module_is_not_found():
    with pytest.raises(ModuleNotFoundError, match="No module named 'jmarl.mrlm.zebra'"):
        importlib.import_module("jmarl.mrlm.zebra")


def test_a_role_equals_its_text():
    message = Message(role=MessageRole.USER, content="a", metadata={"x": 1})
    assert message == Message("user", "a", {"x": 1}) and message.role is MessageRole.USER and message.role.value == "user"
    assert Message("critic", "a").role == "critic"
    assert json.dumps(message.to_dict()) == '{"role": "user", "content": "a", "metadata": {"x": 1}}'
    assert Message.from_dict(message.to_dict()) == message
    observation = Observation([message], state={"turn": 1}, done=True, info={"y": 2})
    assert Observation.from_dict(json.loads(json.dumps(observation.to_dict()))) == observation
    assert Reward.from_dict(Reward(0.5, {"a": 0.5}, info={"ok": True}).to_dict()) == Reward(0.5, {"a": 0.5}, {"ok": True})
    with pytest.raises(TypeError, match="state=True is not allowed: .* write done=True"):
        Observation([message], True)  # type: ignore[arg-type]


class Counting(SimulatedEnvironment):
    def __init__(self, mode=EnvironmentMode.CLIENT, max_turns=3):
        super().__init__(mode=mode, max_turns=max_turns)

    def reset(self):
        return Observation([Message(MessageRole.SYSTEM, "Count."), Message(MessageRole.ENVIRONMENT, "one")])

    def step(self, action):
        return Observation([action]), Reward(1.0, done=action.content == "stop")


def test_an_environment_is_a_client_with_mrlms_arguments():
    with Counting(max_turns=5) as env:
        assert env.max_turns == 5 and env.is_client_mode and not env.is_server_mode and env.get_state() == {}
        assert isinstance(env, BaseEnvironment) and repr(env) == "Counting(mode=client)"
        with pytest.raises(ValueError, match="an environment is never trained, so its mode is CLIENT"):
            env.set_mode(EnvironmentMode.SERVER)
    with pytest.raises(ValueError, match="never trained"):
        Counting(mode=EnvironmentMode.SERVER)
    assert SimulatedEnvironment(mode=EnvironmentMode.CLIENT).max_turns is None


def test_roles_reach_templates_as_texts_and_a_reward_may_end_an_episode():
    adapter = SimulatedAdapter(Counting(), chat=True)
    state, [prompt] = adapter.reset({"seed": 0}, None)  # type: ignore[arg-type]
    assert [(type(m["role"]), m["role"]) for m in prompt.messages] == [(str, "system"), (str, "user")]
    assert [adapter.step(state, [text], None).done for text in ("go", "stop")] == [False, True]  # type: ignore[arg-type]


def test_settings_of_sampling():
    assert GenerationConfig(max_new_tokens=5, do_sample=False).to_dict() == {"max_new_tokens": 5, "do_sample": False}
    with pytest.raises(TypeError, match="GenerationConfig has no setting 'max_tokens'; did you mean 'max_new_tokens'"):
        GenerationConfig(max_tokens=5)  # type: ignore[call-arg]


MATH = [{"question": f"What is {n} + {n}?", "answer": 2 * n, "difficulty": "easy"} for n in range(10)]
CODE = [
    {
        "id": f"p{n}",
        "prompt": f"Write f{n}, which adds {n}.",
        "function_name": f"f{n}",
        "test_cases": [((1,), 1 + n), ({"x": 2}, 2 + n)],
    }
    for n in range(10)
]


def test_problems_of_the_user_are_in_mrlms_fields(box):
    math = MathReasoningEnvironment(MATH, max_attempts=2, require_solution=True, mode=EnvironmentMode.CLIENT)
    assert (math.max_turns, math.steps_bonus, len(math.tasks("train")), len(math.tasks("eval"))) == (2, True, 8, 2)
    assert {task["answer"] for task in math.tasks("train") + math.tasks("eval")} == {str(2 * n) for n in range(10)}
    code = CodeExecutionEnvironment(problems=CODE, timeout=3.0, max_attempts=3, sandbox=box)
    assert (code.max_turns, code.limits.wall_s) == (3, 3.0)
    prompt = code.reset().messages[0].content
    name = code.current_task["entry_point"]
    assert name in prompt
    observation, reward = code.step(Message("assistant", f"def {name}(x):\n    return x"))
    assert reward.value < 2 and not observation.done
    observation, reward = code.step(Message("assistant", f"def {name}(x):\n    return x + {name[1:]}"))
    assert reward.value == 2 and observation.done and reward.components["solved"] == 1


def test_an_episode_is_played_by_messages():
    env = MathReasoningEnvironment(MathProblemGenerator(difficulty_range=(1, 1)), max_turns=2)
    observation = env.reset()
    assert env.current_task["question"] in observation.messages[0].content and not observation.done
    observation, reward = env.step(Message(MessageRole.ASSISTANT, "no idea"))
    assert reward.value == pytest.approx(-0.3) and "Try again" in observation.messages[0].content
    observation, reward = env.step(Message("assistant", f"Answer: {env.current_task['answer']}"))
    assert (reward.value, observation.done, observation.info["solved"]) == (1.0, True, 1.0)
    first = env.current_task
    assert env.reset() and env.current_task != first
    env.close()
    with pytest.raises(RuntimeError, match=r"call reset\(\) before step"):
        env.step(Message("assistant", "1"))


def test_arguments_for_one_thing_are_given_once():
    with pytest.raises(ValueError, match="problems and problem_generator are 2 arguments for one thing"):
        MathReasoningEnvironment(MATH, problem_generator=MathProblemGenerator())
    with pytest.raises(ValueError, match="max_attempts and max_turns are 2 arguments"):
        CodeExecutionEnvironment(CodeProblemGenerator(), max_attempts=2, max_turns=2)
    for make in (MathReasoningEnvironment, CodeExecutionEnvironment, DebateEnvironment, ToolUseEnvironment):
        with pytest.raises(ValueError, match="its mode is CLIENT"):
            make(mode=EnvironmentMode.SERVER)


def test_a_debate_has_max_turns_speeches_of_each_side_on_the_topics():
    topics = [DebateTopic(f"Claim {n}", "because", ["yes"], ["no"]) for n in range(10)]
    env = DebateEnvironment(topics, max_turns=3)
    assert (env.speeches, env.max_turns) == (3, 6)
    tasks = env.tasks("train", 10) + env.tasks("eval", 10)
    assert {task["motion"] for task in tasks} == {topic.proposition for topic in topics} and tasks[0]["pro_points"] == ["yes"]
    pro, con = env.reset()
    assert "Claim" in pro.messages[0].content and con is None
    with pytest.raises(ValueError, match="the opponent in mode CLIENT"):
        DebateEnvironment(opponent_model=object())


def test_tools_are_registered_and_tasks_are_the_users():
    registry = ToolRegistry()
    registry.register(CalculatorTool())
    assert [tool.name for tool in registry.list_tools()] == ["calculator"] and registry.get("zebra") is None
    assert registry.get_schemas()[0]["parameters"]["required"] == ["expression"]
    tasks = [
        ToolUseTask(question=f"What is {n} * 7?", required_tools=["calculator"], ground_truth=str(7 * n)) for n in range(5)
    ]
    env = ToolUseEnvironment(tool_registry=registry, tasks=tasks, max_turns=2, mode=EnvironmentMode.CLIENT)
    env.reset()
    assert env.current_task["tools"] == ["calculator"]
    _, reward = env.step(Message("assistant", f"<answer>{env.current_task['answer']}</answer>"))
    assert reward.components["correct"] == 0.5


def test_data_sets_are_saved_read_and_trained_on(tmp_path):
    chat = [Message(MessageRole.USER, "q")]
    pairs = PreferenceDataset(pairs=[PreferencePair(prompt=chat, chosen="a", rejected="b"), PreferencePair("p", "c", "d")])
    pairs.save(tmp_path / "pairs.json")
    assert list(PreferenceDataset.load(tmp_path / "pairs.json")) == list(pairs) and len(pairs.split(0.5)[1]) == 1
    read = load_pairs(rows_of(pairs))
    assert [(pair.prompts[0], pair.chosen[0]) for pair in read] == [(({"role": "user", "content": "q"},), "a"), ("p", "c")]
    episode = Trajectory([Observation(chat)], [Message("assistant", "a")], [Reward(0.5)], {"n": 1})
    data = TrajectoryDataset([episode])
    (tmp_path / "t.json").write_text(json.dumps({"trajectories": data.to_rows(), "num_trajectories": 1}))
    again = TrajectoryDataset.load(tmp_path / "t.json")
    assert again[0] == episode and (again.num_transitions(), again[0].total_reward(), len(again.filter_by_reward(0.6))) == (
        1,
        0.5,
        0,
    )
    (trajectory,) = load_trajectories(rows_of(data))
    assert (trajectory.actions, trajectory.reward) == (("a",), 0.5)
    assert TrajectoryDataset.of_texts([trajectory]).to_rows()[0]["actions"] == data.to_rows()[0]["actions"]
