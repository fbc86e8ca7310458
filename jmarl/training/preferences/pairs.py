"""Pairs of which one was preferred, and texts to imitate: what they look like, where they are read from, which are chosen.

Host world: text and numbers. A pair is a joint action against another on one item; of a team of one, a completion against
another. Read: lists of dicts, `datasets.Dataset`, `.json` and `.jsonl` files with Hugging Face's preference columns (prompt,
chosen, rejected; texts or lists of chat messages) or MRLM's pairs, and trajectories as MRLM writes them. Left out: truncation
(what does not fit the context is an error when it is encoded).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Prompt = str | tuple[Mapping[str, str], ...]  # a text, or chat messages
Ids = Sequence[int]


class Pair(NamedTuple):
    """N agents."""

    prompts: tuple[Prompt, ...]  # [N]
    chosen: tuple[str, ...]  # [N]
    rejected: tuple[str, ...]  # [N]
    rewards: tuple[float, float] | None = None  # of both, where known
    tokens: tuple[tuple[Ids, Ids, Ids], ...] | None = None  # [N] prompt, chosen, rejected as sampled; None: of the texts


class Trajectory(NamedTuple):
    """What one agent read and wrote, in turn."""

    observations: tuple[Prompt, ...]  # as many as actions, or one more: what followed the last action
    actions: tuple[str, ...]
    reward: float = math.nan  # in all, where known


# --- reading -----------------------------------------------------------------------------------------------------------


def load_pairs(source: Any, num_agents: int = 1) -> list[Pair]:
    """Pairs of a file, a data set or a list of dicts with `prompt`, `chosen`, `rejected`.

    For one agent these are texts or lists of chat messages; without a prompt, chosen and rejected are whole conversations that
    differ in their last message. For a team of num_agents chosen and rejected are lists of as many texts, the prompt is one for
    all or a list too. Pairs of equal texts are left out, with a warning.
    """
    found = [pair_of(row, i, num_agents) for i, row in enumerate(read_rows(source))]
    pairs = [pair for pair in found if pair.chosen != pair.rejected]
    if not pairs:
        raise ValueError(
            f"{named(source)} holds no pairs" + (" that differ: chosen and rejected are the same" if found else "")
        )
    if len(pairs) < len(found):
        alike = next(i for i, pair in enumerate(found) if pair.chosen == pair.rejected)
        what = f"{len(found) - len(pairs)} of {len(found)} pairs of {named(source)} are left out (row {alike} is the first)"
        warnings.warn(f"{what}: chosen and rejected are the same", stacklevel=2)
    return pairs


def read_rows(source: Any) -> list[Mapping]:
    """The dicts of a file (a list, or lines) or of anything that yields dicts."""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give a .json or .jsonl file")
        text, lines = path.read_text(encoding="utf-8"), path.suffix == ".jsonl"
        parts = [(f"{path}, line {i},", x) for i, x in enumerate(text.split("\n"), 1)] if lines else [(f"{path}", text)]
        found = [parsed(part, where) for where, part in parts if part.strip() or not lines]
        source = found if lines else found[0]
    if isinstance(source, Mapping) and "trajectories" in source:
        source = source["trajectories"]
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        got = f"a dict of {list(source)}" if isinstance(source, Mapping) else type(source).__name__
        raise TypeError(f"pairs and trajectories are a series of dicts; got {got}")
    rows = list(source)
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise TypeError(f"row {i} is a {type(row).__name__}, not a dict")
    return rows


def parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}. Give a .json file, or a .jsonl file of a dict a line") from error


def named(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else f"the {type(source).__name__} given"


def pair_of(row: Mapping, number: int, num_agents: int) -> Pair:
    """A pair of a row; raises with the row's number and what is there."""
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if missing or ("prompt" not in row and not is_chat(row["chosen"])):
        wanted = missing or ["prompt"]
        has = [name for name, value in row.items() if value is not None]
        raise ValueError(f"row {number} has no {', '.join(wanted)}: pairs need prompt, chosen and rejected; it has {has}")
    chosen, rejected = row["chosen"], row["rejected"]
    prompt: Any = row.get("prompt")
    if num_agents == 1:
        if prompt is None:
            prompt = common(chosen, rejected, number)
        more = ", or for a team (load_pairs with num_agents) a list of texts"
        answers = (last_message(chosen, number, "chosen", more),), (last_message(rejected, number, "rejected", more),)
        prompts: tuple = (prompt_of(prompt, number),)
    else:
        answers = (of_team(chosen, "chosen", number, num_agents), of_team(rejected, "rejected", number, num_agents))
        several = isinstance(prompt, Sequence) and not isinstance(prompt, str) and not is_chat(prompt)
        if several and len(prompt) != num_agents:
            raise ValueError(f"row {number}: prompt has {len(prompt)} entries for {num_agents} agents")
        prompts = tuple(prompt_of(p, number) for p in (prompt if several else [prompt] * num_agents))
    rewards = (row.get("metadata") or {}).get("rewards")
    return Pair(prompts, *answers, rewards=None if rewards is None else tuple(map(float, rewards)))  # type: ignore[arg-type]


