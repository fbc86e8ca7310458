"""Make pairs of the team's own completions: for madpo and marlhf once, for madpo_iter and marlhf_iter in rounds. One round:

    candidates = the team's completions of the round's items         sampled and rewarded as in `train`
    others     = the comparator's completions of these items         madpo_iter only, see `comparators`
    pairs      = completions with different rewards                  `pairs.select`, `pairs.select_against`
    state      = several updates on pairs of this and older rounds   `pair_source`, `pairs.replay_weights`

madpo is one round over all items, with pairs among the team's own completions. The pairs of a round are written to
`pairs/round_0000.jsonl` of the output directory, with their tokens, so that a run resumes bit for bit. Left out: several turns,
and joint actions other than aligned ones.
"""

import json
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmarl.algorithms import Algorithm, resolve
from jmarl.config import TrainConfig
from jmarl.config.bounded_files import read_json
from jmarl.envs.base import Environment
from jmarl.envs.data import Pair, SampledTokens
from jmarl.evaluation.evaluate import Evaluation
from jmarl.files.manifest import describe_file
from jmarl.learning.setup import Setup
from jmarl.logs.data_log import DataLog
from jmarl.models.lora import model_of
from jmarl.models.stack import map_own
from jmarl.preferences.comparators import Candidates, Comparator, History, candidates_of, play_items
from jmarl.preferences.encoding import AgentTokens, Examples
from jmarl.preferences.pairs import replay_weights, row_of, select, select_against
from jmarl.processes import exchange
from jmarl.randomness import DRAW, PAIRS, PROPOSE, Randomness, tasks_of
from jmarl.rollout.experience import DataExperience, Source
from jmarl.runs.kinds.given import batch_size, complete_batches, draw_examples, encode, needs_team_margin
from jmarl.runs.kinds.rollouts import check, evaluation_on, shared
from jmarl.runs.precompile import longest_prompts
from jmarl.runs.run import Kind, PreparedRun, Task
from jmarl.team import Team, policies
from jmarl.types import TeamState


class Round(NamedTuple):
    """The pairs of a round, and its columns of the log."""

    pairs: list[Pair]
    notes: dict[str, float]  # mean rewards of the team and of the comparator, number of pairs


