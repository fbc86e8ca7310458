"""The league of a run: frozen copies of the team's weights in slots, and the episodes against them.

Every `snapshot_every` updates the next slot takes the present weights (with LoRA the adapters), before the step's episodes. A
step draws `opponents_at_once` slots by `opponents`, and for `opponent_share` of its items one of them and a seat: all
completions of an item meet the same opponent in the same seat, whose texts have the same random keys, so that their comparison
says nothing about the opponent. The opponent's parameters are further sets of the stack that is sampled: one program, whatever
is drawn; how many rows act decides its size, in quarters. Snapshots are on the host, and in checkpoints as
`TeamState.pending`. `jmarl plan` counts the present team alone.

`strangers` are further opponents, which do not change; numbers behind those of the slots are theirs. A run with strangers
resumes bit for bit if they write the same again, as functions of the prompt alone do, and services (addresses) do not.

Left out: episodes that branch at every turn, and joint actions of completions with each other (`joint_mode=cross`), in which
players who do not sit at a table would multiply.
"""

import dataclasses
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.config import Episodes, Sampling
from jmarl.config.sections import League
from jmarl.envs.base import Environment
from jmarl.files.saving import gib
from jmarl.league.choice import probabilities, win_rates
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

Weights = tuple[tuple[Any, ...], ...]  # of a slot: of each stack the arrays [A, ...] that agents do not share


class Snapshots(NamedTuple):
    """What a league knows before a step."""

    weights: tuple[Weights, ...]  # of each slot, on the host; zeros if nothing was taken yet
    ages: np.ndarray  # [K] of slots, and behind them strangers: the update at which each was taken; -1: not yet
    won: np.ndarray  # [K] games that the team won against it, a draw as half
    games: np.ndarray  # [K] games against it, a float like `won`

    def taking(self, k: int, weights: Weights, step: int) -> "Snapshots":
        """Return these slots after slot k has taken weights."""
        ages, won, games = (np.array(x) for x in self[1:])
        ages[k], won[k], games[k] = step, 0, 0
        return Snapshots((*self.weights[:k], weights, *self.weights[k + 1 :]), ages, won, games)


def empty_slots(params: Sequence[Any], settings: League) -> Snapshots:
    """Return slots before the first step, and behind them the results of strangers. params: of each stack, [A, ...]."""
    zeros = tuple(tuple(np.zeros(x.shape, dtype_in_slot(x, settings)) for x in own_arrays(stack)) for stack in params)
    ages = np.repeat(np.array([-1, 0], np.int32), [settings.snapshots, len(settings.strangers)])
    return in_memory_of_host(Snapshots((zeros,) * settings.snapshots, ages, np.zeros(len(ages)), np.zeros(len(ages))))


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
        self.stacks: list[Any] = []  # parameters of all players, while the step is played
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

    def begin(self, step: int, params: Sequence[Any]) -> None:
        """Take a snapshot if it is time, and draw the slots that the step meets."""
        slots = self.before(step)
        if self.settings.snapshots and step % self.settings.snapshot_every == 0:
            k = step // self.settings.snapshot_every % self.settings.snapshots
            slots = self.slots[step] = slots.taking(k, host_weights(params, self.settings), step)
        filled = np.flatnonzero(slots.ages >= 0)
        shares = probabilities(self.settings.opponents, slots.ages[filled], slots.won[filled], slots.games[filled])
        rng, count = np.random.default_rng((self.seed, step, LEAGUE)), self.settings.opponents_at_once
        self.drawn = rng.choice(filled, count, replace=count > int(np.count_nonzero(shares)), p=shares)
        known = [*slots.weights, *(self.frozen.get(i) for i in range(len(self.strangers)))]
        spare = next((x for x in known if x is not None), ())  # in the place of an opponent without weights
        started, weights = time.monotonic(), [known[k] or spare for k in self.drawn] if self.copies else []
        pairs = [(stack, [own[i] for own in weights]) for i, stack in enumerate(params)]
        self.stacks = jax.block_until_ready([joined(*pair) for pair in pairs])
        copied = sum(x.nbytes for stack in self.stacks for x in own_arrays(stack)) if self.copies else 0
        self.columns = {"league/copy_s": time.monotonic() - started, "league/copied_bytes": float(copied)}

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
        holders = [seat.holders(team.num_agents, self.number_of(seat)) for seat in seats]
        seated = Seated(env, holders, team.num_agents, self.copies + 1, self.strangers)
        if isinstance(episodes.chat, tuple):  # one value per agent
            episodes = dataclasses.replace(episodes, chat=episodes.chat * (self.copies + 1))
        played = play(sample, self.players, items, seated, settings, episodes, group, randomness)
        self.stacks = []
        if step == 0:
            warn_of_equal_rewards(played)
        self.slots[step + 1] = slots = self.with_results(slots, played, seats)
        met = [{} if seat.opponent < 0 else self.described(seat, slots) for seat in seats]
        tasks = [{**item, **opponent} for item, opponent in zip(items, met, strict=True)]
        self.columns |= {"league/" + name: x for name, x in columns_of(slots).items()}
        return narrowed(played, team, self.players, seated)._replace(tasks=tasks)

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

    def with_results(self, slots: Snapshots, played: Rollout, seats: Sequence[Seating]) -> Snapshots:
        """Return slots with the results of a step: the mean return of the present agents against that of the seat."""
        won, games, n = np.array(slots.won), np.array(slots.games), self.team.num_agents
        for seat, returns in zip(seats, played.joint_returns[0], strict=True):  # [J, N]
            if seat.opponent < 0:
                continue
            others = (np.delete(returns[:, :n], seat.seat, 1) - returns[:, [seat.seat]]).mean(1)  # exactly 0 in a draw
            others = others[np.isfinite(others)]
            slot = self.drawn[seat.opponent]
            won[slot] += np.sum((np.sign(others) + 1) / 2)
            games[slot] += len(others)
        return slots._replace(won=won, games=games)

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


def columns_of(slots: Snapshots) -> dict[str, float]:
    """Return the columns of the log: how often the team wins against each opponent, and against all."""
    rates, count = win_rates(slots.won, slots.games), len(slots.weights)
    names = [f"slot_{k}" if k < count else f"stranger_{k - count}" for k in range(len(rates))]
    own = {f"{name}/winrate": float(rate) for name, rate in zip(names, rates, strict=True) if np.isfinite(rate)}
    return own | {"winrate": float(np.nanmean(rates))} if own else own
