"""What a message is worth: the return if the agent had written each other completion of its group instead.

Each alternative is played on K times. Continuation 0 has the random keys of the run, the others have keys of their own, the
same for all alternatives, so that differences are of pairs. Messages of turns with one completion for each prompt have no
alternatives.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jmarl.evaluation.statistics import mean_and_interval, valid_mean
from jmarl.replay.messages import Change, MessagePlace, return_of, sampled_tokens, with_messages
from jmarl.replay.steps import OpenStep, RemadeStep
from jmarl.rollout.turns import Rollout

RESAMPLES = 2000  # of the bootstrap


class Credit(NamedTuple):
    """How the advantages of a step follow what its messages are worth."""

    correlation: float  # of the ranks of the messages' values and advantages (Goodman and Kruskal's gamma); NaN if unknown
    low: float  # of its 95 % interval, by a bootstrap over groups
    high: float
    messages: int  # that have alternatives
    compared: int  # of them in groups with both advantages and values that vary
    influence: list[list[float]]  # [N, N] mean size of the value of an agent's message for the return of each agent


def alternatives(
    step: OpenStep, remade: RemadeStep, message: MessagePlace, samples: int, show: Callable[[str], None]
) -> np.ndarray:
    """Return the return [G, K, N] of each agent from a message on, for each completion of its group in its place.

    samples: K. show: takes a line with the number of episodes before they are played.
    """
    tokens = sampled_tokens(step.run.team, remade.rollout, message.turn)[message.agent][message.node]
    if len(tokens) == 1:
        raise ValueError(
            f"there are no alternatives: agents write one completion for each prompt in turn {message.turn}; choose turn 0, or "
            "replace the message with --say"
        )
    different = dict.fromkeys(tuple(ids) for ids in tokens)  # equal completions are played once
    show_count(step, remade, len(different) * samples, show)
    returns = {}
    for ids in different:
        change = Change(message.turn, message.agent, {(message.node, message.sample): ids})
        plays = (with_messages(step, remade.state, change, number) for number in range(samples))
        returns[ids] = [return_of(play, message) for play in plays]
    return np.array([returns[tuple(ids)] for ids in tokens])


def show_count(step: OpenStep, remade: RemadeStep, times: int, show: Callable[[str], None]) -> None:
    """Show how many episodes are played, if a step is played so many times."""
    turn = remade.rollout.turns[0]
    count = turn.rewards[..., 0].size
    show(f"playing {times * count} episodes: the {count} of step {step.number}, {times} times")


def value_of(returns: np.ndarray, sample: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the counterfactual value [N] of a message for each agent, and half of its 95 % interval: its return minus the mean
    over all completions of its group, itself included, as a group's baseline is. returns: [G, K, N] of `alternatives`."""
    return mean_and_interval((returns[sample] - valid_mean(returns.transpose(1, 2, 0))).T)


def credit(step: OpenStep, remade: RemadeStep, samples: int, show: Callable[[str], None]) -> Credit:
    """Return how the advantages of a step follow the values of its messages.

    All groups of an agent and turn are played at once: completion g is replaced by g + 1, then by g + 2, and so on.
    """
    rollout, episodes = remade.rollout, step.run.cfg.episodes
    stored = [] if remade.stored.record is None else remade.stored.record["turns"]
    if not any("advantages" in turn for turn in stored):
        raise ValueError(
            f"--credit needs the advantages of step {step.number}, which this run has not stored: versions before they were in "
            "completions.jsonl.gz have none, nor steps in which no agent learns or that max_completions_mb leaves out"
        )
    if episodes.forks:
        raise ValueError("--credit is not for joint_mode=counterfactual, whose group is one joint action and changes of it")
    turns = [t for t, turn in enumerate(rollout.turns) if turn.group_size > 1]
    agents = len(rollout.turns[0].texts)
    show_count(step, remade, sum(samples * (1 + agents * (rollout.turns[t].group_size - 1)) for t in turns), show)
    groups, influence = list[tuple[np.ndarray, np.ndarray]](), [list[np.ndarray]() for _ in range(agents)]
    for t in turns:
        for agent, values in enumerate(values_of_turn(step, remade, t, samples)):
            trained = np.array(stored[t].get("advantages", np.full((agents, *values.shape[:2]), np.nan))[agent], float)
            for node in np.flatnonzero(rollout.turns[t].acts[agent]):
                valid = np.isfinite(values[node, :, agent]) & np.isfinite(trained[node])  # without masked completions
                groups.append((values[node, valid, agent], trained[node, valid]))
                influence[agent].append(np.abs(values[node]))
    means = [valid_mean(np.concatenate(rows).T).tolist() if rows else [float("nan")] * agents for rows in influence]
    messages = sum(len(group) for rows in influence for group in rows)
    varied = [group for group in groups if group[0].size and all(np.ptp(x) > 1e-9 for x in group)]
    correlation, low, high = rank_correlation(varied, step.run.cfg.run.seed)
    return Credit(correlation, low, high, messages, sum(len(values) for values, _ in varied), means)