def is_chat(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(m, Mapping) for m in value)


def prompt_of(value: Any, number: int) -> Prompt:
    if isinstance(value, str):
        return value
    if not is_chat(value) or not value or not all(isinstance(m.get("role"), str) and "content" in m for m in value):
        raise ValueError(f"row {number}: a prompt is a text or a list of messages with role and content; got {value!r:.80}")
    return tuple({"role": m["role"], "content": m["content"]} for m in value)


def last_message(value: Any, number: int, name: str, more: str = "") -> str:
    """The text of a completion, or of the last of its messages. more: what else is allowed, for the error."""
    if is_chat(value) and value:
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise ValueError(f"row {number}: {name} is a text or a list of messages{more}; got {value!r:.80}")
    return value


def common(chosen: Any, rejected: Any, number: int) -> Any:
    """What two conversations have before their last messages."""
    if not is_chat(rejected) or list(chosen[:-1]) != list(rejected[:-1]) or len(chosen) < 2:
        raise ValueError(f"row {number} has no prompt, and its conversations differ before their last messages")
    return chosen[:-1]


def of_team(texts: Any, name: str, number: int, num_agents: int) -> tuple[str, ...]:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"row {number}: {name} is a list of {num_agents} texts, one an agent; got {texts!r:.80}")
    if len(texts) != num_agents:
        raise ValueError(f"row {number}: {name} has {len(texts)} texts for {num_agents} agents")
    return tuple(texts)


def save_pairs(path: str | os.PathLike, pairs: Sequence[Pair]) -> None:
    """Write pairs as `load_pairs` reads them: a .jsonl file, or a .json list."""
    rows = []
    for pair in pairs:
        one = len(pair.prompts) == 1
        texts = (pair.prompts, pair.chosen, pair.rejected)
        prompt, chosen, rejected = (x[0] if one else list(x) for x in texts)
        about = {} if pair.rewards is None else {"metadata": {"rewards": list(pair.rewards)}}
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected} | about)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text = lines if str(path).endswith(".jsonl") else json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
    Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate, as JSON writes it: \ud800


def load_trajectories(source: Any, min_reward: float | None = None) -> list[Trajectory]:
    """Trajectories of a file, a data set or a list: MRLM's (observations with messages, actions, rewards), or rows of a prompt
    and a completion (texts or chat messages). min_reward: leave out those of a smaller sum of rewards."""
    found = [trajectory_of(row, i) for i, row in enumerate(read_rows(source))]
    if min_reward is not None:
        unknown = [i for i, t in enumerate(found) if math.isnan(t.reward)]
        if unknown:
            raise ValueError(f"min_reward={min_reward} needs rewards, and row {unknown[0]} has none")
        kept = [t for t in found if t.reward >= min_reward]
        if found and not kept:
            best = max(t.reward for t in found)
            raise ValueError(f"min_reward={min_reward} leaves no trajectory: the best of {len(found)} has {best:g}")
        found = kept
    if not found:
        raise ValueError(f"{named(source)} holds no trajectories")
    return found


