"""Probe environments: tasks so small that what fails to learn one names its broken part; and whole runs on them as one program.

All on token ids, as arrays. A task is an item, a token that all agents read as their prompt (between two marks); agents write
completions of one length, nothing ends early, and the reward is the team's:

1. constant: always 1. Nothing to learn but a critic's value.
2. emit: the share of tokens that are `TARGET`. A bandit: advantages and the policy gradient.
3. copy: the share of tokens that are the item. The prompt must be read.
4. agree: the share of places where all agents wrote the same token, without having seen each other's: joint credit.
5. remember: two turns, a reward only at the end: half for having written `TARGET` in the first turn, half for copying in the
   second the token that the next agent wrote first, which is then the prompt. Credit over turns.

`run` is sampling, environment, reward, advantages and update of all steps in one program (as in PureJaxRL): no host, no text.
With the items that the training loop would take (`order.tasks_of`) it makes the same run, which a test shows. Left out: rows
with critics or greedy baselines, trees, cross joint actions, several stacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmarl.algorithms import Algorithm, find_row, resolve
from jmarl.config import TrainConfig
from jmarl.learning.batches import concatenate_prompts, one_per_prompt
from jmarl.learning.update import update_agents, update_keys
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.stack import own_leaves
from jmarl.sampling.sampler import RowIds, SampleInputs, row_keys, sample
from jmarl.types import Batch, Completions, StackState

MARK, TARGET = 0, 1  # a mark around items, and the token that probes 2 and 5 ask for
ITEMS = tuple(range(2, 10))  # tokens that are items
VOCAB = 11
# The end is no token of the model's. Forbidding one that it has (min_new_tokens) would leave it in the probabilities that are
# scored: all-negative advantages, as of maremax, would then move all mass there, since no sample ever answers for it.
STOP = VOCAB

Tokens = jax.Array | np.ndarray  # the environment of the loop calls rewards with arrays of the host
Reward = jax.Array | np.ndarray | np.floating


class Probe(NamedTuple):
    """reward: tokens of each turn [..., N, T] and items [...] -> [...], in [0, 1]."""

    reward: Callable[..., Any]
    turns: int = 1
    min_agents: int = 1


def constant(turns: list, items: Tokens) -> Reward:
    del items
    return jnp.ones(turns[0].shape[:-2])


def emit(turns: list, items: Tokens) -> Reward:
    del items
    return (turns[0] == TARGET).mean((-1, -2))


def copy(turns: list, items: Tokens) -> Reward:
    return (turns[0] == items[..., None, None]).mean((-1, -2))


def agree(turns: list, items: Tokens) -> Reward:
    del items
    return (turns[0] == turns[0][..., :1, :]).all(-2).mean(-1)


def remember(turns: list, items: Tokens) -> Reward:
    del items
    return 0.5 * (turns[0][..., 0] == TARGET).mean(-1) + 0.5 * (turns[1] == passed_on(turns[0])[..., None]).mean((-1, -2))


def passed_on(tokens: Tokens) -> jax.Array:
    """What each agent reads in the next turn [..., N]: the first token of the next agent's [..., N, T]."""
    return jnp.roll(tokens[..., 0], -1, -1)


PROBES = {
    "constant": Probe(constant),
    "emit": Probe(emit),
    "copy": Probe(copy),
    "agree": Probe(agree, min_agents=2),
    "remember": Probe(remember, turns=2),
}


def check_probe(probe: str, cfg: TrainConfig) -> None:
    """Refuse settings that `run` does not have."""
    row = find_row(cfg.algorithm)
    if row.critic or row.baseline == "greedy":
        raise ValueError(
            f"algorithm={cfg.algorithm!r} is not made in one program: rows with a critic or a greedy baseline are not"
        )
    if cfg.episodes.joint_mode != "aligned" or (PROBES[probe].turns > 1 and cfg.episodes.branching != "chain"):
        raise ValueError("one program makes aligned joint actions, and of several turns chains: set branching='chain'")
    if cfg.episodes.num_turns != PROBES[probe].turns or cfg.sampling.min_new_tokens:
        raise ValueError(f"probe {probe!r} has num_turns={PROBES[probe].turns} and min_new_tokens=0")


