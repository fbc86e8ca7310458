"""The league of a run: frozen copies of the team's weights in slots, and the episodes against them.

Every `snapshot_every` updates the next slot takes the present weights (with LoRA the adapters), before the step's episodes. A
step draws `opponents_at_once` slots by `opponents`, and for `opponent_share` of its items one of them and a seat: all
completions of an item meet the same opponent in the same seat, whose texts have the same random keys, so that their comparison
says nothing about the opponent. The opponent's parameters are further sets of the stack that is sampled: one program, whatever
is drawn; how many rows act decides its size, in quarters. Snapshots are on the host, and in checkpoints as
`TeamState.pending`, with the games of all slots with each other (`ratings.Crosstable`): a slot takes those that the team played
since the snapshot before, or with `opponents=nash` plays all others itself. `jmarl plan` refuses a league.

`strangers` are further opponents, which do not change; numbers behind those of the slots are theirs. A run with strangers
resumes bit for bit if they write the same again, as functions of the prompt alone do, and services (addresses) do not.

Left out: episodes that branch at every turn, and joint actions of completions with each other (`joint_mode=cross`), in which
players who do not sit at a table would multiply.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.config import Episodes, League, Sampling
from jmarl.envs.base import Environment
from jmarl.evaluation.zero_shot import is_zero_sum
from jmarl.files.saving import gib
from jmarl.league.choice import probabilities, win_rates
from jmarl.league.ratings import Crosstable
from jmarl.league.seats import Seated, Seating, narrowed, players_of
from jmarl.league.strangers import frozen_params, is_stranger, open_stranger
from jmarl.learning.setup import Setup
from jmarl.logs.terminal import say
from jmarl.models.lora import model_of
from jmarl.models.stack import to_host
from jmarl.randomness import LEAGUE, Randomness
from jmarl.rollout.play import play
from jmarl.rollout.turns import Rollout
from jmarl.sampling.generate import Sampler, SampleRequest, StepSampler, sample_team
from jmarl.team import Team
from jmarl.types import Completions, Shared, TeamState

SeatedPlay = Callable[[Sequence[Seating], Randomness], tuple[Rollout, Seated]]
Weights = tuple[tuple[Any, ...], ...]  # of a slot: of each stack the arrays [A, ...] that agents do not share


class Snapshots(NamedTuple):
    """What a league knows before a step."""

    weights: tuple[Weights, ...]  # of each slot, on the host; zeros if nothing was taken yet
    ages: np.ndarray  # [K] of slots, and behind them strangers: the update at which each was taken; -1: not yet
    won: np.ndarray  # [K] games that the team won against it, a draw as half
    games: np.ndarray  # [K] games against it, a float like `won`
    results: Crosstable  # of all of these and the present team with each other

    def taking(self, k: int, weights: Weights, step: int) -> "Snapshots":
        """Return these slots after slot k has taken weights."""
        ages, won, games = (np.array(x) for x in self[1:4])
        ages[k], won[k], games[k] = step, 0, 0
        return Snapshots((*self.weights[:k], weights, *self.weights[k + 1 :]), ages, won, games, self.results.taking(k))

    def adding(self, won: np.ndarray, games: np.ndarray, group: int) -> "Snapshots":
        """Return these slots after games of the present team. won: [K] its points against each; games: [K]. The results count a
        group as one game, because its games have the same item and opponent."""
        results = self.results.adding(-1, won / group, games / group)
        return self._replace(won=self.won + won, games=self.games + games, results=results)

    def rates(self) -> np.ndarray:
        """Return [F, F] how often each of the filled slots wins against each; NaN where they never met."""
        filled = np.flatnonzero(self.ages >= 0)
        return self.results.rates()[np.ix_(filled, filled)]

    @property
    def names(self) -> list[str]:
        """What columns call the opponents."""
        count = len(self.weights)
        return [f"slot_{k}" if k < count else f"stranger_{k - count}" for k in range(len(self.ages))]


def empty_slots(params: Sequence[Any], settings: League) -> Snapshots:
    """Return slots before the first step, and behind them strangers. params: of each stack, [A, ...]."""
    zeros = tuple(tuple(np.zeros(x.shape, dtype_in_slot(x, settings)) for x in own_arrays(stack)) for stack in params)
    ages = np.repeat(np.array([-1, 0], np.int32), [settings.snapshots, len(settings.strangers)])
    won, games = np.zeros((2, len(ages)))
    results = Crosstable.of_empty_slots(len(ages), settings.snapshots)
    return in_memory_of_host(Snapshots((zeros,) * settings.snapshots, ages, won, games, results))


def dtype_in_slot(x: Any, settings: League) -> jax.typing.DTypeLike:
    """Return the dtype that a slot has of an array."""
    return jnp.bfloat16 if settings.snapshot_dtype == "bfloat16" and x.dtype == jnp.float32 else x.dtype


def in_memory_of_host(slots: Snapshots) -> Snapshots:
    """Return slots as arrays of jax, which checkpoints save, in the memory of the host where jax can use it."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        device = None
        say("the slots of the league take the memory of the accelerator: JAX_PLATFORMS=cuda,cpu keeps them in that of the host")
    return jax.device_put(slots, device)


