"""What MRLM's trainers share: policies and settings in, `jmarl.train` or `jmarl.fit` called.

A policy in mode SERVER learns, one in mode CLIENT is frozen; a list of policies is a team. One policy in an environment for
several agents plays all roles against itself, with one set of weights; in a debate the sides are swapped too. Prompts are
messages in the chat template if all policies have one, and begin with the system prompt of their policy.

As in MRLM, the policies are trained in `eval_envs`; `evaluate` plays held-out tasks (split `eval`) of the same environments.
Equal environments are merged into one, because episodes are played side by side anyway; different ones become a mixture with
equal weights. An episode ends when it is done, at the latest after the `max_turns` of its environment; if that is None, after
`max_episode_length`, else 16 turns. Several turns form a chain: each completion continues with a single one.

After training each policy has its new weights. Left out: mini-batches by tokens, mixed precision by GradScaler.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.comlrl.trained import TrainedTeam
from jmarl.config import TrainConfig
from jmarl.envs.base import TextEnvironment
from jmarl.envs.debate.debate import Debate
from jmarl.envs.messages import MAX_TURNS, EnvironmentMode, SimulatedEnvironment, as_text_environment
from jmarl.envs.mixture import Mixture
from jmarl.envs.vector import LockStep
from jmarl.evaluation.evaluate import evaluate, numbers
from jmarl.mrlm import config as sections
from jmarl.mrlm.config import SAVED_IN, ExperimentConfig
from jmarl.mrlm.core.llm_environment import LLMEnvironment, check_device
from jmarl.mrlm.core.system_prompts import WithSystemPrompts
from jmarl.mrlm.keys import KEYS
from jmarl.runs.checks import check_settings, check_team, environment_of
from jmarl.runs.experiment import wandb_config
from jmarl.runs.records import TrainResult
from jmarl.runs.start import place_team
from jmarl.runs.train import train
from jmarl.team import agents_of, policies
from jmarl.types import TeamState

NUM_TASKS, NUM_EPISODES = 1000, 20  # of training and of an evaluation


class Policies(TrainedTeam):
    """The policies of a trainer, their team and parameters: what all four trainers share.

    Attributes:
        section: of `ExperimentConfig` that the trainer reads.
        algorithm, team_algorithm: the rows of the table of algorithms for one policy and for a team.
        defaults: by the names of `TrainConfig`.
    """

    section: str
    algorithm: str
    team_algorithm: str
    config: TrainConfig
    defaults: Mapping[str, Any] = {}

    def __init__(
        self,
        policy_env: LLMEnvironment | Sequence[LLMEnvironment],
        config: Any = None,
        device: Any = None,
        checkpoint_dir: str | os.PathLike | None = None,
    ):
        check_device(device)
        self.policy_envs = [policy_env] if isinstance(policy_env, LLMEnvironment) else list(policy_env)
        for i, policy in enumerate(self.policy_envs):
            if not isinstance(policy, LLMEnvironment):
                raise TypeError(f"policy {i} is a {type(policy).__name__}: give an LLMEnvironment(model, mode=...)")
        config = config.experiment() if isinstance(config, PPOConfig) else config
        if config is not None and not isinstance(config, ExperimentConfig):
            raise TypeError(f"config= is an ExperimentConfig(...), got {type(config).__name__}")
        self.experiment = config or ExperimentConfig()
        if checkpoint_dir is not None:
            self.experiment = self.experiment.with_directory(os.fspath(checkpoint_dir))
        self.global_step = self.epoch = 0
        self.chat = all(policy.chat for policy in self.policy_envs)

    def _resolve(self, num_roles: int, **defaults: Any) -> TrainConfig:
        """Return the settings. Sets those outside of `TrainConfig`: `num_tasks`, `num_held_out`, `min_reward`, `wandb`;
        the first three are None if they are not given."""
        frozen = tuple(i for i, policy in enumerate(self.policy_envs) if policy.mode is EnvironmentMode.CLIENT)
        if len(frozen) == len(self.policy_envs):
            raise ValueError("no policy is trained: all are in mode CLIENT; give one mode=EnvironmentMode.SERVER")
        algorithm = self.algorithm if num_roles == 1 else self.team_algorithm
        every = {"algorithm": algorithm, "chat": self.chat, "frozen_agents": frozen}
        config, other = self.experiment.resolve(self.section, {**self.defaults, **every, **defaults})
        self.num_tasks, self.num_held_out = other.get("num_tasks"), other.get("held_out")
        self.min_reward, self.wandb = other.get("min_reward"), wandb_config(other)
        return config

    def _make_team(self, num_roles: int) -> None:
        """Make the team of the policies; one policy plays all roles."""
        agents = [policy.agent for policy in self.policy_envs]
        shared = len(agents) == 1 and num_roles > 1
        agents = agents * num_roles if shared else agents
        self.config, self.team, self._params = place_team(agents, self.config, shared)

    @property
    def policy_env(self) -> LLMEnvironment:
        """The first policy."""
        return self.policy_envs[0]

    def _config_of(self, num_iterations: int | None, eval_every: int | None, save_every: int | None) -> TrainConfig:
        """Return the settings of a call of `train`, whose arguments override those of the trainer."""
        given: dict[str, Any] = {"num_updates": num_iterations, "eval_every": eval_every, "save_every": save_every}
        given = {name: value for name, value in given.items() if value is not None}
        if save_every and not self.config.run.output_dir:
            given["output_dir"] = SAVED_IN
        return self.config.replace(**given)

    def _learned(self, state: TeamState) -> None:
        """Take the weights of a finished training, and give them to the policies."""
        self.epoch += int(state.step)
        self.global_step = self.epoch * self.config.optimizer.num_epochs * self.config.optimizer.num_minibatches
        self._params = policies(state)
        agents = agents_of(self.team, self._params)
        for policy, agent in zip(self.policy_envs, agents, strict=False):  # one policy may play several roles
            policy.learned(agent)


BaseTrainer = Policies  # MRLM's name


class Trainer(Policies):
    """Trains policies in environments.

    Args:
        policy_env: an `LLMEnvironment`, or a list with one per role.
        eval_envs: an environment or a list of them.
        config: the settings: an `ExperimentConfig`, or the `PPOConfig` of `algorithms.ppo`.
        device: the platform of JAX, which chooses the device; another one is an error.
        checkpoint_dir: the run's directory.
    """

    def __init__(
        self,
        policy_env: LLMEnvironment | Sequence[LLMEnvironment],
        eval_envs: Any,
        config: Any = None,
        device: Any = None,
        checkpoint_dir: str | os.PathLike | None = None,
    ):
        super().__init__(policy_env, config, device, checkpoint_dir)
        env = self._merge(eval_envs)
        # One policy plays all roles; an `Environment` of the user may not say how many.
        num_roles = getattr(env, "num_agents", 1) if len(self.policy_envs) == 1 else len(self.policy_envs)
        turns = getattr(env, "max_turns", 1)
        self.config = self._resolve(num_roles, num_turns=turns, **sampling_of(self.policy_envs))
        if turns < self.config.episodes.num_turns:  # no episode is longer, and programs would be compiled for more
            self.config = self.config.replace(num_turns=turns, **({} if turns > 1 else {"branching": "tree"}))
        self.env = with_system_prompts(env, self.policy_envs, self.config)
        check_settings(self.config)
        self._make_team(num_roles)
        check_team(self.team, self.config)
        environment_of(self.team, self.env, self.config)  # raises for an environment that does not fit

    def _merge(self, envs: Any) -> Any:
        return merge_environments(envs, self.experiment.num_turns or MAX_TURNS, self.chat, len(self.policy_envs) == 1)

    def train(
        self, num_iterations: int | None = None, eval_every: int | None = None, save_every: int | None = None
    ) -> TrainResult:
        """Make `num_iterations` updates (default, as of the others: as in the settings). Afterwards the trainer holds the
        trained weights.

        Held-out tasks are played if `eval_every` is set; checkpoints are written if `save_every` is. A second call continues
        from these weights with a new optimizer and schedule, on the same tasks, and moves the files of the first run to
        `earlier_1`. After an interruption it is refused.
        """
        cfg = self._config_of(num_iterations, eval_every, save_every)
        held_out = self.env.tasks("eval", self.num_held_out or NUM_EPISODES, cfg.run.seed) if cfg.run.eval_every else ()
        tasks = self.env.tasks("train", self.num_tasks or NUM_TASKS, cfg.run.seed)
        result = train(self.team, self.env, tasks, cfg, params=self.params, eval_items=held_out, wandb_config=self.wandb)
        self._learned(result.state)
        return result

    def evaluate(self, num_episodes: int | None = None) -> dict[str, float]:
        """Return the mean return over held-out tasks (default: eval_episodes of them, else 20) with its 95 % interval, and the
        parts of the reward and measures."""
        tasks = self.env.tasks("eval", num_episodes or self.num_held_out or NUM_EPISODES, self.config.run.seed)
        return numbers(evaluate(self.team, self.params, tasks, self.env, self.config))


class PPOConfig(sections.PPOConfig, sections.TrainingConfig, entries=KEYS["training"] | KEYS["ppo"]):
    """The settings of `TrainingConfig` and of the section `PPOConfig`, under their names."""

    def experiment(self) -> ExperimentConfig:
        """Return the same settings in sections."""
        training, ppo = ({key: getattr(self, key) for key in KEYS[name]} for name in ("training", "ppo"))
        return ExperimentConfig(training=sections.TrainingConfig(**training), ppo=sections.PPOConfig(**ppo))


def sampling_of(policy_envs: Sequence[LLMEnvironment]) -> dict[str, Any]:
    """Return the sampling settings of the policies. Raises ValueError unless they agree."""
    first = policy_envs[0].sampling
    for i, policy in enumerate(policy_envs):
        if policy.sampling != first:
            raise ValueError(
                f"policies 0 and {i} have the generation settings {first} and {policy.sampling}: all policies sample alike"
            )
    return first


def with_system_prompts(env: Any, policy_envs: Sequence[LLMEnvironment], cfg: TrainConfig) -> Any:
    """Return an environment whose prompts begin with the system prompts of the policies, if there are any."""
    texts = [policy.system_prompt for policy in policy_envs]
    if texts == [None] * len(texts):
        return env
    roles = enumerate(texts * (env.num_agents // len(texts)))
    prompts = [None if text is None else (text, bool(cfg.episodes.chat_settings.of(role))) for role, text in roles]
    return WithSystemPrompts(env, prompts, cfg.episodes.history == "append")


def merge_environments(envs: Any, max_turns: int = MAX_TURNS, chat: bool = False, self_play: bool = False) -> Any:
    """Return one environment, or a mixture of several.

    max_turns: the limit of those of MRLM's kind that set none. chat: whether agents read their observations as chat messages.
    self_play: whether one policy plays all roles; the sides of a debate are then swapped.
    """
    unmerged = list(envs) if isinstance(envs, list | tuple) else [envs]
    if not unmerged:
        raise ValueError("eval_envs has no environment")
    for i, env in enumerate(unmerged):
        known = isinstance(env, TextEnvironment | SimulatedEnvironment) or callable(getattr(env, "observe", None))
        if isinstance(env, type) or not known:
            kind = f"the class {env.__name__}" if isinstance(env, type) else f"a {type(env).__name__}"
            raise TypeError(f"environment {i} of eval_envs is {kind}: give an environment, such as MathReasoningEnvironment()")
    if len(unmerged) > 1:
        unmerged = list({identity_of(env): env for env in unmerged}.values())
    if self_play:
        unmerged = [env.swapped_sides() if isinstance(env, Debate) and env.num_agents > 1 else env for env in unmerged]
    names = [type(env).__name__ for env in unmerged]
    numbered = [f"{name}_{names[:i].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]
    vectorized = [
        env if callable(getattr(env, "observe", None)) else LockStep(as_text_environment(env, max_turns, chat))
        for env in unmerged
    ]
    return Mixture(dict(zip(numbered, vectorized, strict=True))) if len(vectorized) > 1 else vectorized[0]


def identity_of(env: Any) -> Any:
    """Return a key that is the same for equal environments only."""
    try:
        return pickle.dumps(env)
    except (pickle.PicklingError, TypeError, AttributeError):  # it holds a lock or a connection, and equals only itself
        return id(env)
