"""The whole algorithm on one page: two agents sample, are rewarded together, and each learns from its own group (MAGRPO).

This is the first script of the README without `jmarl.train`: the same steps in the same order, on the pure functions of `rl`,
`models` and `sampling` alone. Left out is what long runs need besides: logs, checkpoints, devices. The pages beside this one
have a critic, later turns, pairs and adapters.

Claim: two agents of random weights learn from their joint reward alone that the second text is to be three times as long as the
    first. The first updates are those of `jmarl.train` (tests/test_pages.py).
Command: python -m experiments.pages.magrpo    (README's script: --model smollm2-135m-instruct --updates 30 --rate 5e-5)
Expected: held-out reward 0.32, 0.26, 0.23 before and 0.92, 0.91, 0.93 after 300 updates (seeds 0, 1, 2), each in half a minute
    on 2 cores, mostly for compiling. With SmolLM2 rounding moves single tokens: its first rewards are 0.181, 0.389 and 0.319,
    those of `jmarl.train` 0.181, 0.383 and 0.309.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.pages.common import make_agents, make_flags, pad, show
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import decode, encode_prompts
from jmarl.models.stack import stack_params
from jmarl.randomness import EVAL, TRAIN, tasks_of
from jmarl.rl.advantages import estimate, group_mean
from jmarl.rl.losses import policy_gradient, token_weights
from jmarl.sampling.sampler import RowIds, SampleInputs, Sampling, row_keys, sample
from jmarl.sampling.scoring import score
from jmarl.types import Completions

# Axes: A agents, P prompts, G completions of a prompt (the group), S tokens of a prompt, T tokens of a completion.
A, G, T = 2, 8, 24
TOPICS = ["a city in the clouds", "a new fruit", "a dragon who cannot sleep", "the last library", "a robot that dreams"]
HELD_OUT = ["a river of glass", "the first snow", "a city under the sea", "a robot that sleeps"]
WORDS = ("city", "clouds", "fruit", "dragon", "sleep", "library", "robot", "dreams", "river", "snow", "sea", "story")
Params = Any  # a pytree of arrays [A, ...]


class Prompts(NamedTuple):
    ids: Any  # [A, P, S], padded on the right
    lengths: Any  # [A, P]


class Batch(NamedTuple):
    prompts: Prompts
    completions: Completions  # tokens, action_mask, logprobs, ... [A, P, G, T]
    returns: Any  # [A, P, G]


class State(NamedTuple):
    params: Params
    opt_state: Any  # pytree [A, ...]


class Run(NamedTuple):
    """Everything of a run that does not change."""

    agent: Agent  # model and tokenizer of all agents
    init: Callable  # params -> state
    sample: Callable  # (params, prompts, step, purpose) -> completions: one program for all agents
    update: Callable  # (state, batch) -> state: one program for all agents; the old state is donated


def reward(setup: str, story: str) -> float:
    """Return 1 for a story that is three times as long as the setup, less for others. Both agents get this number."""
    return 1 - min(abs(len(story) / max(len(setup), 1) - 3) / 3, 1)


def encode(agent: Agent, topics: Sequence[str]) -> Prompts:
    """Return the prompts of all agents, which read the same."""
    texts = [f"Tell a story about {topic}." for topic in topics]
    ids, lengths = pad(encode_prompts(agent.tokenizer, texts, agent.config.max_positions, T))
    return Prompts(np.stack([ids] * A), np.stack([lengths] * A))


def prepare(agent: Agent, learning_rate: float, seed: int) -> Run:
    """Resolve all settings, once."""
    model, stop = agent.config, jnp.array(agent.stop)
    sampling = Sampling(max_new_tokens=T, temperature=1.0, compute_dtype="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))

    def sample_team(params: Params, prompts: Prompts, step: int, purpose: int) -> Completions:
        numbers = jnp.arange(prompts.ids.shape[1])  # of the prompts; the random key of a row follows from numbers alone
        keys = row_keys(RowIds(seed, step, purpose, stack=0, agents=jnp.arange(A), prompt_ids=numbers), G)  # [A, P, G]
        return sample(params, model, sampling, SampleInputs(*prompts, keys, stop))

    def update_agent(state: State, batch: Batch) -> State:  # of one agent: arrays without the axis A
        (prompts, lengths), (tokens, mask, old_logprobs, *_), returns = batch
        advantages = estimate(group_mean, returns)  # A_g = R_g - mean_h R_h, [P, G]
        weights = token_weights(mask, "token_mean")  # w_t = 1 / number of tokens, [P, G, T]

        def loss(params: Params) -> jax.Array:  # -sum_t w_t A_g log pi(a_t | prompt, a_<t)
            logprobs = score(params, model, prompts, lengths, tokens).logprobs  # [P, G, T]
            return policy_gradient(logprobs, old_logprobs, advantages[..., None], weights)[0]

        changes, opt_state = optimizer.update(jax.grad(loss)(state.params), state.opt_state, state.params)
        return State(optax.apply_updates(state.params, changes), opt_state)

    def init(params: Params) -> State:
        return State(params, jax.vmap(optimizer.init)(params))

    return Run(agent, init, jax.jit(sample_team), jax.jit(jax.vmap(update_agent), donate_argnums=0))


def play(run: Run, params: Params, prompts: Prompts, step: int, purpose: int) -> tuple[Completions, np.ndarray]:
    """Return completions, and the rewards [P, G, G] of every setup with every story of its prompt (joint mode cross)."""
    completions = run.sample(params, prompts, step, purpose)
    tokens, mask = jax.device_get((completions.tokens, completions.action_mask))  # [A, P, G, T]; mask: up to the end token

    def texts(a: int, p: int) -> list[str]:
        return decode(run.agent.tokenizer, [row[chosen] for row, chosen in zip(tokens[a, p], mask[a, p], strict=True)])

    rewards = [[[reward(x, y) for y in texts(1, p)] for x in texts(0, p)] for p in range(tokens.shape[1])]
    return completions, np.array(rewards, np.float32)


def make_batch(prompts: Prompts, completions: Completions, rewards: np.ndarray) -> Batch:
    """Return what the agents learn from: R of a completion is its mean reward over all completions of the partner."""
    return Batch(prompts, completions, np.stack([rewards.mean(2), rewards.mean(1)]))


def train(run: Run, params: Params, updates: int, seed: int) -> Iterator[tuple[State, Completions, np.ndarray]]:
    """Yield the state, the completions and their rewards after each update. The next update consumes the state."""
    state, prompts = run.init(params), encode(run.agent, TOPICS)
    for step in range(updates):
        task = tasks_of(step, len(TOPICS), 1, seed)  # every epoch has an order of its own
        task_prompts = Prompts(prompts.ids[:, task], prompts.lengths[:, task])  # P = 1
        completions, rewards = play(run, state.params, task_prompts, step, TRAIN)
        batch = make_batch(task_prompts, completions, rewards)
        state = run.update(state, batch)
        yield state, completions, rewards


def main() -> None:
    args = make_flags(__doc__, updates=300, rate=1e-3).parse_args()
    agents = make_agents(args.model, WORDS, A, args.seed)
    params = stack_params([agent.params for agent in agents])
    run, held_out = prepare(agents[0], args.rate, args.seed), encode(agents[0], HELD_OUT)
    _, before = play(run, params, held_out, 0, EVAL)
    show(0, "held-out reward", before.mean())
    for number, (state, _, rewards) in enumerate(train(run, params, args.updates, args.seed), 1):
        params = state.params
        show(number, "reward", rewards.mean())
    _, after = play(run, params, held_out, 0, EVAL)
    print(f"held-out reward before {before.mean():.2f}, after {after.mean():.2f}")


if __name__ == "__main__":
    main()