def own_arrays(params: Any) -> list[Any]:
    """Return the arrays of parameters that the agents of a stack do not share."""
    return [x for x in leaves_of(params)[0] if not isinstance(x, Shared)]


def host_weights(params: Sequence[Any], settings: League) -> Weights:
    """Return what a slot takes of parameters [A, ...] of each stack."""
    return tuple(tuple(to_host(x).astype(dtype_in_slot(x, settings)) for x in own_arrays(stack)) for stack in params)


def leaves_of(params: Any) -> tuple[list[Any], Any]:
    """Return arrays, and what all agents of a stack share as one leaf, and their structure."""
    return jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Shared))


def joined(params: Any, opponents: Sequence[Sequence[np.ndarray]]) -> Any:
    """Return the parameters of a stack and behind them the arrays of its opponents, along the agent axis."""
    if not opponents:
        return params
    leaves, tree = leaves_of(params)
    others = iter(zip(*opponents, strict=True))

    def with_others(x: Any) -> Any:
        return x if isinstance(x, Shared) else jnp.concatenate([x, *(jnp.asarray(y, x.dtype) for y in next(others))])

    return jax.tree.unflatten(tree, list(map(with_others, leaves)))


class LeagueSampler(StepSampler):
    """The sampler of a run whose team also plays against its past."""

    def __init__(self, setup: Setup):
        super().__init__(setup.team)
        self.settings, self.seed, self.says = setup.cfg.league, setup.cfg.run.seed, setup.cfg.run.progress
        self.setup, names = setup, self.settings.strangers
        asked = setup.cfg.sampling, bool(np.any(setup.cfg.episodes.chat)), self.seed
        self.strangers = [open_stranger(name, *asked) if is_stranger(name) else None for name in names]
        self.frozen: dict[int, Weights] = {}  # numbers of strangers that are directories -> their weights
        has_weights = self.settings.snapshots or None in self.strangers
        self.copies = self.settings.opponents_at_once if has_weights else 0  # of the team, in which opponents with weights play
        self.players = players_of(setup.team, self.copies)
        self.slots: dict[int, Snapshots] = {}  # before each step whose update is not made yet
        self.group = setup.cfg.episodes.num_generations
        self.drawn = np.zeros(0, int)  # slots that the step meets
        self.present: Sequence[Any] = ()  # parameters of the team, while the step is played
        self.stacks: list[Any] = []  # those of all players
        self.columns: dict[str, float] = {}

    # --- the state, see `StepSampler`

    def take(self, state: TeamState) -> TeamState:
        slots = Snapshots(*jax.tree.map(np.asarray, tuple(state.pending)))
        self.slots, params = {int(state.step): slots}, [model_of(stack) for stack in state.stacks]
        for i, name in enumerate(self.settings.strangers):
            if self.strangers[i] is None:
                self.frozen[i] = host_weights(frozen_params(name, self.setup, params), self.settings)
        if self.says and slots.weights:
            size = sum(x.nbytes for x in jax.tree.leaves(slots.weights))
            say(f"league: {len(slots.weights)} slots take {gib(size)} of the host's memory and of each checkpoint")
        return state._replace(pending=())

    def put_back(self, state: TeamState) -> TeamState:
        return state._replace(pending=tuple(in_memory_of_host(self.before(int(state.step)))))

    def at(self, step: int) -> Sequence[Any]:
        self.before(step)
        return ()

    def before(self, step: int) -> Snapshots:
        """Return the slots before a step, and forget those of earlier ones."""
        self.slots = {number: slots for number, slots in self.slots.items() if number >= step}
        return self.slots[step]

    # --- a step

    def takes_snapshot(self, step: int) -> bool:
        return self.settings.snapshots > 0 and step % self.settings.snapshot_every == 0

    def begin(self, step: int, params: Sequence[Any]) -> None:
        """Take a snapshot if it is time, and draw the slots that the step meets."""
        slots = self.before(step)
        if self.takes_snapshot(step):
            k = step // self.settings.snapshot_every % self.settings.snapshots
            if slots.ages[k] != step:  # else a step that failed is made again
                slots = self.slots[step] = slots.taking(k, host_weights(params, self.settings), step)
        filled = np.flatnonzero(slots.ages >= 0)
        ages, won, games = slots.ages[filled], slots.won[filled], slots.games[filled]
        shares = probabilities(self.settings.opponents, ages, won, games, slots.rates())
        rng, count = np.random.default_rng((self.seed, step, LEAGUE)), self.settings.opponents_at_once
        self.present, started = params, time.monotonic()
        self.draw(slots, rng.choice(filled, count, replace=count > int(np.count_nonzero(shares)), p=shares))
        copied = sum(x.nbytes for stack in self.stacks for x in own_arrays(stack)) if self.copies else 0
        self.columns = {"league/copy_s": time.monotonic() - started, "league/copied_bytes": float(copied)}

    def draw(self, slots: Snapshots, drawn: np.ndarray) -> None:
        """Put opponents beside the present weights. drawn: their numbers."""
        known = [*slots.weights, *(self.frozen.get(i) for i in range(len(self.strangers)))]
        spare = next((x for x in known if x is not None), ())  # in the place of an opponent without weights
        self.drawn, weights = drawn, [known[k] or spare for k in drawn] if self.copies else []
        pairs = [(stack, [own[i] for own in weights]) for i, stack in enumerate(self.present)]
        self.stacks = jax.block_until_ready([joined(*pair) for pair in pairs])

    def seats(self, count: int, step: int) -> list[Seating]:
        """Return the seats of the items of a step. Each seat is held by an opponent equally often, so that all steps have equal
        shapes, and opponents take turns."""
        rng, n = np.random.default_rng((self.seed, step, LEAGUE, 1)), self.team.num_agents
        number = n * min(round(self.settings.opponent_share * count / n), count // n)
        start, seats = int(rng.integers(2**16)), [Seating(-1)] * count
        for i, item in enumerate(rng.permutation(count)[:number]):
            seats[item] = Seating((start + i // n) % self.settings.opponents_at_once, i % n)
        return seats

    def play(
        self,
        sample: Sampler,
        team: Team,
        items: Sequence[dict],
        env: Environment,
        settings: Sampling,
        episodes: Episodes,
        group: int,
        randomness: Randomness,
    ) -> Rollout:
        """Play the episodes of a step, some of them against slots. Arguments as of `rollout.play.play`."""
        step, slots, seats = randomness.step, self.slots[randomness.step], self.seats(len(items), randomness.step)
        if isinstance(episodes.chat, tuple):  # one value per agent
            episodes = dataclasses.replace(episodes, chat=episodes.chat * (self.copies + 1))

        def play_seated(seats: Sequence[Seating], randomness: Randomness) -> tuple[Rollout, Seated]:
            holders = [seat.holders(team.num_agents, self.number_of(seat)) for seat in seats]
            seated = Seated(env, holders, team.num_agents, self.copies + 1, self.strangers)
            return play(sample, self.players, items, seated, settings, episodes, group, randomness), seated

        played, seated = play_seated(seats, randomness)
        if step == 0:
            warn_of_equal_rewards(played)
        met = [{} if seat.opponent < 0 else self.described(seat, slots) for seat in seats]
        tasks = [{**item, **opponent} for item, opponent in zip(items, met, strict=True)]
        slots, is_new = slots.adding(*self.points(played, seats), group), self.takes_snapshot(step)
        zero_sum = team.num_agents == 2 and is_zero_sum(played.joint_returns[0][..., :2])
        if self.settings.opponents == "nash":
            check_zero_sum(zero_sum)
            slots = self.rate(slots, len(items), play_seated, randomness) if is_new else slots
        slots, interval = with_ratings(slots, zero_sum)
        self.slots[step + 1], self.stacks, self.present = slots, [], ()
        self.columns |= {"league/" + name: x for name, x in columns_of(slots, is_new, interval).items()}
        texts = {"league/winrates": slots.results.table([*slots.ages[: len(slots.weights)]], self.settings.strangers)}
        return narrowed(played, team, self.players, seated)._replace(tasks=tasks, texts=texts)

    def rate(self, slots: Snapshots, items: int, play_seated: SeatedPlay, randomness: Randomness) -> Snapshots:
        """Return slots in which the newest one, whose weights are the present ones as a slot has them, has played the items of
        a step against all others, in each seat equally often. Nothing is learned from these episodes."""

        def as_in_slot(x: Any) -> Any:
            return x if isinstance(x, Shared) else x.astype(dtype_in_slot(x, self.settings)).astype(x.dtype)

        self.present = jax.tree.map(as_in_slot, list(self.present), is_leaf=lambda x: isinstance(x, Shared))
        newest, n, count = int(np.argmax(slots.ages)), self.team.num_agents, len(slots.ages)
        others = np.setdiff1d(np.flatnonzero(slots.ages >= 0), newest)
        at_once, won, games = max(1, min(len(self.drawn), items // n)), np.zeros(count), np.zeros(count)
        for i in range(0, len(others), at_once):
            met = others[i : i + at_once]
            self.draw(slots, np.resize(met, len(self.drawn)))
            number = items // (n * len(met)) * n * len(met)
            seats = [Seating(j // n % len(met), j % n) if j < number else Seating(-1) for j in range(items)]
            played, _ = play_seated(seats, randomness._replace(purpose=LEAGUE, draw=2 + i))  # 1 draws seats
            won, games = np.add((won, games), np.divide(self.points(played, seats), self.group))
        return slots._replace(results=slots.results.replacing(newest, won, games))

    def number_of(self, seat: Seating) -> int:
        """Return who holds a seat, see `Seated`: a copy of the team, or behind them a stranger without weights."""
        stranger = self.drawn[seat.opponent] - self.settings.snapshots
        return self.copies + 1 + stranger if stranger >= 0 and self.strangers[stranger] else seat.opponent + 1

    def described(self, seat: Seating, slots: Snapshots) -> dict[str, Any]:
        """Return what the record of an episode says of its opponent."""
        slot, count = int(self.drawn[seat.opponent]), len(slots.weights)
        if slot >= count:
            return {"league": {"stranger": self.settings.strangers[slot - count], "seat": seat.seat}}
        return {"league": {"slot": slot, "update": int(slots.ages[slot]), "seat": seat.seat}}

    def points(self, played: Rollout, seats: Sequence[Seating]) -> tuple[np.ndarray, np.ndarray]:
        """Return the points of the present team in a rollout, and its games, against each opponent [K]: the mean return of the
        present agents against that of the seat."""
        (won, games), n = np.zeros((2, self.settings.snapshots + len(self.strangers))), self.team.num_agents
        for seat, returns in zip(seats, played.joint_returns[0], strict=True):  # [J, N]
            if seat.opponent < 0:
                continue
            others = (np.delete(returns[:, :n], seat.seat, 1) - returns[:, [seat.seat]]).mean(1)  # exactly 0 in a draw
            others = others[np.isfinite(others)]
            slot = self.drawn[seat.opponent]
            won[slot] += np.sum((np.sign(others) + 1) / 2)
            games[slot] += len(others)
        return won, games

    def sample(
        self, params: Sequence[Any], step: int, following: SampleRequest | None, request: SampleRequest
    ) -> tuple[Completions, ...]:
        del params, step, following
        return sample_team(self.players, self.stacks, self.with_common_keys(request))

    def with_common_keys(self, request: SampleRequest) -> SampleRequest:
        """Return a request in which the opponents' keys follow from the item alone, not from the completion of a group."""
        opponents = np.arange(self.players.num_agents) >= self.team.num_agents
        items = request.prompt_ids // (self.group if request.turn else 1)
        ids = np.where(opponents[:, None], items, request.prompt_ids).astype(np.uint32)
        return request._replace(prompt_ids=ids, alike=opponents, fewer=True)

    def notes(self, step: int, completions: Sequence[Completions]) -> dict[str, float]:
        return self.columns


def warn_of_equal_rewards(played: Rollout) -> None:
    """Warn if all agents earned the same in every joint action, as where a reward is that of the team: no game has a winner."""
    returns = played.joint_returns[0]
    if np.any(returns) and np.all((returns == returns[..., :1]) | ~np.isfinite(returns)):
        warnings.warn(
            "a league is for agents with rewards of their own, such as [1, -1], and here all agents earned the same in every "
            "joint action of the first update: no game against an opponent has a winner",
            stacklevel=2,
        )


def check_zero_sum(zero_sum: bool) -> None:
    """Raise a ValueError if opponents are drawn by the mixture of a zero-sum game, and it is none."""
    if not zero_sum:
        raise ValueError(
            "opponents='nash' is for two agents whose rewards add up to 0, such as [1, -1], and these do not: "
            "choose latest, uniform or winrate"
        )


def with_ratings(slots: Snapshots, zero_sum: bool) -> tuple[Snapshots, float]:
    """Return slots with new ratings, and half of the 95 % interval of that of the present team; in a game that is not zero-sum
    no player has a rating from then on."""
    results, count = slots.results, len(slots.weights)
    order = [*np.argsort(slots.ages[:count], kind="stable"), *range(count, len(slots.ages))]  # the oldest slot first
    if not zero_sum:
        return slots._replace(results=results._replace(ratings=np.full_like(results.ratings, np.nan))), np.nan
    results, interval = results.rated(np.array([k for k in order if slots.ages[k] >= 0], int))
    return slots._replace(results=results), interval


def columns_of(slots: Snapshots, is_new: bool, interval: float) -> dict[str, float]:
    """Return the columns of the log: how often the team wins against each slot, and against all; its rating; and of a step that
    took a snapshot the update of each slot and how often the newest one wins against it."""
    named = list(zip(slots.names, win_rates(slots.won, slots.games), strict=True))
    own = {f"{name}/winrate": float(rate) for name, rate in named if np.isfinite(rate)}
    own |= {"winrate": float(np.nanmean([rate for _, rate in named]))} if own else {}
    if np.isfinite(rating := slots.results.ratings[-1] + interval):
        own |= {"elo": float(rating - interval), "elo_ci95": interval}
    among = slots.results.rates()[:, :-1]
    more = {"recent_winrate": among[-1]}
    if is_new:
        count, newest = len(slots.weights), int(np.argmax(slots.ages[: len(slots.weights)]))
        ages = [age if k < count and age >= 0 else np.nan for k, age in enumerate(slots.ages)]
        more |= {"update": np.array(ages, float), "newest_winrate": among[newest]}
    columns = ((name, column, x) for column, row in more.items() for name, x in zip(slots.names, row, strict=True))
    return own | {f"{name}/{column}": float(x) for name, column, x in columns if np.isfinite(x)}
