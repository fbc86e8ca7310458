"""Probe environments: tasks so small that a failure to learn one names the broken part; and whole runs on them as one program.

Tasks are arrays of token ids. A task is an item: a token that all agents read as their prompt, between two marks. Completions
have one length, nothing ends early, and all agents get the same reward:

1. constant: always 1. Nothing to learn but a critic's value.
2. emit: the share of tokens that are `TARGET`. A bandit: advantages and the policy gradient.
3. copy: the share of tokens that are the item. The prompt must be read.
4. agree: the share of positions where all agents write the same token, without seeing each other's: joint credit.
5. remember: two turns and a reward only at the end: half for `TARGET` as the first token of the first turn, half for copying
   in the second turn the next agent's first token, which is then the prompt. Credit over turns.

`run` is sampling, environment, reward, advantages and update of all steps in one program (as in PureJaxRL): no host, no text.
A test shows that it equals the training loop on the same items. Left out: rows with critics or greedy baselines, trees, cross
joint actions, several stacks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jmarl.algorithms import Algorithm, find_row, on_platform, resolve, with_fastest_updates
from jmarl.config import TrainConfig
from jmarl.learning.batches import concatenate_prompts, one_per_prompt
from jmarl.learning.program import make_program, update_agents
from jmarl.models import lora
from jmarl.models.config import ModelConfig
from jmarl.models.platforms import platform_of
from jmarl.models.stack import own_leaves
from jmarl.sampling.sampler import RowIds, SampleInputs, row_keys, sample
from jmarl.types import Batch, Completions, StackState

MARK, TARGET = 0, 1  # a mark around items, and the token that probes 2 and 5 ask for
ITEMS = tuple(range(2, 10))  # tokens that are items
VOCAB = 11
# No token of the model ends a completion. Forbidding one that it has (min_new_tokens) would leave it in the probabilities that
# are scored, and all-negative advantages (maremax) would move all mass to it, because it is never sampled.
STOP = VOCAB

Tokens = jax.Array | np.ndarray  # the environment of the loop calls rewards with arrays of the host
Reward = jax.Array | np.ndarray | np.floating


TurnTokens = list[Int[Array, "*task agent token"]]  # of each turn so far
Items = Int[Array, "*task"]
Rewards = Float[Array, "*task"]


class Probe(NamedTuple):
    """A probe: reward(tokens of each turn, items) -> rewards in [0, 1]."""

    reward: Callable[[TurnTokens, Items], Rewards]
    turns: int = 1
    min_agents: int = 1


def constant(turns: TurnTokens, items: Items) -> Rewards:
    del items
    return jnp.ones(turns[0].shape[:-2])


def emit(turns: TurnTokens, items: Items) -> Rewards:
    del items
    return (turns[0] == TARGET).mean((-1, -2))


def copy(turns: TurnTokens, items: Items) -> Rewards:
    return (turns[0] == items[..., None, None]).mean((-1, -2))


def agree(turns: TurnTokens, items: Items) -> Rewards:
    del items
    return (turns[0] == turns[0][..., :1, :]).all(-2).mean(-1)


def remember(turns: TurnTokens, items: Items) -> Rewards:
    del items
    first, second = turns
    return 0.5 * (first[..., 0] == TARGET).mean(-1) + 0.5 * (second == next_prompt(first)[..., None]).mean((-1, -2))


def next_prompt(tokens: Int[Array, "*task agent token"]) -> Int[Array, "*task agent"]:
    """Return the item of each agent in the next turn: the first token that the next agent wrote."""
    return jnp.roll(tokens[..., 0], -1, -1)


PROBES = {
    "constant": Probe(constant),
    "emit": Probe(emit),
    "copy": Probe(copy),
    "agree": Probe(agree, min_agents=2),
    "remember": Probe(remember, turns=2),
}


def check_probe(probe: str, cfg: TrainConfig) -> None:
    """Raise a ValueError for settings that `run` does not have."""
    row = find_row(cfg.algorithm)
    if row.critic or row.baseline == "greedy" or row.across_turns:
        raise ValueError(
            f"algorithm={cfg.algorithm!r} has a critic or a greedy baseline, or reads all turns: a probe runs others"
        )
    if cfg.episodes.joint_mode != "aligned" or (PROBES[probe].turns > 1 and cfg.episodes.branching != "chain"):
        raise ValueError("a probe has joint_mode='aligned' and, with several turns, branching='chain': set them")
    if cfg.episodes.num_turns != PROBES[probe].turns or cfg.sampling.min_new_tokens:
        raise ValueError(f"probe {probe!r} has num_turns={PROBES[probe].turns} and min_new_tokens=0")


def run(
    state: StackState,
    items: Int[Array, "update prompt"],
    step: Int[Array, ""] | int = 0,
    *,
    probe: str,
    model: ModelConfig,
    cfg: TrainConfig,
) -> tuple[StackState, dict[str, Num[Array, "update ..."]]]:
    """Train a stack of N agents on a probe: one update per row of items. The state is donated, except what is frozen.

    step: the number of the first update; all randomness follows from it and the seed. Returns the state and the metrics of all
    updates [updates, N], with `reward` [updates].
    """
    check_probe(probe, cfg)
    cfg = with_fastest_updates(on_platform(cfg, platform_of(state)))  # the models are tiny
    static: Any = dict(probe=probe, model=model, cfg=cfg, algorithm=resolve(cfg))
    trained, metrics = _run(state._replace(reference=None, base=None), state.frozen, items, step, **static)
    return trained._replace(reference=state.reference, base=state.base), metrics


@partial(jax.jit, static_argnames=("probe", "model", "cfg", "algorithm"), donate_argnames="state")
def _run(
    state: StackState,
    frozen: Any,
    items: Int[Array, "update prompt"],
    step: Int[Array, ""] | int,
    *,
    probe: str,
    model: ModelConfig,
    cfg: TrainConfig,
    algorithm: Algorithm,
) -> tuple[StackState, dict[str, Num[Array, "update ..."]]]:
    agents = state.skipped.shape[0]
    program = make_program(model, [(i,) for i in range(agents)], algorithm, cfg.run, number=0, team_size=agents, mesh=None)
    numbers = jax.tree.map(jnp.asarray, program.numbers)

    def one_update(
        carry: tuple[StackState, Int[Array, ""]], items: Int[Array, " prompt"]
    ) -> tuple[tuple[StackState, Int[Array, ""]], dict[str, Num[Array, "..."]]]:
        state, step = carry
        batch, reward = play_probe(lora.join(frozen, state.params), items, step, PROBES[probe], model, cfg, algorithm)
        new = batch, numbers, jnp.full(agents, step), None, program.keys(step)
        state, metrics = update_agents(program, state, frozen, *new)
        return (state, step + 1), metrics | {"reward": reward}

    (state, _), metrics = lax.scan(one_update, (state, jnp.asarray(step)), items)
    return state, metrics


def play_probe(
    params: Any,
    items: Int[Array, " prompt"],
    step: Int[Array, ""],
    probe: Probe,
    model: ModelConfig,
    cfg: TrainConfig,
    algorithm: Algorithm,
) -> tuple[Batch, Float[Array, ""]]:
    """Return the batch of one step and its mean reward."""
    agents, p, g = own_leaves(params)[0][0].shape[0], items.shape[0], cfg.episodes.num_generations
    agent_items = jnp.broadcast_to(items, (agents, p))  # the token in each prompt [N, rows]
    nodes, turn_tokens, turns = jnp.arange(p), [], []
    for turn in range(probe.turns):
        group = g if turn == 0 else 1
        numbers = jnp.arange(agents)[:, None]
        ids = RowIds(cfg.run.seed, step, purpose=0, stack=0, agents=numbers, prompt_ids=nodes, turn=turn)
        marks = jnp.full_like(agent_items, MARK)
        prompts = jnp.stack([marks, agent_items, marks], -1)
        inputs = SampleInputs(prompts, jnp.full(agent_items.shape, 3), row_keys(ids, group), jnp.array([STOP]))
        completions = sample(params, model, cfg.sampling, inputs)
        turn_tokens.append(jnp.moveaxis(completions.tokens.reshape(agents, p, g, -1), 0, 2))  # [P, G, N, T]
        turns.append((prompts, completions))
        agent_items = jnp.moveaxis(next_prompt(turn_tokens[-1]), -1, 0).reshape(agents, p * g)
        nodes = (jnp.arange(p)[:, None] * g + jnp.arange(g)).reshape(-1)
    reward = probe.reward(turn_tokens, jnp.broadcast_to(items[:, None], (p, g)))
    batches = []
    for turn, (prompts, completions) in enumerate(turns):
        discounted = cfg.episodes.gamma ** (len(turns) - 1 - turn) * reward  # the only reward is that of the end
        first_group = 0 if algorithm.row.grouping == "episode" else turn * p
        batches.append(turn_batch(prompts, completions, discounted, first_group))
    if len(batches) == 1:
        return batches[0], reward.mean()
    return concatenate_prompts([one_per_prompt(batch) for batch in batches]), reward.mean()


def turn_batch(
    prompts: Int[Array, "agent row 3"], completions: Completions, returns: Float[Array, "prompt group"], first_group: int
) -> Batch:
    """Return the batch of one turn; its groups are numbered from `first_group` on."""
    p, g = returns.shape
    agents, rows, group = completions.tokens.shape[:3]
    shape = (agents, rows, group)
    groups = jnp.broadcast_to(jnp.repeat(jnp.arange(p), g).reshape(rows, group) + first_group, shape)
    return Batch(
        prompts=prompts,
        prompt_lengths=jnp.full((agents, rows), 3),
        tokens=completions.tokens,
        action_mask=completions.action_mask,
        old_logprobs=completions.logprobs,
        ended=completions.ended,
        rewards=jnp.broadcast_to(returns.reshape(rows, group), shape),
        groups=groups,
        roles=jnp.zeros_like(groups),
        truncated_logprobs=completions.truncated_logprobs,
        values=jnp.zeros((*shape, 1)),
        ref_logprobs=jnp.zeros((*shape, 1)),
        penalty=jnp.zeros((*shape, 1)),
    )