class Rounds:
    """The rounds of a run: samples their pairs, stores them, and draws from them.

    Args:
        team: the team.
        initial: the parameters of each stack before training, which nobody updates: the reference, and perhaps the comparator.
        items: what the completions are about.
        env: writes the prompts and rewards completions.
        algorithm: of the run.
        cfg: settings of the run.
    """

    def __init__(
        self,
        team: Team,
        initial: Sequence[Any],
        items: Sequence[dict],
        env: Environment,
        algorithm: Algorithm,
        cfg: TrainConfig,
    ):
        self.team, self.initial, self.items, self.env, self.algorithm, self.cfg = team, initial, items, env, algorithm, cfg
        self.settings: Any = algorithm.preference  # resolved: the settings of rounds are not None
        self.updates: int = cfg.run.num_updates
        self.pairs: dict[int, list[Pair]] = {}  # of the rounds that are still drawn from
        self.examples: dict[int, Examples] = {}  # the same, encoded when they are drawn from
        directory = Path(cfg.run.output_dir)
        self.folder = directory / "pairs" if cfg.run.output_dir else None
        self.history = self.comparator = None
        if algorithm.row.rounds:
            self.updates = self.settings.round_updates
            if self.settings.comparator == "history":  # in files if the run can be resumed
                folder = directory / "history" if cfg.run.saves or cfg.run.resume else None
                self.history = History(self.settings.comparator_lag, folder, self.updates)
            self.comparator = Comparator(team, cfg, self.settings.comparator, initial, self.history)

    def new_round(self, step: int, state: TeamState) -> Round | None:
        """Return the new round if one begins at this step.

        A later round may have no pairs, because all rewards are equal, as in a solved task: `pairs` in the log is then 0, and
        its updates learn from the last round that had some.
        """
        round_, update = divmod(step, self.updates)
        if update:
            return None
        params = [model_of(stack) for stack in state.stacks]
        if self.history is not None:
            self.history.remember(round_, params)
        new = self.sample(round_, params)
        if not new.pairs and not any(self.pairs.values()):
            raise ValueError(
                "no two completions of an item have different rewards, so there are no pairs: use more generations or prompts, "
                "a higher temperature, or a reward that tells completions apart"
            )
        if self.folder is not None:
            exchange.from_first(partial(save_round, self.folder, round_, new.pairs))
        self.add(round_, new.pairs)
        return new

    def resume(self, step: int) -> None:
        """Read the pairs of all rounds that began before this step."""
        if self.folder is not None:
            for round_ in range((step - 1) // self.updates + 1):
                self.add(round_, load_round(self.folder, round_))

    def add(self, round_: int, pairs: list[Pair]) -> None:
        """Add the pairs of a round, and remove those of older rounds that will not be drawn from any more."""
        self.pairs[round_] = pairs
        if any(self.pairs.values()):
            weights = self.weights(round_)
            self.pairs = {r: x for r, x in self.pairs.items() if weights[r]}
            self.examples = {r: x for r, x in self.examples.items() if weights[r]}

    def sample(self, round_: int, params: Sequence[Any]) -> Round:
        """Sample and reward the completions of a round, and select its pairs."""
        pairs, own_rewards, other_rewards, fault = [], [], [], ""
        for number, items in self.items_of(round_):
            randomness = Randomness(self.cfg.run.seed, number, PROPOSE)
            rollout = play_items(self.team, params, items, self.env, self.cfg, randomness)
            own, other = candidates_of(self.team, rollout, self.cfg), None
            fault = fault or own.fault
            own_rewards.append(own.rewards)
            if self.comparator is not None:
                other = self.comparator.answer(params, items, self.env, number, round_)
                other_rewards.append(other.rewards)
            rng = np.random.default_rng((self.cfg.run.seed, number, PAIRS))
            pairs += [pair for p in range(len(items)) for pair in self.pairs_of_item(p, own, other, rng)]
        invalid, other_invalid = num_invalid(own_rewards), num_invalid(other_rewards)
        notes = {"reward/mean": finite_mean(own_rewards), "reward/invalid": invalid, "pairs": len(pairs)}
        if other_rewards:
            notes["reward/comparator_invalid"] = other_invalid
        if not np.isnan(reward := finite_mean(other_rewards)):
            notes["reward/comparator"] = reward
        if invalid or other_invalid:
            count = sum(x.size for x in (*own_rewards, *other_rewards))
            warnings.warn(
                f"round {round_}: {invalid + other_invalid} of {count} joint actions have no valid reward and are in no pair"
                + (f"; {fault}" if fault else ""),
                stacklevel=2,
            )
        return Round(pairs, {name: float(x) for name, x in notes.items()})

    def items_of(self, round_: int) -> list[tuple[int, list[dict]]]:
        """Return the items of a round in the parts that are sampled together, each with its number for the random keys."""
        size, count = self.cfg.episodes.num_prompts, len(self.items)
        if self.comparator is not None:
            tasks = tasks_of(round_, count, self.settings.round_prompts or size, self.cfg.run.seed)
            starts = range(0, len(tasks), size)
            return [(round_ * len(starts) + n, [self.items[i] for i in tasks[a : a + size]]) for n, a in enumerate(starts)]
        parts = [range(i, min(i + size, count)) for i in range(0, count, size)]
        return [(n, [self.items[i] for i in part]) for n, part in enumerate(parts)]  # slicing a Dataset gives a dict of columns

    def pairs_of_item(self, p: int, own: Candidates, other: Candidates | None, rng: np.random.Generator) -> list[Pair]:
        """Select the pairs of the p-th item: among the team's completions, or of the g-th ones of team and comparator."""
        settings, rewards = (self.settings.pair_selection, self.settings.pairs_per_prompt, rng), own.rewards[p].tolist()
        if other is None:
            return [make_pair(own, i, own, j, p) for i, j in select(rewards, *settings)]
        results = select_against(rewards, other.rewards[p].tolist(), *settings)
        return [make_pair(own, g, other, g, p) if won else make_pair(other, g, own, g, p) for g, won in results]

    def weights(self, round_: int) -> np.ndarray:
        """Return the probability that a pair is drawn from each round up to this one. Rounds without pairs have 0."""
        has_pairs = [bool(self.pairs.get(r)) for r in range(round_ + 1)]
        settings = self.settings
        weights = replay_weights(round_ + 1, settings.replay, settings.replay_k, settings.replay_lambda) * has_pairs
        if not weights.any():  # the rounds that would be replayed have no pairs: the last one that has some
            weights[np.flatnonzero(has_pairs)[-1]] = 1
        return weights / weights.sum()

    def draw(self, step: int) -> Examples:
        """Draw the pairs of a step: from this round and, depending on `replay`, from older ones."""
        round_ = step // self.updates
        rng = np.random.default_rng((self.cfg.run.seed, step, DRAW))
        rounds = rng.choice(round_ + 1, batch_size(self.algorithm), p=self.weights(round_))
        parts = []
        for r, count in enumerate(np.bincount(rounds)):
            if count:
                examples = self.encoded(r)
                parts.append(examples.take(draw_evenly(len(examples.tokens), count, rng)))
        references = [part.reference for part in parts if part.reference is not None]
        tokens = [example for part in parts for example in part.tokens]
        return Examples(tokens, np.concatenate(references) if references else None)

    def encoded(self, round_: int) -> Examples:
        """Return a round's pairs as token ids, with their reference log-probabilities. They are encoded once."""
        if round_ not in self.examples:
            self.examples[round_] = encode(self.team, self.initial, self.pairs[round_], self.algorithm, self.cfg)
        return self.examples[round_]

    def replayed(self, round_: int) -> list[Pair]:
        """Return the pairs that the reward model of a round is trained on.

        These are all pairs of the most probable rounds, and of the others a share in proportion to their probability."""
        weights, replayed = self.weights(round_), []
        for r, pairs in self.pairs.items():
            rng = np.random.default_rng((self.cfg.run.seed, round_, r, DRAW))
            count = round(weights[r] / weights.max() * len(pairs))
            replayed += [pairs[i] for i in sorted(draw_evenly(len(pairs), count, rng))]
        return replayed


def draw_evenly(count: int, n: int, rng: np.random.Generator) -> list[int]:
    """Return n of the numbers below `count` in random order; none is repeated before all were drawn."""
    numbers: list[int] = []
    while len(numbers) < n:
        numbers += rng.permutation(count)[: n - len(numbers)].tolist()
    return numbers


def num_invalid(rewards: Sequence[np.ndarray]) -> int:
    """Return the number of rewards that are not finite."""
    return sum(int((~np.isfinite(x)).sum()) for x in rewards)


def finite_mean(rewards: Sequence[np.ndarray]) -> float:
    """Return the mean of all finite rewards; NaN if there are none."""
    finite = np.concatenate([r[np.isfinite(r)] for r in rewards]) if rewards else np.array([])
    return float(finite.mean()) if finite.size else float("nan")


def make_pair(chosen: Candidates, i: int, rejected: Candidates, j: int, p: int) -> Pair:
    """Return the pair of joint action i of one writer and j of another on item p, with its tokens."""
    agents = range(len(chosen.texts))
    return Pair(
        tuple(chosen.prompts[n][p] for n in agents),
        tuple(chosen.texts[n][p][i] for n in agents),
        tuple(rejected.texts[n][p][j] for n in agents),
        (float(chosen.rewards[p][i]), float(rejected.rewards[p][j])),
        tuple(SampledTokens(chosen.prompt_ids[n][p], chosen.ids[n][p][i], rejected.ids[n][p][j]) for n in agents),
    )


def save_round(folder: Path, round_: int, pairs: Sequence[Pair]) -> None:
    """Write the pairs of a round as lines that `load_pairs` reads too, and beside them the size and SHA-256 of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round_{round_:04}.jsonl"
    with (temporary := final.with_suffix(".tmp")).open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(row_of(pair, with_tokens=True), ensure_ascii=False) + "\n" for pair in pairs)
    digest = describe_file(temporary, sync=True)
    temporary.replace(final)
    final.with_suffix(".json").write_text(json.dumps(digest), encoding="utf-8")


def load_round(folder: Path, round_: int) -> list[Pair]:
    """Read the pairs of a round. Raises ValueError if their file is missing or damaged."""
    path = folder / f"round_{round_:04}.jsonl"
    if not path.is_file():
        raise ValueError(f"cannot resume: {path}, the pairs of round {round_}, is missing")
    digest = path.with_suffix(".json")
    if not digest.is_file() or read_json(digest) != describe_file(path):
        raise ValueError(
            f"cannot resume: {path}, the pairs of round {round_}, is damaged: {digest} should hold its size and SHA-256"
        )
    pairs = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:  # splitlines would also cut at other characters of a text
        row = json.loads(line)
        texts = ((x,) if isinstance(x, str) else tuple(x) for x in (row["prompt"], row["chosen"], row["rejected"]))
        tokens = row["tokens"] and tuple(SampledTokens(*ids) for ids in row["tokens"])
        pairs.append(Pair(*texts, rewards=tuple(row["metadata"]["rewards"]), tokens=tokens))
    return pairs


# --- the kind of a run -------------------------------------------------------------------------------------------------------


def longest(setup: Setup, task: Task) -> DataExperience:
    """Return a pair of full length. See `Kind.longest`."""
    widths, row = longest_prompts(setup, task.items, shared(setup, task).env), [0] * setup.cfg.sampling.max_new_tokens
    agents = {agent: width for spec, width in zip(setup.team.stacks, widths, strict=True) for agent in spec.order}
    pair = [AgentTokens([0] * agents[agent], (row, row)) for agent in range(setup.team.num_agents)]
    return draw_examples(setup.team, Examples([pair]), setup.algorithm)


def make_rounds(setup: Setup, task: Task, state: TeamState) -> Rounds:
    """Return the rounds of a run. state: at step 0."""
    algorithm = resolve(setup.cfg)
    initial = copies_for_rounds(policies(state), algorithm)
    return Rounds(setup.team, initial, task.items, task.env, algorithm, setup.cfg)


def copies_for_rounds(initial: Sequence[Any], algorithm: Algorithm) -> list[Any]:
    """Return copies of each stack's parameters, for rounds that use them as reference or comparator; else []."""
    if algorithm.preference.comparator != "initial" and not algorithm.has_reference:
        return []
    return [map_own(jnp.copy, stack) for stack in initial]


def source_of_rounds(run: PreparedRun, state: TeamState) -> Source:
    """Return the source of a run in rounds. See `Kind.source`."""
    setup, task = run.setup, shared(run.setup, run.task)
    return pair_source(setup, make_rounds(setup, task, state), evaluation_on(setup, task))


def pair_source(setup: Setup, rounds: Rounds, evaluate: Callable[[TeamState], Evaluation] | None) -> Source:
    """Return a source each of whose steps learns from pairs of this round and older ones.

    evaluate: state -> evaluation on held-out items; None without them.
    """

    def draw(step: int, state: TeamState) -> DataExperience:
        start = time.monotonic()
        new = rounds.new_round(step, state)
        preparation_s = time.monotonic() - start
        experience = draw_examples(setup.team, rounds.draw(step), setup.algorithm)
        return experience._replace(notes=new.notes, preparation_s=preparation_s) if new else experience

    def read_rounds(state: TeamState) -> TeamState:
        rounds.resume(int(state.step))
        return state

    scores = needs_team_margin(setup)
    return Source(draw, evaluate, read_rounds, waits=lambda step: scores or step % rounds.updates == 0)


ROUNDS = Kind(check, longest, complete_batches, source_of_rounds, DataLog)
