"""Read, write and select preference pairs and trajectories (host code: text and numbers, no jax).

A pair is two joint actions on one item, of which the first was preferred; for a team of one, two completions. `load_pairs` and
`load_trajectories` read whatever `read_rows` reads: files, data sets, DataFrames, lists of dicts. `formats.FORMATS` has the
formats of the rows. Left out: rows that are too long for the context are found when they are encoded, see `long_rows`.
"""

import contextlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jmarl.config.paths import expand_home
from jmarl.config.validation import did_you_mean
from jmarl.envs.data import Pair, Prompt, Trajectory, shared_line
from jmarl.envs.rows import Rows, read_rows
from jmarl.models.hub.messages import is_chat, read_messages
from jmarl.preferences.formats import (
    TEXTS,
    format_of,
    prompt_of,
    single_pair,
    turns_of_row,
    warn_of_unread,
)

Candidate = TypeVar("Candidate")


# --- reading and writing -----------------------------------------------------------------------------------------------


def load_pairs(source: Rows, num_agents: int = 1) -> list[Pair]:
    """Return the pairs of a data set with `prompt`, `chosen` and `rejected`, in a file or anything else that `read_rows` reads.

    For one agent these are texts or lists of chat messages; without a prompt, chosen and rejected are whole conversations that
    differ in their last message, or texts that begin with the same words. For a team, chosen and rejected are lists of
    num_agents texts, and the prompt is one for all agents or also a list. Rows with equal chosen and rejected are left out,
    with a warning.
    """
    rows = read_rows(source)
    with naming_file(source):
        pairs = [pair_of(row, i, num_agents) for i, row in enumerate(rows)]
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
    warn_of_unread(rows, ["preference"] * len(rows), source_name(source))
    return [pair for pair in pairs if pair.chosen != pair.rejected]


@contextlib.contextmanager
def naming_file(source: Any) -> Iterator[None]:
    """Put the path of a file in front of an error about one of its rows."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(source, str | os.PathLike):
            error.args = (f"{os.fspath(source)}: {error}",)
        raise


def source_name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else f"the {type(source).__name__} given"


def pair_of(row: Mapping, number: int, num_agents: int) -> Pair:
    """Return the pair of a row. Raises ValueError with the number of the row and its columns."""
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if format_of(row, ("preference",), number) is None or missing:
        columns = [name for name, value in row.items() if value is not None]
        meant = "".join(did_you_mean(name, map(str, columns)) for name in missing)
        need = "pairs need prompt, chosen and rejected"
        raise ValueError(f"row {number} has no {', '.join(missing)}: {need}; it has {columns}{meant}")
    prompt: Any = row.get("prompt")
    texts = [row[name] for name in ("chosen", "rejected")]
    if num_agents == 1:
        shared, chosen, rejected = single_pair(prompt, texts[0], texts[1], number)
        prompts = (shared,)
    else:
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and not is_chat(prompt)
        prompts = tuple(prompt_of(value, number) for value in (prompt if several else [prompt] * num_agents))
        if len(prompts) != num_agents:
            raise ValueError(f"row {number}: prompt has {len(prompts)} entries for {num_agents} agents")
        names = zip(("chosen", "rejected"), texts, strict=True)
        chosen, rejected = (team_texts(value, number, name, num_agents) for name, value in names)
    rewards = metadata_of(row).get("rewards")
    if rewards is None:
        return Pair(prompts, chosen, rejected)
    if not isinstance(rewards, list | tuple) or len(rewards) != 2:
        raise ValueError(f"row {number}: the rewards of metadata are two numbers, of chosen and rejected; got {rewards!r:.80}")
    return Pair(prompts, chosen, rejected, rewards=(number_of(rewards[0], number), number_of(rewards[1], number)))


def metadata_of(row: Mapping) -> Mapping[str, Any]:
    """Return what jmarl has written about a row. Other values of this column, such as texts, are of others."""
    metadata = row.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def number_of(reward: Any, number: int) -> float:
    """Return a reward of a row as a number. Raises ValueError if it is something else."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise ValueError(f"row {number}: a reward must be a number; got {reward!r:.80}: correct it, or rename it") from None


def team_texts(texts: Any, number: int, name: str, num_agents: int) -> tuple[str, ...]:
    """Return a column with one text per agent. Raises ValueError if it is something else."""
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        messages = isinstance(texts, Sequence) and any(is_chat(x) or isinstance(x, Mapping) for x in texts)
        advice = ". Messages are read for one agent only: of a team give the text that each agent wrote" if messages else ""
        raise ValueError(f"row {number}: {name} is a list of {num_agents} texts, one per agent; got {texts!r:.80}{advice}")
    if len(texts) != num_agents:
        raise ValueError(f"row {number}: {name} has {len(texts)} texts for {num_agents} agents: give one text per agent")
    return tuple(texts)


def save_pairs(path: str | os.PathLike, pairs: Sequence[Pair]) -> None:
    """Write pairs as `load_pairs` reads them: to a .jsonl file one per line, to any other file as a JSON list."""
    rows = [row_of(pair) for pair in pairs]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = lines if str(path).endswith(".jsonl") else json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
    path = Path(expand_home(path))
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate, as JSON writes it: \ud800


