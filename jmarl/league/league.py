"""The league of a run: frozen copies of the team's weights in slots, and the episodes against them.

Every `snapshot_every` updates the next slot takes the present weights (with LoRA the adapters), before the step's episodes. A
step draws `opponents_at_once` slots by `opponents`, and for `opponent_share` of its items one of them and a seat: all
completions of an item meet the same opponent in the same seat, whose texts have the same random keys, so that their comparison
says nothing about the opponent. The opponent's parameters are further sets of the stack that is sampled: one program, whatever
is drawn; how many rows act decides its size, in quarters. Snapshots are on the host, and in checkpoints as
`TeamState.pending`, with the games of all slots with each other (`ratings.Crosstable`): a slot takes those that the team played
since the snapshot before, or with `opponents=nash` plays all others itself. `jmarl plan` counts the present team alone.

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

from jmarl.config import Episodes, Sampling
from jmarl.config.sections import League
from jmarl.envs.base import Environment
from jmarl.files.saving import gib
from jmarl.league.choice import probabilities, win_rates
from jmarl.league.ratings import Crosstable, is_zero_sum
from jmarl.league.seats import Seated, Seating, narrowed, players_of
from jmarl.learning.setup import Setup
from jmarl.logs.terminal import say
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
    ages: np.ndarray  # [K] the update at which each was taken; -1: not yet
    won: np.ndarray  # [K] games that the team won against it, a draw as half
    games: np.ndarray  # [K] games against it, a float like `won`
    results: Crosstable  # of the slots and the present team with each other

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


def empty_slots(params: Sequence[Any], settings: League) -> Snapshots:
    """Return slots before the first step. params: of each stack, [A, ...]."""
    count = settings.snapshots
    zeros = tuple(tuple(np.zeros(x.shape, dtype_in_slot(x, settings)) for x in own_arrays(stack)) for stack in params)
    ages, results = np.full(count, -1, np.int32), Crosstable.of_empty_slots(count)
    return in_memory_of_host(Snapshots((zeros,) * count, ages, np.zeros(count), np.zeros(count), results))


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


def leaves_of(params: Any) -> tuple[list[Any], Any]:
    """Return arrays, and what all agents of a stack share as one leaf, and their structure."""
    return jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Shared))


def joined(params: Any, opponents: Sequence[Sequence[np.ndarray]]) -> Any:
    """Return the parameters of a stack and behind them the arrays of its opponents, along the agent axis."""
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
        self.players = players_of(setup.team, self.settings.opponents_at_once)
        self.slots: dict[int, Snapshots] = {}  # before each step whose update is not made yet
        self.group = setup.cfg.episodes.num_generations
        self.drawn = np.zeros(0, int)  # slots that the step meets
        self.present: Sequence[Any] = ()  # parameters of the team, while the step is played
        self.stacks: list[Any] = []  # those of all players
        self.columns: dict[str, float] = {}

    # --- the state, see `StepSampler`

    def take(self, state: TeamState) -> TeamState:
        slots = Snapshots(*jax.tree.map(np.asarray, tuple(state.pending)))
        self.slots = {int(state.step): slots}
        if self.says:
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

    def begin(self, step: int, params: Sequence[Any]) -> None:
        """Take a snapshot if it is time, and draw the slots that the step meets."""
        slots = self.before(step)
        if step % self.settings.snapshot_every == 0:
            k = step // self.settings.snapshot_every % self.settings.snapshots
            weights = tuple(
                tuple(to_host(x).astype(dtype_in_slot(x, self.settings)) for x in own_arrays(stack)) for stack in params
            )
            slots = self.slots[step] = slots.taking(k, weights, step)
        filled = np.flatnonzero(slots.ages >= 0)
        ages, won, games = slots.ages[filled], slots.won[filled], slots.games[filled]
        shares = probabilities(self.settings.opponents, ages, won, games, slots.rates())
        rng, count = np.random.default_rng((self.seed, step, LEAGUE)), self.settings.opponents_at_once
        self.present, started = params, time.monotonic()
        self.draw(slots, rng.choice(filled, count, replace=count > int(np.count_nonzero(shares)), p=shares))
        copied = sum(x.nbytes for stack in self.stacks for x in own_arrays(stack))
        self.columns = {"league/copy_s": time.monotonic() - started, "league/copied_bytes": float(copied)}

    def draw(self, slots: Snapshots, drawn: np.ndarray) -> None:
        """Put slots beside the present weights. drawn: numbers of the slots."""
        self.drawn, weights = drawn, [slots.weights[k] for k in drawn]
        pairs = [(stack, [own[i] for own in weights]) for i, stack in enumerate(self.present)]
        self.stacks = jax.block_until_ready([joined(*pair) for pair in pairs])

    def seats(self, count: int, step: int) -> list[Seating]:
        """Return the seats of the items of a step. Each seat is held by an opponent equally often, so that all steps have equal
        shapes, and opponents take turns."""
        rng, n = np.random.default_rng((self.seed, step, LEAGUE, 1)), self.team.num_agents
        number = n * round(self.settings.opponent_share * count / n)
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
            episodes = dataclasses.replace(episodes, chat=episodes.chat * (len(self.drawn) + 1))

        def play_seated(seats: Sequence[Seating], randomness: Randomness) -> tuple[Rollout, Seated]:
            seated = Seated(env, seats, team.num_agents, len(self.drawn))
            return play(sample, self.players, items, seated, settings, episodes, group, randomness), seated

        played, seated = play_seated(seats, randomness)
        if step == 0:
            warn_of_equal_rewards(played)
        met = [{} if seat.opponent < 0 else self.described(seat, slots) for seat in seats]
        tasks = [{**item, **opponent} for item, opponent in zip(items, met, strict=True)]
        slots, is_new = slots.adding(*self.points(played, seats), group), bool(slots.ages.max() == step)
        zero_sum = is_zero_sum(played.joint_returns[0][..., : team.num_agents])
        if self.settings.opponents == "nash":
            check_zero_sum(zero_sum)
            slots = self.rate(slots, len(items), play_seated, randomness) if is_new else slots
        slots, interval = with_ratings(slots, zero_sum)
        self.slots[step + 1], self.stacks, self.present = slots, [], ()
        self.columns |= {"league/" + name: x for name, x in columns_of(slots, is_new, interval).items()}
        texts = {"league/winrates": slots.results.table(slots.ages)}
        return narrowed(played, team, self.players, seats, seated)._replace(tasks=tasks, texts=texts)

    def rate(self, slots: Snapshots, items: int, play_seated: SeatedPlay, randomness: Randomness) -> Snapshots:
        """Return slots in which the newest one, whose weights are the present ones, has played the items of a step against all
        others, in each seat equally often. Nothing is learned from these episodes."""
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

    def described(self, seat: Seating, slots: Snapshots) -> dict[str, Any]:
        """Return what the record of an episode says of its opponent."""
        slot = int(self.drawn[seat.opponent])
        return {"league": {"slot": slot, "update": int(slots.ages[slot]), "seat": seat.seat}}

    def points(self, played: Rollout, seats: Sequence[Seating]) -> tuple[np.ndarray, np.ndarray]:
        """Return the points of the present team in a rollout, and its games, against each slot [K]: the mean return of the
        present agents against that of the seat."""
        (won, games), n = np.zeros((2, self.settings.snapshots)), self.team.num_agents
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
            "joint action of the first update: no game against a slot has a winner",
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
    results, order = slots.results, np.argsort(slots.ages, kind="stable")
    if not zero_sum:
        return slots._replace(results=results._replace(ratings=np.full_like(results.ratings, np.nan))), np.nan
    results, interval = results.rated(order[slots.ages[order] >= 0])
    return slots._replace(results=results), interval


def columns_of(slots: Snapshots, is_new: bool, interval: float) -> dict[str, float]:
    """Return the columns of the log: how often the team wins against each slot, and against all; its rating; and of a step that
    took a snapshot the update of each slot and how often the newest one wins against it."""
    rates = win_rates(slots.won, slots.games)
    own = {f"slot_{k}/winrate": float(rate) for k, rate in enumerate(rates) if np.isfinite(rate)}
    own |= {"winrate": float(np.nanmean(rates))} if own else {}
    if np.isfinite(rating := slots.results.ratings[-1] + interval):
        own |= {"elo": float(rating - interval), "elo_ci95": interval}
    among = slots.results.rates()[:, :-1]
    more = {"recent_winrate": among[-1]}
    if is_new:
        more |= {"update": np.where(slots.ages < 0, np.nan, slots.ages), "newest_winrate": among[np.argmax(slots.ages)]}
    return own | {f"slot_{k}/{name}": float(x) for name, row in more.items() for k, x in enumerate(row) if np.isfinite(x)}