def values_of_turn(step: OpenStep, remade: RemadeStep, t: int, samples: int) -> list[np.ndarray]:
    """Return for each agent the values [P, G, N] of its messages in a turn for the return of all agents."""
    turn, tokens = remade.rollout.turns[t], sampled_tokens(step.run.team, remade.rollout, t)
    places = [(p, g) for p in range(len(turn.items)) for g in range(turn.group_size)]

    def plays_of(agent: int, shift: int) -> list[Rollout]:
        """Return K continuations with completion g + shift in place of g."""
        ids = {(p, g): tokens[agent][p][(g + shift) % turn.group_size] for p, g in places if shift and turn.acts[agent, p]}
        return [with_messages(step, remade.state, Change(t, agent, ids), number) for number in range(samples)]

    def returns(agent: int, plays: Sequence[Rollout]) -> np.ndarray:
        """Return the return [P, G, N] from each message of an agent on, the mean over continuations."""
        rows = np.array([[return_of(play, MessagePlace(t, agent, p, g)) for play in plays] for p, g in places])
        return valid_mean(rows.transpose(0, 2, 1)).reshape(len(turn.items), turn.group_size, -1)

    values, unchanged = [], plays_of(0, 0)
    for agent in range(len(tokens)):
        others = [returns(agent, plays_of(agent, shift)) for shift in range(1, turn.group_size)]
        all_of_group = np.stack([returns(agent, unchanged), *others], -1)
        values.append(all_of_group[..., 0] - valid_mean(all_of_group))
    return values


def rank_correlation(groups: Sequence[tuple[np.ndarray, np.ndarray]], seed: int) -> tuple[float, float, float]:
    """Return Goodman and Kruskal's gamma of values and advantages, (concordant - discordant) / (concordant + discordant), over
    the pairs of messages of a group without a tie, and its 95 % interval by a bootstrap over groups."""
    counts = np.array([concordance(*group) for group in groups], float).reshape(-1, 2)
    rng = np.random.default_rng(seed)
    drawn = counts[rng.integers(len(counts), size=(RESAMPLES, len(counts)))] if len(counts) > 1 else np.zeros((1, 1, 2))

    def share(totals: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return (totals[..., 0] - totals[..., 1]) / totals.sum(-1)

    low, high = np.nanquantile(samples, [0.025, 0.975]) if np.isfinite(samples := share(drawn.sum(1))).any() else [np.nan] * 2
    return float(share(counts.sum(0))), float(low), float(high)


def concordance(values: np.ndarray, advantages: np.ndarray) -> tuple[int, int]:
    """Return how many pairs of messages both numbers rank alike, and how many they rank otherwise."""
    first, second = np.triu_indices(len(values), 1)
    signs = np.sign(np.round(values[first] - values[second], 9) * np.round(advantages[first] - advantages[second], 9))
    return int((signs > 0).sum()), int((signs < 0).sum())
