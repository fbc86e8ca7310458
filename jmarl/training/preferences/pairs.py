"""Read, write and select preference pairs and trajectories (host code: text and numbers, no jax).

A pair is two joint actions on one item, of which the first was preferred; for a team of one, two completions. `load_pairs` and
`load_trajectories` read lists of dicts, `datasets.Dataset`, `.json` and `.jsonl` files. The rows have Hugging Face's preference
columns (prompt, chosen, rejected; texts or lists of chat messages), or are MRLM's pairs or trajectories. Left out: truncation
(a text that does not fit the context is an error when it is encoded).
"""

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jmarl.envs.data import read_rows

Prompt = str | tuple[Mapping[str, str], ...]  # a text, or chat messages
Ids = Sequence[int]
Candidate = TypeVar("Candidate")


class SampledTokens(NamedTuple):
    """One agent's part of a sampled pair, as token ids."""

    prompt: Ids
    chosen: Ids
    rejected: Ids


class Pair(NamedTuple):
    """Two joint actions of N agents on one item."""

    prompts: tuple[Prompt, ...]  # [N]
    chosen: tuple[str, ...]  # [N]
    rejected: tuple[str, ...]  # [N]
    rewards: tuple[float, float] | None = None  # of chosen and rejected; None: unknown
    tokens: tuple[SampledTokens, ...] | None = None  # [N] for sampled pairs; None: the texts are encoded


class Trajectory(NamedTuple):
    """The observations and actions of one agent in one episode."""

    observations: tuple[Prompt, ...]  # one before each action, and perhaps one after the last
    actions: tuple[str, ...]
    reward: float = math.nan  # sum over the episode; NaN: unknown
    agent: str = ""  # who wrote the actions, in data of a team; empty: unknown


# --- reading and writing -----------------------------------------------------------------------------------------------


def load_pairs(source: Any, num_agents: int = 1) -> list[Pair]:
    """Return the pairs in a file, a data set or a list of dicts with `prompt`, `chosen` and `rejected`.

    For one agent these are texts or lists of chat messages; without a prompt, chosen and rejected are whole conversations that
    differ in their last message. For a team, chosen and rejected are lists of num_agents texts, and the prompt is one for all
    agents or also a list. Rows with equal chosen and rejected are left out, with a warning.
    """
    pairs = [pair_of(row, i, num_agents) for i, row in enumerate(read_rows(source))]
    equal = [i for i, pair in enumerate(pairs) if pair.chosen == pair.rejected]
    if len(equal) == len(pairs):
        reason = " that differ: chosen and rejected are the same" if pairs else ""
        raise ValueError(f"{source_name(source)} holds no pairs{reason}")
    if equal:
        warnings.warn(
            f"{len(equal)} of {len(pairs)} pairs of {source_name(source)} are left out (row {equal[0]} is the first): "
            "chosen and rejected are the same",
            stacklevel=2,
        )
    return [pair for pair in pairs if pair.chosen != pair.rejected]


def source_name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else f"the {type(source).__name__} given"


def pair_of(row: Mapping, number: int, num_agents: int) -> Pair:
    """Return the pair of a row. Raises ValueError with the number of the row and its columns."""
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if not missing and "prompt" not in row and not is_chat(row["chosen"]):
        missing = ["prompt"]
    if missing:
        columns = [name for name, value in row.items() if value is not None]
        raise ValueError(f"row {number} has no {', '.join(missing)}: pairs need prompt, chosen and rejected; it has {columns}")
    prompt: Any = row.get("prompt")
    texts = {name: row[name] for name in ("chosen", "rejected")}
    if num_agents == 1:
        prompts = [shared_beginning(row["chosen"], row["rejected"], number) if prompt is None else prompt]
        more = ", or for a team (load_pairs with num_agents) a list of texts"
        completions = [(completion_text(value, number, name, more),) for name, value in texts.items()]
    else:
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and not is_chat(prompt)
        prompts = list(prompt) if several else [prompt] * num_agents
        if len(prompts) != num_agents:
            raise ValueError(f"row {number}: prompt has {len(prompts)} entries for {num_agents} agents")
        completions = [team_texts(value, number, name, num_agents) for name, value in texts.items()]
    rewards: Any = (row.get("metadata") or {}).get("rewards")
    if rewards is not None:
        rewards = tuple(map(float, rewards))
    return Pair(tuple(prompt_of(value, number) for value in prompts), *completions, rewards=rewards)