def trajectory_of(row: Mapping, number: int) -> Trajectory:
    if "completion" in row and "prompt" in row:
        reward = math.nan if row.get("reward") is None else float(row["reward"])
        return Trajectory((prompt_of(row["prompt"], number),), (last_message(row["completion"], number, "completion"),), reward)
    missing = [name for name in ("observations", "actions") if name not in row]
    if missing:
        raise ValueError(
            f"row {number} has no {', '.join(missing)}: trajectories have observations and actions (and rewards), texts prompt "
            f"and completion; it has {list(row)}"
        )
    done = tuple(last_message([a] if isinstance(a, Mapping) else a, number, "an action") for a in row["actions"])
    seen = new_messages([of["messages"] if isinstance(of, Mapping) else of for of in row["observations"]], done, number)
    if not done or len(seen) not in (len(done), len(done) + 1):
        raise ValueError(f"row {number}: {len(seen)} observations for {len(done)} actions; each has one before it")
    rewards = [r["value"] if isinstance(r, Mapping) else r for r in row.get("rewards", [])]
    return Trajectory(seen, done, float(sum(rewards)) if rewards else math.nan)


def new_messages(observations: Sequence[Any], actions: Sequence[str], number: int) -> tuple[Prompt, ...]:
    """What each observation has that was not there before; some logs repeat the whole conversation in each. An empty one, as
    MRLM writes behind an episode's end, is left out."""
    before: list[str] = []
    new = []
    for i, seen in enumerate(observations):
        if not seen:
            continue
        contents = [] if isinstance(seen, str) else [m["content"] for m in seen]
        again = bool(before) and contents[: len(before)] == before
        fresh = seen[len(before) :] if again else seen
        if fresh:
            new.append(prompt_of(fresh, number))
        before = [*contents, *actions[i : i + 1]] if contents and (again or not i) else []
    return tuple(new)


def held_out(pairs: Sequence[Pair], every: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to learn from and pairs held out: those of every n-th prompt, because pairs of one prompt share completions; of a
    single prompt every n-th pair."""
    prompts = list(dict.fromkeys(repr(pair.prompts) for pair in pairs))
    number = {prompt: i for i, prompt in enumerate(prompts)}
    of = [number[repr(pair.prompts)] if len(prompts) > 1 else i for i, pair in enumerate(pairs)]
    learned = [pair for pair, i in zip(pairs, of, strict=True) if i % every]
    held = [pair for pair, i in zip(pairs, of, strict=True) if i % every == 0]
    return (learned, held) if learned else (held, [])


# --- choosing ----------------------------------------------------------------------------------------------------------


def select(rewards: Sequence[float], how: str, limit: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Pairs (i, j) of completions of one prompt with r_i > r_j, at most `limit` (0: all): those of the largest gap first
    (`reward_gap`; equal ones in order), all in order (`all`), or in random order. An invalid reward (NaN) is in no pair."""
    n = len(rewards)
    pairs = [(i, j) for i in range(n) for j in range(n) if rewards[i] > rewards[j]]
    if how == "random":
        pairs = [pairs[k] for k in rng.permutation(len(pairs))]
    elif how != "all":
        pairs.sort(key=lambda pair: rewards[pair[1]] - rewards[pair[0]])
    return pairs[:limit] if limit else pairs


def select_against(
    own: Sequence[float], other: Sequence[float], how: str, limit: int, rng: np.random.Generator
) -> list[tuple[int, bool]]:
    """Of completions compared one by one with a comparator's: which (i, whether the own one won), without ties. `reward_gap`:
    the largest gaps first; `comparator_reward`: where the comparator was best first, then by the gap; `random`; `all`: in
    order."""
    met = [i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a > b or a < b]
    keys = {
        "reward_gap": lambda i: -abs(own[i] - other[i]),
        "comparator_reward": lambda i: (-other[i], -abs(own[i] - other[i])),
    }
    if how == "random":
        met = [met[k] for k in rng.permutation(len(met))]
    elif how != "all":
        met.sort(key=keys[how])
    return [(i, own[i] > other[i]) for i in (met[:limit] if limit else met)]


def replay_weights(count: int, how: str, k: int = 1, decay: float = 1.0) -> np.ndarray:
    """How likely each of `count` rounds, oldest first, is drawn from: the newest (`current`), the newest k alike (`nearest_k`),
    `all` alike, or `lambda_decay`: decay^age / sum decay^age, the newest of age 0 and 0^0 = 1."""
    age = np.arange(count)[::-1]
    if how == "lambda_decay":
        weights = np.power(float(decay), age)
    else:
        weights = (age < {"current": 1, "nearest_k": k, "all": count}[how]).astype(float)
    return weights / weights.sum()
