"""MAAC on one page: a critic of the team reads the prompts of all agents, and each agent learns from return minus its value.

Against `magrpo.py`: the baseline is a network, so a step takes several prompts and compares no group. The critic is a decoder
with a value head, which begins as a copy of the first agent. What prompts ask for differs, so that their values do.

Claim: two agents of random weights learn from their joint reward alone that the second text is to be twice, three or four times
    as long as the first, as the prompt says. The first updates are those of `jmarl.train` (tests/test_pages.py).
Command: python -m experiments.pages.critic    (--help; --model takes a real one)
Expected: held-out reward 0.28, 0.39, 0.35 before and 0.87, 0.68, 0.88 after 300 updates (seeds 0, 1, 2), each in a minute on 2
    cores. With two completions of a prompt in place of four, one of three seeds collapsed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.pages.common import make_agents, make_flags, pad, show
from jmarl.models.heads import values_of, with_value_head
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import by_agent, decode, encode_prompts
from jmarl.models.stack import stack_params
from jmarl.randomness import EVAL, TRAIN, tasks_of
from jmarl.rl.losses import policy_gradient, token_weights
from jmarl.sampling.sampler import RowIds, SampleInputs, Sampling, row_keys, sample
from jmarl.sampling.scoring import hidden_states, score
from jmarl.types import Completions

# Axes: A agents, P prompts, G completions of a prompt, S tokens of a prompt, T tokens of a completion.
A, P, G, T = 2, 6, 4, 24
FACTORS = {"twice": 2, "thrice": 3, "fourfold": 4}
TOPICS = ["a city in the clouds", "a new fruit", "a dragon who cannot sleep", "the last library", "a robot that dreams"]
TASKS = [(topic, word) for topic in TOPICS for word in FACTORS]
HELD_OUT = [(topic, word) for topic in ("a river of glass", "a robot that sleeps") for word in FACTORS]
WORDS = (*FACTORS, "city", "clouds", "fruit", "dragon", "sleep", "library", "robot", "dreams", "river", "snow", "story")
Task = tuple[str, str]
Params = Any  # a pytree of arrays: of agents [A, ...], of the critic without an axis


class Prompts(NamedTuple):
    ids: Any  # [A, P, S], padded on the right; of the critic [P, S]
    lengths: Any  # [A, P]


class State(NamedTuple):
    params: Params
    opt_state: Any


class Run(NamedTuple):
    """Everything of a run that does not change."""

    agent: Agent  # model and tokenizer of all agents and of the critic
    init: Callable  # params of the agents -> states of agents and critic
    sample: Callable  # (params, prompts, step, purpose) -> completions: one program for all agents
    update: Callable  # (agents, critic, prompts, joint prompts, completions, rewards) -> agents, critic, error of the critic


def reward(setup: str, story: str, factor: int) -> float:
    """Return 1 for a story that is `factor` times as long as the setup, less for others. Both agents get this number."""
    return 1 - min(abs(len(story) / max(len(setup), 1) - factor) / factor, 1)


def prompt(task: Task) -> str:
    """Return what both agents read."""
    return "Tell a story about {}, {} as long as its setup.".format(*task)


def encode(agent: Agent, tasks: Sequence[Task]) -> tuple[Prompts, Prompts]:
    """Return the prompts of the agents and the joint prompts, which the critic reads: a line for each agent."""
    own = [prompt(task) for task in tasks]
    joint = [by_agent([text] * A) for text in own]
    ids, lengths = pad(encode_prompts(agent.tokenizer, own, agent.config.max_positions, T))
    critic = Prompts(*pad(encode_prompts(agent.tokenizer, joint, agent.config.max_positions)))
    return Prompts(np.stack([ids] * A), np.stack([lengths] * A)), critic


def prepare(agent: Agent, learning_rate: float, seed: int) -> Run:
    """Resolve all settings, once."""
    model, stop = agent.config, jnp.array(agent.stop)
    sampling = Sampling(max_new_tokens=T, temperature=1.0, compute_dtype="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))

    def sample_team(params: Params, prompts: Prompts, step: int, purpose: int) -> Completions:
        numbers = jnp.arange(prompts.ids.shape[1])  # of the prompts; the random key of a row follows from numbers alone
        keys = row_keys(RowIds(seed, step, purpose, stack=0, agents=jnp.arange(A), prompt_ids=numbers), G)  # [A, P, G]
        return sample(params, model, sampling, SampleInputs(*prompts, keys, stop))

    def descend(state: State, gradient: Params) -> State:
        changes, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, changes), opt_state)

    def values(params: Params, prompts: Prompts) -> jax.Array:  # V(joint prompt), read at its last token: [P]
        one_token = jnp.zeros((len(prompts.ids), 1, 1), jnp.int32)  # what follows the prompt, which the value does not see
        return values_of(params, hidden_states(params, model, *prompts, one_token, "dots")[0])

    def update_critic(state: State, prompts: Prompts, rewards: jax.Array) -> tuple[State, jax.Array]:
        def loss(params: Params) -> jax.Array:  # mean (R - V)^2
            return jnp.mean((rewards - values(params, prompts)[:, None]) ** 2)

        error, gradient = jax.value_and_grad(loss)(state.params)
        return descend(state, gradient), error

    def update_agent(state: State, prompts: Prompts, completions: Completions, advantages: jax.Array) -> State:
        weights = token_weights(completions.action_mask, "token_mean")  # w_t = 1 / number of tokens, [P, G, T]

        def loss(params: Params) -> jax.Array:  # -sum_t w_t A_g log pi(a_t | prompt, a_<t)
            logprobs = score(params, model, *prompts, completions.tokens).logprobs  # [P, G, T]
            return policy_gradient(logprobs, completions.logprobs, advantages[..., None], weights)[0]

        return descend(state, jax.grad(loss)(state.params))

    def update(
        agents: State, critic: State, prompts: Prompts, joint: Prompts, completions: Completions, rewards: jax.Array
    ) -> tuple[State, State, jax.Array]:
        advantages = rewards - values(critic.params, joint)[:, None]  # A_g = R_g - V of the critic before its step: [P, G]
        critic, error = update_critic(critic, joint, rewards)
        return jax.vmap(update_agent, (0, 0, 0, None))(agents, prompts, completions, advantages), critic, error

    def init(params: Params) -> tuple[State, State]:
        critic = jax.tree.map(lambda x: x[0], with_value_head(params))  # a copy of the first agent; the head is 0
        return State(params, jax.vmap(optimizer.init)(params)), State(critic, optimizer.init(critic))

    return Run(agent, init, jax.jit(sample_team), jax.jit(update, donate_argnums=(0, 1)))


def play(run: Run, params: Params, prompts: Prompts, tasks: Sequence[Task], step: int, purpose: int) -> tuple[Completions, Any]:
    """Return completions, and the rewards [P, G] of the g-th setups with the g-th stories."""
    completions = run.sample(params, prompts, step, purpose)
    tokens, mask = jax.device_get((completions.tokens, completions.action_mask))  # [A, P, G, T]; mask: up to the end token

    def texts(a: int, p: int) -> list[str]:
        return decode(run.agent.tokenizer, [row[chosen] for row, chosen in zip(tokens[a, p], mask[a, p], strict=True)])

    factors = [FACTORS[word] for _, word in tasks]
    pairs = [zip(texts(0, p), texts(1, p), strict=True) for p in range(len(tasks))]
    return completions, np.array([[reward(*x, n) for x in pair] for pair, n in zip(pairs, factors, strict=True)], np.float32)


def train(run: Run, params: Params, updates: int, seed: int) -> Iterator[tuple[State, State, np.ndarray, jax.Array]]:
    """Yield the states of agents and critic, rewards and error after each update. The next update consumes the states."""
    agents, critic = run.init(params)
    (ids, lengths), (joint_ids, joint_lengths) = encode(run.agent, TASKS)
    for step in range(updates):
        chosen = tasks_of(step, len(TASKS), P, seed)
        prompts, joint = Prompts(ids[:, chosen], lengths[:, chosen]), Prompts(joint_ids[chosen], joint_lengths[chosen])
        completions, rewards = play(run, agents.params, prompts, [TASKS[i] for i in chosen], step, TRAIN)
        agents, critic, error = run.update(agents, critic, prompts, joint, completions, rewards)
        yield agents, critic, rewards, error


def main() -> None:
    args = make_flags(__doc__, updates=300, rate=1e-3).parse_args()
    agents = make_agents(args.model, WORDS, A, args.seed)
    params = stack_params([agent.params for agent in agents])
    run, (held_out, _) = prepare(agents[0], args.rate, args.seed), encode(agents[0], HELD_OUT)
    _, before = play(run, params, held_out, HELD_OUT, 0, EVAL)
    show(0, "held-out reward", before.mean())
    for number, (state, _, rewards, error) in enumerate(train(run, params, args.updates, args.seed), 1):
        params = state.params
        show(number, f"error of the critic {error:.3f}  reward", rewards.mean())
    _, after = play(run, params, held_out, HELD_OUT, 0, EVAL)
    print(f"held-out reward before {before.mean():.2f}, after {after.mean():.2f}")


if __name__ == "__main__":
    main()