def is_chat(value: Any) -> bool:
    """Return whether a value is a list of chat messages."""
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def prompt_of(value: Any, number: int) -> Prompt:
    """Return a column of a row as a prompt. Raises ValueError if it is neither a text nor a list of messages."""
    if isinstance(value, str):
        return value
    if not is_chat(value) or not value or not all(isinstance(m.get("role"), str) and "content" in m for m in value):
        raise ValueError(f"row {number}: a prompt is a text or a list of messages with role and content; got {value!r:.80}")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def completion_text(value: Any, number: int, name: str, more: str = "") -> str:
    """Return a completion: a text, or the content of the last message of a list. more: what else is allowed, for the error."""
    if is_chat(value) and value:
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise ValueError(f"row {number}: {name} is a text or a list of messages{more}; got {value!r:.80}")
    return value


def shared_beginning(chosen: Any, rejected: Any, number: int) -> Any:
    """Return all messages but the last of two conversations. Raises ValueError if these differ."""
    if not is_chat(rejected) or list(chosen[:-1]) != list(rejected[:-1]) or len(chosen) < 2:
        raise ValueError(f"row {number} has no prompt, and its conversations differ before their last messages")
    return chosen[:-1]


def team_texts(texts: Any, number: int, name: str, num_agents: int) -> tuple[str, ...]:
    """Return a column with one text per agent. Raises ValueError if it is something else."""
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"row {number}: {name} is a list of {num_agents} texts, one per agent; got {texts!r:.80}")
    if len(texts) != num_agents:
        raise ValueError(f"row {number}: {name} has {len(texts)} texts for {num_agents} agents: give one text per agent")
    return tuple(texts)


def save_pairs(path: str | os.PathLike, pairs: Sequence[Pair]) -> None:
    """Write pairs as `load_pairs` reads them: to a .jsonl file one per line, to any other file as a JSON list."""
    rows = [row_of(pair) for pair in pairs]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = lines if str(path).endswith(".jsonl") else json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
    Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate, as JSON writes it: \ud800


def row_of(pair: Pair, with_tokens: bool = False) -> dict[str, Any]:
    """Return a pair as a row that `load_pairs` reads. It ignores the tokens."""
    columns = {"prompt": pair.prompts, "chosen": pair.chosen, "rejected": pair.rejected}
    row: dict[str, Any] = {name: x[0] if len(x) == 1 else x for name, x in columns.items()}
    if with_tokens:
        row["tokens"] = pair.tokens
    return row if pair.rewards is None else row | {"metadata": {"rewards": pair.rewards}}


def load_trajectories(source: Any, min_reward: float | None = None) -> list[Trajectory]:
    """Return the trajectories in a file, a data set or a list of dicts.

    A row has MRLM's observations (with messages), actions and rewards, or a prompt and a completion (texts or chat messages).
    min_reward: leave out trajectories with a smaller sum of rewards.
    """
    trajectories = [trajectory_of(row, i) for i, row in enumerate(read_rows(source))]
    if not trajectories:
        raise ValueError(f"{source_name(source)} holds no trajectories")
    if min_reward is None:
        return trajectories
    for i, trajectory in enumerate(trajectories):
        if math.isnan(trajectory.reward):
            raise ValueError(f"min_reward={min_reward} needs rewards, and row {i} has none")
    best = max(trajectory.reward for trajectory in trajectories)
    if best < min_reward:
        raise ValueError(f"min_reward={min_reward} leaves no trajectory: the best of {len(trajectories)} has {best:g}")
    return [trajectory for trajectory in trajectories if trajectory.reward >= min_reward]


def trajectory_of(row: Mapping, number: int) -> Trajectory:
    """Return the trajectory of a row. Raises ValueError with the number of the row."""
    if "completion" in row and "prompt" in row:
        reward = math.nan if row.get("reward") is None else float(row["reward"])
        action = completion_text(row["completion"], number, "completion")
        return Trajectory((prompt_of(row["prompt"], number),), (action,), reward)
    missing = [name for name in ("observations", "actions") if name not in row]
    if missing:
        raise ValueError(
            f"row {number} has no {', '.join(missing)}: trajectories have observations and actions (and rewards), texts prompt "
            f"and completion; it has {list(row)}"
        )
    actions = tuple(completion_text([a] if isinstance(a, Mapping) else a, number, "an action") for a in row["actions"])
    contents = [x["messages"] if isinstance(x, Mapping) else x for x in row["observations"]]
    observations = new_observations(contents, actions, number)
    if not actions or len(observations) not in (len(actions), len(actions) + 1):
        raise ValueError(
            f"row {number}: {len(observations)} observations for {len(actions)} actions; give one observation before each "
            "action, and at most one after the last"
        )
    rewards = [r["value"] if isinstance(r, Mapping) else r for r in row.get("rewards", [])]
    metadata = row.get("metadata") or {}  # as `jmarl collect` writes it
    agent = f"agent {metadata['agent']}" if "agent" in metadata else ""
    return Trajectory(observations, actions, float(sum(rewards)) if rewards else math.nan, metadata.get("role", agent))


