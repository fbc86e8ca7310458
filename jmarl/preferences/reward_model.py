"""Train a reward model of joint actions, and a team on its scores: marlhf and marlhf_iter.

A reward model is a decoder with a value head. It reads the prompts and completions of all agents as one text, and the value
after the last token is the score. It is trained on pairs by the Bradley-Terry loss (row reward_model), with the pairs of every
fifth prompt held out. Then the team is trained on its scores, scaled to mean 0 and std 1 over the training pairs, by any row
that learns from rollouts (`rl_algorithm`). The reward of the task determines which completion of a pair is preferred and is
logged, but the team never sees it. marlhf does this once, marlhf_iter in rounds. The newest reward model is written to
`reward_model/` of the output directory, for `load_reward_model`. Left out: several turns.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm, resolve
from jmarl.columns import join_numbers
from jmarl.config import TrainConfig, per_agent_values
from jmarl.config.paths import expand_home
from jmarl.envs.base import Answer, Environment, special_tokens
from jmarl.envs.data import Pair, Prompt
from jmarl.files.interrupt import Interrupted
from jmarl.files.run_directory import resolve_auto
from jmarl.models.agent import Agent
from jmarl.models.heads import without_value_head
from jmarl.models.hub.agents import load_agent, save_pretrained
from jmarl.models.hub.hf_format import read_finite
from jmarl.models.hub.peft import merge
from jmarl.models.hub.tokenize import by_agent
from jmarl.models.hub.weight_files import Tensor
from jmarl.models.lora import model_of
from jmarl.models.stack import to_host, unstack
from jmarl.preferences.encoding import (
    AgentTokens,
    Examples,
    encode_completions,
    encode_pairs,
    example_scores,
    text_of,
)
from jmarl.preferences.long_rows import fit_rows, long_rows, problem_of
from jmarl.preferences.pairs import split_by_prompt
from jmarl.sampling.generate import bucket
from jmarl.team import Team, make_team

Fit = Callable[..., Any]  # `jmarl.fit`, which stands in a later room

HELD_OUT = 5  # the pairs of every fifth prompt are held out
BATCH = 16  # joint actions or pairs that are scored at once
FOLDER = "reward_model"  # of an output directory
HEAD = "value_head.safetensors"  # of a reward model's directory, beside the files of its decoder


# --- the model ---------------------------------------------------------------------------------------------------------


class RewardModel(NamedTuple):
    """A model that scores joint actions by (value - mean) / std."""

    team: Team  # of one
    params: list[Any]
    algorithm: Algorithm
    mean: float = 0.0
    std: float = 1.0
    long_prompts: Any = "error"  # of joint actions longer than its context, as it was trained: an error, cut, or NaN (drop)

    def score(self, prompts: Sequence[Sequence[Prompt]], completions: Sequence[Sequence[str]]) -> np.ndarray:
        """Return the scores [B] of joint actions, given the prompts [N][B] and completions [N][B] of N agents."""
        lists = [prompts, completions, *prompts, *completions]
        if any(isinstance(x, str) for x in lists) or len({len(x) for x in lists[2:]}) > 1:
            raise ValueError("prompts and completions are [N][B]: for each agent a list of its texts, all of one length")
        if len(prompts) != len(completions):
            raise ValueError(f"prompts of {len(prompts)} agents and completions of {len(completions)}: give both of all agents")
        spec, read, tokens = self.team.stacks[0], [], []
        for i, texts in enumerate(zip(zip(*prompts, strict=True), zip(*completions, strict=True), strict=True)):
            prompt, *answers = joint_texts(*texts)
            read.append([prompt])
            tokens.append([encode_completions(spec, prompt, answers, False, f"joint action {i}", special=())])
        if self.long_prompts == "error" and (long := long_rows(self.team, tokens)):
            advice = "lower max_new_tokens, shorten the prompts, or set long_prompts='drop' or 'truncate_left'"
            raise ValueError(f"{problem_of(long, read, 'joint actions')}: {advice}")
        fitting = fit_rows(self.team, read, tokens, TrainConfig.of(long_prompts=self.long_prompts).episodes)
        values = np.full(len(tokens), np.nan, np.float32)
        if fitting:
            values[[*fitting]] = self.values([*fitting.values()])[:, 0]
        return (values - self.mean) / self.std

    def values(self, tokens: Sequence[Sequence[AgentTokens]]) -> np.ndarray:
        """Return the values [M, G], before they are scaled, of G joint actions after each prompt [M][1]."""
        full = len(tokens) - len(tokens) % BATCH
        parts = [(tokens[:full], BATCH), (tokens[full:], bucket(len(tokens) - full, 1))]
        values = [example_scores(self.team, self.params, Examples(part), size, self.algorithm) for part, size in parts if part]
        return np.concatenate(values)[:, 0]


def joint_texts(prompts: Sequence[Prompt], *completions: Sequence[str]) -> tuple[str, ...]:
    """Return what a reward model reads: one text of the prompts [N], and one for each joint action [N]."""
    return by_agent(map(text_of, prompts)), *("\n" + by_agent(texts) for texts in completions)


def joint_pair(pair: Pair) -> Pair:
    """Return a pair of N agents as a pair of one agent, which a reward model reads."""
    prompt, chosen, rejected = joint_texts(pair.prompts, pair.chosen, pair.rejected)
    return Pair((prompt,), (chosen,), (rejected,), pair.rewards)


def save_reward_model(directory: str | os.PathLike, model: RewardModel) -> None:
    """Write a reward model as a Hugging Face directory (adapters merged), and its value head, mean and std to a small file."""
    from safetensors.numpy import save_file

    (spec,), directory = model.team.stacks, Path(expand_home(directory))
    params = to_host(unstack(model.params[0], 0))
    (directory / HEAD).unlink(missing_ok=True)  # written last: without it the directory is incomplete
    weights = merge(spec.config, without_value_head(params))
    save_pretrained(directory, spec.config, weights, spec.tokenizer, spec.generation_config)
    metadata = {"mean": repr(model.mean), "std": repr(model.std), "compute_dtype": model.algorithm.compute_dtype}
    metadata["long_prompts"] = model.long_prompts
    save_file({name: np.asarray(params[name]) for name in ("value", "value_bias")}, directory / HEAD, metadata=metadata)
    shutil.copymode(directory / "config.json", directory / HEAD)  # safetensors lets only the owner read it


def load_reward_model(directory: str | os.PathLike) -> RewardModel:
    """Return the reward model in a directory that `save_reward_model` or a run of marlhf (`reward_model/`) wrote."""
    from safetensors import safe_open

    path = Path(expand_home(directory)) / HEAD
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} has no {HEAD}, the value head of a reward model: give {FOLDER}/ of a run's output directory, or a "
            "directory that jmarl.preferences.reward_model.save_reward_model wrote"
        )
    with safe_open(path, framework="numpy") as file:
        tensors = {name: Tensor((), partial(file.get_tensor, name), str(path)) for name in ("value", "value_bias")}
        head, metadata = (
            {name: np.asarray(read_finite(x, name, "")[None], np.float32) for name, x in tensors.items()},
            file.metadata(),
        )
    team, (params,) = make_team([load_agent(directory)])
    algorithm = resolve(TrainConfig.of(algorithm="reward_model", compute_dtype=metadata["compute_dtype"]))
    params = params | jax.tree.map(jnp.asarray, head)
    mean, std, long_prompts = float(metadata["mean"]), float(metadata["std"]), metadata.get("long_prompts", "error")
    return RewardModel(team, [params], algorithm, mean, std, long_prompts)


def fit_reward_model(
    agent: Agent,
    pairs: Sequence[Pair],
    cfg: TrainConfig,
    params: list[Any] | None = None,
    eval_pairs: Sequence[Pair] | None = None,
    *,
    fit: Fit,
) -> tuple[RewardModel, Any]:
    """Train a reward model on pairs of N agents.

    Args:
        agent: the decoder and its weights, from which training starts.
        pairs: to train on.
        cfg: with algorithm reward_model.
        params: parameters of an earlier reward model, from which training starts instead. They are consumed.
        eval_pairs: held out; None: the pairs of every fifth prompt.
        fit: `jmarl.fit`, which trains it.

    Returns:
        The model, and the result of `fit` with its accuracy on the held-out pairs before and after training.
    """
    if any(per_agent_values(cfg.episodes.chat)):
        raise ValueError("chat=True is not there for a reward model: it reads all agents' texts as one; leave it out")
    cfg = resolve_auto(cfg)
    team, start = make_team([agent], lora=cfg.lora.lora_rank > 0)
    if params is not None:
        start = params
    joint = [joint_pair(pair) for pair in pairs]
    training, held_out = (
        split_by_prompt(joint, HELD_OUT) if eval_pairs is None else (joint, [joint_pair(pair) for pair in eval_pairs])
    )
    result = fit(team, training, cfg, params=start, eval_data=held_out)
    if result.interrupted:
        raise Interrupted(f"while a reward model was trained, after {int(result.state.step)} of {cfg.run.num_updates} updates")
    model = RewardModel(result.team, [model_of(stack) for stack in result.state.stacks], resolve(cfg))
    tokens = encode_pairs(result.team, training, chat=False, special=())
    fitting = fit_rows(result.team, [pair.prompts for pair in training], tokens, cfg.episodes)
    values, long_prompts = model.values([*fitting.values()]), cfg.episodes.long_prompts
    return model._replace(mean=float(values.mean()), std=float(max(values.std(), 1e-6)), long_prompts=long_prompts), result


# --- runs on its scores ------------------------------------------------------------------------------------------------


class LearnedReward:
    """An environment whose reward is the score of a reward model, set later; the task's own is a measure named `task`."""

    def __init__(self, env: Environment):
        self.env, self.special_tokens = env, special_tokens(env)
        self.model: RewardModel | None = None

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[str | None]]]:
        states, prompts = self.env.reset(items, rng)
        return list(zip(states, zip(*prompts, strict=True), strict=True)), prompts

    def step(self, states: Sequence[Any], actions: Sequence[Sequence[str]], rng: np.random.Generator) -> Answer:
        assert self.model is not None
        states, prompts = zip(*states, strict=True)
        answer = self.env.step(list(states), actions, rng)
        task = answer.result
        total = np.where(task.invalid, np.nan, self.model.score(list(zip(*prompts, strict=True)), actions))
        rewards, invalid = np.repeat(total[:, None], task.rewards.shape[1], 1), np.isnan(total)
        unscored = np.flatnonzero(invalid & ~task.invalid).tolist()
        faults = {j: f"the reward model has no score for joint action {j}: is it too long for its context?" for j in unscored}
        measures = join_numbers({"task": task.total}, task.measures, task.parts)
        return answer._replace(
            result=task._replace(
                total=total, parts={}, invalid=invalid, rewards=rewards, faults=task.faults | faults, measures=measures
            )
        )

    def observe(self, after: Sequence[Any]) -> Any:
        raise ValueError("a reward model scores single turns: set num_turns to 1")
