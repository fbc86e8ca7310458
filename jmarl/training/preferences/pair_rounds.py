"""Learning from preferences that a team's own completions show: madpo and madpo_iter. One round:

    candidates = what the team writes on the round's items           sampled and rewarded as in `train`
    others     = what the comparator writes on them                  in rounds; see `comparators`
    pairs      = those of different reward, the telling ones first   `pairs.select`, `pairs.select_against`
    state      = several updates on pairs of this and older rounds   `pair_source`; `pairs.replay_weights`

madpo is one round over all items, with pairs among the team's own completions. What a round made is kept in
`pairs/round_0000.jsonl` of the output directory, with the tokens, so that a run goes on bit for bit where it was stopped. Left
out: several turns, cross joint actions.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig
from jmarl.envs.base import Environment
from jmarl.learning.setup import Setup
from jmarl.models.lora import model_of
from jmarl.randomness import DRAW, PAIRS, PROPOSE, Randomness, tasks_of
from jmarl.rollout.play import play
from jmarl.sampling.generate import sample_team
from jmarl.team import Team
from jmarl.training.files.checkpoint import saved_steps
from jmarl.training.files.manifest import describe_file
from jmarl.training.loop import Source
from jmarl.training.preferences.comparators import Candidates, Comparator, History, candidates_of
from jmarl.training.preferences.data_source import Examples, batch_size, check_micro_batches, drawn, drawn_batches, encode
from jmarl.training.preferences.pairs import Pair, replay_weights, select, select_against
from jmarl.training.records import Drawn
from jmarl.training.rollouts import evaluation_of
from jmarl.types import Batches, TeamState


class Round(NamedTuple):
    """The pairs of a round, and the mean rewards of those who wrote them."""

    pairs: list[Pair]
    reward: float  # mean of the team's candidates
    compared: float  # mean of the comparator's; NaN without a comparator

    @property
    def notes(self) -> dict[str, float]:
        """What is logged of a round."""
        notes = {"reward/mean": self.reward, "pairs": float(len(self.pairs))}
        return notes | ({"reward/comparator": self.compared} if math.isfinite(self.compared) else {})


class Rounds:
    """The rounds of a run: makes their pairs, keeps them, and draws from them.

    initial: the parameters of each stack before training, which stay as they are: the reference, and perhaps the comparator.
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
        self.team, self.items, self.env, self.algorithm, self.cfg = team, items, env, algorithm, cfg
        self.row, self.settings = algorithm.row, algorithm.preference
        self.initial = list(initial)
        self.updates: int = (self.settings.round_updates or 1) if self.row.rounds else cfg.run.num_updates
        kind = self.settings.comparator or "current"
        history = self._history() if kind == "history" else None
        self.comparator = Comparator(team, cfg, kind, self.initial, history) if self.row.rounds else None
        self.pairs: dict[int, list[Pair]] = {}  # of rounds that are still drawn from
        self.examples: dict[int, Examples] = {}
        self.folder = Path(cfg.run.output_dir) / "pairs" if cfg.run.output_dir else None

    def _history(self) -> History:
        """In files where the run keeps checkpoints, from whose oldest it may go on."""
        folder = Path(self.cfg.run.output_dir) / "history" if self.cfg.run.saves or self.cfg.run.resume else None

        def oldest() -> int:
            steps = saved_steps(Path(self.cfg.run.output_dir) / "checkpoints")
            return min(steps, default=0) // self.updates

        return History(self.settings.comparator_lag or 1, folder, oldest)

    def begin(self, step: int, state: TeamState) -> Round | None:
        """Make the pairs of the round that begins at a step, if one does. A later round may make none (all rewards are equal,
        as of a solved task; `pairs` in the log is then 0): its updates learn from the last one that did."""
        round_, update = divmod(step, self.updates)
        if update:
            return None
        params = [model_of(stack) for stack in state.stacks]
        if self.comparator is not None and self.comparator.history is not None:
            self.comparator.history.remember(round_, params)
        made = self._round(round_, params)
        if not made.pairs and not any(self.pairs.values()):
            raise ValueError(
                "no two completions of an item have different rewards, so there are no pairs: use more generations or prompts, "
                "a higher temperature, or a reward that tells completions apart"
            )
        if self.folder is not None:
            save_round(self.folder, round_, made.pairs)
        self._keep(round_, made.pairs)
        return made

    def _keep(self, round_: int, pairs: list[Pair]) -> None:
        """Keep a round's pairs, and of older rounds those that are drawn from: none that is not will ever be again."""
        self.pairs[round_] = pairs
        if any(self.pairs.values()):
            weights = self.weights(round_)
            self.pairs = {r: of for r, of in self.pairs.items() if weights[r]}
            self.examples = {r: of for r, of in self.examples.items() if weights[r]}

    def resume(self, step: int) -> None:
        """Read what the rounds before a step made, where a run goes on from it."""
        if step == 0 or self.folder is None:
            return
        for round_ in range(-(-step // self.updates)):
            self._keep(round_, load_round(self.folder, round_))

    def encoded(self, round_: int) -> Examples:
        """A round's pairs as token ids, with what the reference says of them."""
        if round_ not in self.examples:
            self.examples[round_] = encode(self.team, self.initial, self.pairs[round_], self.algorithm, self.cfg)
        return self.examples[round_]

    def weights(self, round_: int) -> np.ndarray:
        """How likely each round up to this one is drawn from."""
        rounds = range(round_ + 1)
        has_pairs = [bool(self.pairs.get(r)) for r in rounds]
        settings: Any = self.settings
        weights = replay_weights(len(rounds), settings.replay, settings.replay_k, settings.replay_lambda) * has_pairs
        if not weights.any():  # the newest rounds made none: the last that did
            weights[max(r for r in rounds if self.pairs.get(r))] = 1
        return weights / weights.sum()

    def replayed(self, round_: int) -> list[Pair]:
        """Pairs of this round and older ones: all of the likeliest rounds, of others as many less as they are less likely."""
        weights, found = self.weights(round_), []
        for r, pairs in self.pairs.items():
            rng, many = (
                np.random.default_rng((self.cfg.run.seed, round_, r, DRAW)),
                round(weights[r] / weights.max() * len(pairs)),
            )
            found += [pairs[i] for i in sorted(chosen_of(len(pairs), many, rng))]
        return found

    def _round(self, round_: int, params: Sequence[Any]) -> Round:
        pairs, own_rewards, other_rewards = [], [], []
        for number, items in self._draws(round_):
            sample = partial(sample_team, self.team, params)
            rollout = play(
                sample,
                self.team,
                items,
                self.env,
                self.cfg.sampling,
                self.cfg.episodes,
                self.cfg.episodes.num_generations,
                Randomness(self.cfg.run.seed, number, PROPOSE),
            )
            own = candidates_of(self.team, rollout, self.cfg)
            settings: Any = self.settings
            other, how_chosen = None, (settings.pair_selection, settings.pairs_per_prompt)
            if self.comparator is not None:
                other = self.comparator.answer(params, items, self.env, number, round_)
                other_rewards.append(other.rewards)
            own_rewards.append(own.rewards)
            rng = np.random.default_rng((self.cfg.run.seed, number, PAIRS))
            pairs += [pair for p in range(len(items)) for pair in pairs_of(own, other, p, *how_chosen, rng)]
        return Round(pairs, mean(own_rewards), mean(other_rewards))

    def _draws(self, round_: int) -> list[tuple[int, list[dict]]]:
        """The items of a round in parts that are sampled together, each with a number of its own."""
        size, count = self.cfg.episodes.num_prompts, len(self.items)
        if self.row.rounds:
            return [(round_, [self.items[i] for i in tasks_of(round_, count, size, self.cfg.run.seed)])]
        parts = [range(i, min(i + size, count)) for i in range(0, count, size)]
        return [(n, [self.items[i] for i in part]) for n, part in enumerate(parts)]  # a slice of a Dataset is columns

    def drawn(self, step: int) -> Examples:
        """The pairs of a step: from this round and, by `replay`, from older ones."""
        now = step // self.updates
        rng = np.random.default_rng((self.cfg.run.seed, step, DRAW))
        numbers = np.bincount(rng.choice(now + 1, batch_size(self.algorithm), p=self.weights(now)), minlength=now + 1)
        encoded, reference = [], []
        for of, n in [(self.encoded(r), n) for r, n in enumerate(numbers) if n]:
            chosen = chosen_of(len(of.encoded), n, rng)
            encoded += [of.encoded[i] for i in chosen]
            reference += [] if of.reference is None else [of.reference[i] for i in chosen]
        return Examples(encoded, np.array(reference) if reference else None)


def pair_source(setup: Setup, rounds: Rounds, eval_items: Sequence[dict] = ()) -> Source:
    """Return what a run in rounds learns from: each step draws pairs of this round and older ones."""

    def draw(step: int, state: TeamState) -> Drawn:
        start = time.monotonic()
        new = rounds.begin(step, state)
        preparation_s = time.monotonic() - start
        experience = drawn(setup.team, rounds.drawn(step), setup.algorithm)
        return experience._replace(notes=new.notes, preparation_s=preparation_s) if new else experience

    def make_batches(state: TeamState, experience: Drawn) -> Batches:
        return drawn_batches(setup, state, experience)

    def prepare(state: TeamState) -> None:
        rounds.resume(int(state.step))

    return Source(draw, make_batches, evaluation_of(setup.team, eval_items, rounds.env, setup.cfg), prepare)


def chosen_of(count: int, n: int, rng: np.random.Generator) -> list[int]:
    """n of `count` in random order, none twice before all were once."""
    return [int(i) for k in range(-(-n // count) if n else 0) for i in rng.permutation(count)[: n - k * count]]


def mean(rewards: Sequence[np.ndarray]) -> float:
    found = np.concatenate([r[np.isfinite(r)] for r in rewards]) if rewards else np.array([])
    return float(found.mean()) if found.size else float("nan")


def pairs_of(own: Candidates, other: Candidates | None, p: int, how: str, limit: int, rng: np.random.Generator) -> list[Pair]:
    """Pairs of the p-th item: among the team's own completions, or against the comparator's one by one."""
    if other is None:
        return [joint_pair(own, i, own, j, p) for i, j in select(own.rewards[p].tolist(), how, limit, rng)]
    met = select_against(own.rewards[p].tolist(), other.rewards[p].tolist(), how, limit, rng)
    return [joint_pair(own, i, other, i, p) if won else joint_pair(other, i, own, i, p) for i, won in met]


def joint_pair(chosen: Candidates, i: int, rejected: Candidates, j: int, p: int) -> Pair:
    """Joint action i of one against j of the other, on item p, with the tokens that were sampled."""
    agents = range(len(chosen.texts))
    texts = (tuple(of.texts[n][p][g] for n in agents) for of, g in ((chosen, i), (rejected, j)))
    tokens = tuple((chosen.prompt_ids[n][p], chosen.ids[n][p][i], rejected.ids[n][p][j]) for n in agents)
    rewards = (float(chosen.rewards[p][i]), float(rejected.rewards[p][j]))
    return Pair(tuple(chosen.prompts[n][p] for n in agents), *texts, rewards=rewards, tokens=tokens)


def save_round(folder: Path, round_: int, pairs: Sequence[Pair]) -> None:
    """Lines that `load_pairs` reads too, with the tokens beside the texts; size and SHA-256 of the file lie beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"round_{round_:04}.jsonl"
    with (temporary := final.with_suffix(".tmp")).open("w", encoding="utf-8", errors="backslashreplace") as file:
        for pair in pairs:
            texts = (pair.prompts, pair.chosen, pair.rejected)
            prompt, chosen, rejected = (x[0] if len(pair.prompts) == 1 else x for x in texts)
            row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "tokens": pair.tokens}
            file.write(json.dumps(row | {"metadata": {"rewards": pair.rewards}}, ensure_ascii=False) + "\n")
    digest = describe_file(temporary, sync=True)
    temporary.replace(final)
    final.with_suffix(".json").write_text(json.dumps(digest), encoding="utf-8")


def load_round(folder: Path, round_: int) -> list[Pair]:
    path = folder / f"round_{round_:04}.jsonl"
    if not path.is_file():
        raise ValueError(f"cannot resume: {path}, the pairs of round {round_}, is missing")
    beside = path.with_suffix(".json")
    if not beside.is_file() or json.loads(beside.read_text(encoding="utf-8")) != describe_file(path):
        raise ValueError(
            f"cannot resume: {path}, the pairs of round {round_}, is damaged: it has other bytes than were written"
        )
    pairs = []
    for line in path.read_text(encoding="utf-8").split("\n"):  # splitlines would also cut at other characters of a text
        if not line:
            continue
        row = json.loads(line)
        texts = ((x,) if isinstance(x, str) else tuple(x) for x in (row["prompt"], row["chosen"], row["rejected"]))
        pairs.append(Pair(*texts, rewards=tuple(row["metadata"]["rewards"]), tokens=row["tokens"]))
    return pairs


def check_rounds(cfg: TrainConfig, algorithm: Algorithm) -> None:
    """Raise a ValueError for settings that rounds do not have."""
    row = algorithm.row
    for name, needed in (("num_turns", 1), ("joint_mode", "aligned")):
        if getattr(cfg.episodes, name) != needed:
            raise ValueError(
                f"{name}={getattr(cfg.episodes, name)!r} is not there for algorithm={cfg.algorithm!r}: use {needed!r}"
            )
    if not row.learned:  # its team learns from rollouts, and its reward model from as many parts as there are pairs
        check_micro_batches(algorithm)
    if cfg.sampling.temperature == 0 and algorithm.preference.comparator == "current":
        raise ValueError("temperature=0 makes all completions of a prompt alike: preferences need temperature > 0")
    if not row.rounds and cfg.preference.pair_selection == "comparator_reward":
        raise ValueError("pair_selection='comparator_reward' needs a comparator: it is for madpo_iter and marlhf_iter")