def run(state: StackState, items: jax.Array, step: jax.Array | int = 0, *, probe: str, model: ModelConfig, cfg: TrainConfig):
    """Train a stack of N agents on a probe: one update for each row of items [updates, P]; state is donated, but not the base
    of its adapters.

    step: the number of the first update, from which with cfg.seed all randomness follows. Returns the state, and the metrics of
    all updates [updates, N] with `reward` [updates].
    """
    check_probe(probe, cfg)
    trained, metrics = _run(
        state._replace(base=None), state.base, items, step, probe=probe, model=model, cfg=cfg, algorithm=resolve(cfg)
    )
    return trained._replace(base=state.base), metrics


@partial(jax.jit, static_argnames=("probe", "model", "cfg", "algorithm"), donate_argnames="state")
def _run(
    state: StackState,
    base: Any,
    items: jax.Array,
    step: jax.Array | int,
    *,
    probe: str,
    model: ModelConfig,
    cfg: TrainConfig,
    algorithm: Algorithm,
) -> tuple[StackState, dict[str, jax.Array]]:
    def update(carry, items):
        state, step = carry
        batch, reward = play(lora.join(base, state.params), items, step, PROBES[probe], model, cfg, algorithm)
        batch = batch._replace(keys=update_keys(algorithm, cfg.run.seed, step, 0, batch.tokens.shape[0]))
        reference = state.reference
        state, metrics, _ = update_agents(
            state._replace(reference=None), reference, batch, base=base, model=model, algorithm=algorithm
        )
        return (state._replace(reference=reference), step + 1), metrics | {"reward": reward}

    (state, _), metrics = lax.scan(update, (state, jnp.asarray(step)), items)
    return state, metrics


def play(
    params: Any, items: jax.Array, step: jax.Array, probe: Probe, model: ModelConfig, cfg: TrainConfig, algorithm: Algorithm
) -> tuple[Batch, jax.Array]:
    """The batch of one step on items [P], and its mean reward."""
    n, p, g = own_leaves(params)[0][0].shape[0], items.shape[0], cfg.episodes.num_generations
    read = jnp.broadcast_to(items, (n, p))  # the token in each prompt [N, rows]
    nodes, said, parts = jnp.arange(p), [], []
    for turn in range(probe.turns):
        group = g if turn == 0 else 1
        ids = RowIds(cfg.run.seed, step, purpose=0, stack=0, agents=jnp.arange(n)[:, None], prompt_ids=nodes, turn=turn)
        prompts = jnp.stack([jnp.full_like(read, MARK), read, jnp.full_like(read, MARK)], -1)
        inputs = SampleInputs(prompts, jnp.full(read.shape, 3), row_keys(ids, group), jnp.array([STOP]))
        done = sample(params, model, cfg.sampling, inputs)
        said.append(jnp.moveaxis(done.tokens.reshape(n, p, g, -1), 0, 2))  # [P, G, N, T]
        parts.append((prompts, done))
        read = jnp.moveaxis(passed_on(said[-1]), -1, 0).reshape(n, p * g)
        nodes = (jnp.arange(p)[:, None] * g + jnp.arange(g)).reshape(-1)
    reward = probe.reward(said, jnp.broadcast_to(items[:, None], (p, g)))
    batches = [part_of(read, done, reward, turn, cfg, algorithm, len(parts)) for turn, (read, done) in enumerate(parts)]
    return concatenate_prompts(batches) if len(batches) > 1 else batches[0], reward.mean()


def part_of(
    prompts: jax.Array,
    done: Completions,
    reward: jax.Array,
    turn: int,
    cfg: TrainConfig,
    algorithm: Algorithm,
    turns: int,
) -> Batch:
    """One turn's part of a batch: all of them get the reward of the end, discounted."""
    n, rows, group = done.tokens.shape[:3]
    p, g = reward.shape
    returns = jnp.broadcast_to((cfg.episodes.gamma ** (turns - 1 - turn) * reward).reshape(rows, group), (n, rows, group))
    together = algorithm.row.grouping == "episode"
    groups = jnp.repeat(jnp.arange(p), g).reshape(rows, group) + (0 if together else turn * p)
    groups = jnp.broadcast_to(groups, returns.shape)
    batch = Batch(
        prompts,
        jnp.full((n, rows), 3),
        done.tokens,
        done.action_mask,
        done.logprobs,
        done.ended,
        returns,
        groups,
        jnp.zeros_like(groups),
        done.truncated_logprobs,
    )
    return one_per_prompt(batch) if turns > 1 else batch