def new_observations(observations: Sequence[Any], actions: Sequence[str], number: int) -> tuple[Prompt, ...]:
    """Return what each observation adds to the conversation before it: some logs repeat the whole conversation each time.

    Empty observations, which MRLM writes after the end of an episode, are left out.
    """
    before: list[str] = []  # contents of the conversation so far; empty if observations do not repeat it
    new = []
    for i, observation in enumerate(observations):
        if not observation:
            continue
        contents = [] if isinstance(observation, str) else [m["content"] for m in observation]
        repeats = bool(before) and contents[: len(before)] == before
        rest = observation[len(before) :] if repeats else observation
        if rest:
            new.append(prompt_of(rest, number))
        before = [*contents, *actions[i : i + 1]] if contents and (repeats or not i) else []
    return tuple(new)


def split_by_prompt(pairs: Sequence[Pair], every: int) -> tuple[list[Pair], list[Pair]]:
    """Split pairs into those to train on and those held out: the pairs of every n-th prompt.

    Pairs of one prompt share completions, so they stay together. If all pairs have one prompt, every n-th pair is held out.
    """
    prompts = [repr(pair.prompts) for pair in pairs]
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    numbers = [number[prompt] for prompt in prompts] if len(number) > 1 else range(len(pairs))
    training = [pair for pair, i in zip(pairs, numbers, strict=True) if i % every]
    held_out = [pair for pair, i in zip(pairs, numbers, strict=True) if i % every == 0]
    return (training, held_out) if training else (held_out, [])


# --- selecting ---------------------------------------------------------------------------------------------------------


def select(rewards: Sequence[float], selection: str, limit: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Return pairs (i, j) of the completions of one prompt with r_i > r_j. An invalid reward (NaN) is in no pair.

    Args:
        rewards: of the completions.
        selection: the order of the pairs, see `Preference.pair_selection`; reward_gap puts the largest gap first.
        limit: how many pairs to return at most; 0: all.
        rng: for the order `random`.
    """
    numbers = range(len(rewards))
    pairs = [(i, j) for i in numbers for j in numbers if rewards[i] > rewards[j]]
    return first_of(pairs, selection, lambda pair: rewards[pair[1]] - rewards[pair[0]], limit, rng)


def select_against(
    own: Sequence[float], other: Sequence[float], selection: str, limit: int, rng: np.random.Generator
) -> list[tuple[int, bool]]:
    """Compare the i-th completion of a team with the i-th one of a comparator, and return (i, whether the team's won).

    Ties and invalid rewards are left out. comparator_reward puts the comparator's best completions first, and of equal ones the
    largest gap.

    Args:
        own: rewards of the team's completions.
        other: rewards of the comparator's completions.
        selection: see `select`.
        limit: see `select`.
        rng: see `select`.
    """

    def key(i: int) -> tuple[float, float]:
        return (-other[i] if selection == "comparator_reward" else 0.0, -abs(own[i] - other[i]))

    decided = [i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a > b or a < b]
    return [(i, own[i] > other[i]) for i in first_of(decided, selection, key, limit, rng)]


def first_of(
    candidates: list[Candidate], selection: str, key: Callable[[Candidate], Any], limit: int, rng: np.random.Generator
) -> list[Candidate]:
    """Return the first `limit` candidates (0: all) in random order (`random`), as they are (`all`), or else sorted by key."""
    if selection == "random":
        candidates = [candidates[k] for k in rng.permutation(len(candidates))]
    elif selection != "all":
        candidates = sorted(candidates, key=key)
    return candidates[:limit] if limit else candidates


def replay_weights(count: int, replay: str, k: int = 1, decay: float = 1.0) -> np.ndarray:
    """Return the probability that a pair is drawn from each of `count` rounds, the oldest first.

    replay: only the newest (`current`), the newest k alike (`nearest_k`), `all` alike, or `lambda_decay`: decay^age / sum
    decay^age, where the newest has age 0 and 0^0 = 1.
    """
    age = np.arange(count)[::-1]
    if replay == "lambda_decay":
        weights = np.power(float(decay), age)
    else:
        weights = (age < {"current": 1, "nearest_k": k, "all": count}[replay]).astype(float)
    return weights / weights.sum()