def row_of(pair: Pair, with_tokens: bool = False) -> dict[str, Any]:
    """Return a pair as a row that `load_pairs` reads. It ignores the tokens."""
    columns = {"prompt": pair.prompts, "chosen": pair.chosen, "rejected": pair.rejected}
    row: dict[str, Any] = {name: x[0] if len(x) == 1 else x for name, x in columns.items()}
    if with_tokens:
        row["tokens"] = pair.tokens
    return row if pair.rewards is None else row | {"metadata": {"rewards": pair.rewards}}


def load_trajectories(source: Rows, min_reward: float | None = None) -> list[Trajectory]:
    """Return the trajectories of a data set, in a file or anything else that `read_rows` reads.

    A row has MRLM's observations (with messages), actions and rewards; a prompt and a completion (texts or chat messages);
    `messages`; a `text`; `conversations` as in ShareGPT; or instruction, input and output as in Alpaca. What the assistant
    writes is trained, and of a `text` everything; see `Trajectory`.
    min_reward: leave out trajectories with a smaller sum of rewards.
    """
    rows = read_rows(source)
    with naming_file(source):
        formats = [text_format(row, i) for i, row in enumerate(rows)]
        trajectories = [trajectory_of(row, kind, i) for i, (row, kind) in enumerate(zip(rows, formats, strict=True))]
    if not trajectories:
        raise ValueError(f"{source_name(source)} holds no trajectories")
    warn_of_unread(rows, formats, source_name(source))
    if min_reward is None:
        return trajectories
    for i, trajectory in enumerate(trajectories):
        if math.isnan(trajectory.reward):
            raise ValueError(f"min_reward={min_reward} needs rewards, and row {i} has none")
    best = max(trajectory.reward for trajectory in trajectories)
    if best < min_reward:
        raise ValueError(f"min_reward={min_reward} leaves no trajectory: the best of {len(trajectories)} has {best:g}")
    return [trajectory for trajectory in trajectories if trajectory.reward >= min_reward]


def text_format(row: Mapping, number: int) -> str:
    """Return the format of a row to imitate. Raises ValueError if it has none."""
    kind = format_of(row, TEXTS, number)
    if kind is None:
        columns = [name for name, value in row.items() if value is not None]
        raise ValueError(
            f"row {number} has nothing to imitate, but {columns}: give prompt and completion, messages, text, conversations, "
            "instruction and output, or observations and actions; a prompt alone is for algorithms with a reward"
        )
    return kind


def trajectory_of(row: Mapping, kind: str, number: int) -> Trajectory:
    """Return the trajectory of a row of a format. Raises ValueError with the number of the row."""
    if kind != "trajectory":
        reward = math.nan if row.get("reward") is None else number_of(row["reward"], number)
        observations, actions = turns_of_row(row, kind, number)
        return Trajectory(tuple(observations), tuple(actions), reward)
    for name in ("observations", "actions", "rewards"):
        if not isinstance(row.get(name) or [], list | tuple):
            raise ValueError(f"row {number}: {name} is a list; got {row[name]!r:.80}")
    if wrong := [x for x in row["observations"] if isinstance(x, Mapping) and "messages" not in x]:
        raise ValueError(
            f"row {number}: an observation is a text, a list of messages or a dict with messages; got {wrong[0]!r:.80}"
        )
    actions = tuple(action_of(action, number) for action in row["actions"])
    contents = [x["messages"] if isinstance(x, Mapping) else x for x in row["observations"]]
    observations = new_observations(contents, actions, number)
    if not actions or len(observations) not in (len(actions), len(actions) + 1):
        raise ValueError(
            f"row {number}: {len(observations)} observations for {len(actions)} actions; give one observation before each "
            "action, and at most one after the last"
        )
    rewards = [number_of(r.get("value") if isinstance(r, Mapping) else r, number) for r in row.get("rewards") or []]
    metadata = metadata_of(row)  # as `jmarl collect` writes it
    agent = f"agent {metadata['agent']}" if "agent" in metadata else ""
    return Trajectory(observations, actions, float(sum(rewards)) if rewards else math.nan, metadata.get("role", agent))


def action_of(action: Any, number: int) -> str:
    """Return the text of an action, which is a text or one message of the assistant."""
    if isinstance(action, str):
        return action
    (message,) = read_messages([action], f"row {number}: an action")
    if message["role"] != "assistant":
        raise ValueError(f"row {number}: an action is a message of the assistant; got one of role {message['role']}")
    return message["content"]


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
            new.append(rest if isinstance(rest, str) else read_messages(rest, f"row {number}: an observation"))
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


def shared_examples(data: Sequence[Pair | Trajectory], held_out: Sequence[Pair | Trajectory]) -> str:
    """Return a line that counts the held-out examples whose prompts are also trained on; empty if there are none.

    The prompt of a trajectory is what was read first, or a text that is trained whole.
    """

    def prompts(examples: Sequence[Pair | Trajectory]) -> list[Any]:
        return [
            x.prompts if isinstance(x, Pair) else next(filter(None, (*x.observations[:1], *x.actions[:1])), "")
            for x in examples
        ]

    return shared_line(prompts(data), prompts(held_out), "pairs" if data and isinstance(data[0], Pair) else "texts")


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
