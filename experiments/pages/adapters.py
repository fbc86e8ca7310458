"""Many roles on one base on one page: MAGRPO where each role is a LoRA adapter of the same frozen weights.

Against `magrpo.py`: only adapters have an agent axis and an optimizer; the base is one array for all roles, so each
further role costs its adapters alone. Roles read the same prompt; their adapters begin equal in what they compute (b = 0).

Claim: three roles over one base of random weights, which read the same prompt, learn from their joint reward alone to write a
    headline, a summary and a story. The first updates are those of `jmarl.train` (tests/test_pages.py).
Command: python -m experiments.pages.adapters    (a real model: --model smollm2-135m-instruct --updates 20 --rate 5e-4)
Expected: held-out reward 0.15, 0.24, 0.15 before and 0.93, 0.88, 0.89 after 200 updates (seeds 0, 1, 2), each in a minute on 2
    cores. With SmolLM2 and P = 1: 0.17 before and 0.43 after 20 updates, 4 minutes of computing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.pages.common import make_agents, make_flags, pad, show
from jmarl.config import LoRA
from jmarl.models import lora
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import decode, encode_prompts
from jmarl.models.stack import per_agent, share_params
from jmarl.models.weights import num_params
from jmarl.randomness import EVAL, TRAIN, tasks_of
from jmarl.rl.advantages import estimate, group_mean
from jmarl.rl.losses import policy_gradient, token_weights
from jmarl.sampling.sampler import RowIds, SampleInputs, Sampling, row_keys, sample
from jmarl.sampling.scoring import score
from jmarl.types import Completions

# Axes: A roles, P prompts, G completions of a prompt (the group), S tokens of a prompt, T tokens of a completion.
ROLES = {"headline": 20, "summary": 40, "story": 80}  # how many letters each is to write
A, P, G, T = len(ROLES), 4, 8, 24
ADAPTERS = LoRA(lora_rank=8)
TOPICS = ["a city in the clouds", "a new fruit", "a dragon who cannot sleep", "the last library", "a robot that dreams"]
HELD_OUT = ["a river of glass", "the first snow", "a city under the sea", "a robot that sleeps"]
WORDS = ("city", "clouds", "fruit", "dragon", "sleep", "library", "robot", "dreams", "river", "snow", "sea", "story")
Params = Any  # of the base: a pytree of `Shared` arrays without an agent axis; of adapters: of arrays [A, ...]


class Prompts(NamedTuple):
    ids: Any  # [A, P, S], padded on the right
    lengths: Any  # [A, P]


class Batch(NamedTuple):
    prompts: Prompts
    completions: Completions  # tokens, action_mask, logprobs, ... [A, P, G, T]
    returns: Any  # [A, P, G]


class State(NamedTuple):
    adapters: Params
    opt_state: Any  # pytree [A, ...]


class Run(NamedTuple):
    """Everything of a run that does not change."""

    agent: Agent  # model and tokenizer of all roles
    base: Params
    init: Callable  # adapters -> state
    sample: Callable  # (base, adapters, prompts, step, purpose) -> completions: one program for all roles
    update: Callable  # (base, state, batch) -> state: one program for all roles; the old state is donated


def reward(texts: Sequence[str]) -> float:
    """Return 1 if each text is as long as its role asks for, less for others. All roles get this number."""
    lengths = zip(texts, ROLES.values(), strict=True)
    return float(np.mean([1 - min(abs(len(text) - length) / length, 1) for text, length in lengths]))


def make_base(model: str, seed: int) -> Agent:
    """Return what all roles start from. A random one gets larger logits, because adapters leave the output weight as it is."""
    (agent,) = make_agents(model, WORDS, 1, seed)
    return agent if model else agent._replace(params=agent.params | {"final_norm": 4 * agent.params["final_norm"]})


def encode(agent: Agent, topics: Sequence[str]) -> Prompts:
    """Return the prompts of all roles, which read the same."""
    texts = [f"Tell a story about {topic}." for topic in topics]
    ids, lengths = pad(encode_prompts(agent.tokenizer, texts, agent.config.max_positions, T))
    return Prompts(np.stack([ids] * A), np.stack([lengths] * A))


def prepare(agent: Agent, learning_rate: float, seed: int) -> tuple[Run, Params]:
    """Resolve all settings, once. Also returns new adapters."""
    model, stop = agent.config, jnp.array(agent.stop)
    sampling = Sampling(max_new_tokens=T, temperature=1.0, compute_dtype="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))
    joined = lora.init_models([share_params([agent.params])], [(model, A)], ADAPTERS, seed)[0]
    base, adapters = lora.split(joined)

    def sample_team(base: Params, adapters: Params, prompts: Prompts, step: int, purpose: int) -> Completions:
        numbers = jnp.arange(prompts.ids.shape[1])  # of the prompts; the random key of a row follows from numbers alone
        keys = row_keys(RowIds(seed, step, purpose, stack=0, agents=jnp.arange(A), prompt_ids=numbers), G)  # [A, P, G]
        return sample(lora.join(base, adapters), model, sampling, SampleInputs(*prompts, keys, stop))

    def update_role(base: Params, state: State, batch: Batch) -> State:  # of one role: arrays without the axis A
        (prompts, lengths), (tokens, mask, old_logprobs, *_), returns = batch
        advantages = estimate(group_mean, returns)  # A_g = R_g - mean_h R_h, [P, G]
        weights = token_weights(mask, "token_mean")  # w_t = 1 / number of tokens, [P, G, T]

        def loss(adapters: Params) -> jax.Array:  # -sum_t w_t A_g log pi(a_t | prompt, a_<t); the base has no gradient
            logprobs = score(lora.join(base, adapters), model, prompts, lengths, tokens).logprobs  # [P, G, T]
            return policy_gradient(logprobs, old_logprobs, advantages[..., None], weights)[0]

        changes, opt_state = optimizer.update(jax.grad(loss)(state.adapters), state.opt_state, state.adapters)
        return State(optax.apply_updates(state.adapters, changes), opt_state)

    def init(adapters: Params) -> State:
        return State(adapters, jax.vmap(optimizer.init)(adapters))

    update = per_agent(update_role, "vmap")  # vmap, with the base passed to each role as it is
    return Run(agent, base, init, jax.jit(sample_team), jax.jit(update, donate_argnums=1)), adapters


def play(run: Run, adapters: Params, prompts: Prompts, step: int, purpose: int) -> tuple[Completions, np.ndarray]:
    """Return completions, and the rewards [P, G] of the g-th completions of all roles."""
    completions = run.sample(run.base, adapters, prompts, step, purpose)
    tokens, mask = jax.device_get((completions.tokens, completions.action_mask))  # [A, P, G, T]; mask: up to the end token

    def texts(a: int, p: int) -> list[str]:
        return decode(run.agent.tokenizer, [row[chosen] for row, chosen in zip(tokens[a, p], mask[a, p], strict=True)])

    joint = [zip(*(texts(a, p) for a in range(A)), strict=True) for p in range(tokens.shape[1])]
    return completions, np.array([[reward(action) for action in actions] for actions in joint], np.float32)


def train(run: Run, adapters: Params, updates: int, seed: int) -> Iterator[tuple[State, np.ndarray]]:
    """Yield the state and the rewards after each update. The next update consumes the state."""
    state, (ids, lengths) = run.init(adapters), encode(run.agent, TOPICS)
    for step in range(updates):
        chosen = tasks_of(step, len(TOPICS), P, seed)
        prompts = Prompts(ids[:, chosen], lengths[:, chosen])
        completions, rewards = play(run, state.adapters, prompts, step, TRAIN)
        state = run.update(run.base, state, Batch(prompts, completions, np.stack([rewards] * A)))
        yield state, rewards


def main() -> None:
    args = make_flags(__doc__, updates=200, rate=1e-3).parse_args()
    agent = make_base(args.model, args.seed)
    (run, adapters), held_out = prepare(agent, args.rate, args.seed), encode(agent, HELD_OUT)
    trained = sum(x.size for x in jax.tree.leaves(adapters))
    print(f"{A} roles with {trained // A:,} trained numbers each, over one base of {num_params(agent.config):,}")
    _, before = play(run, adapters, held_out, 0, EVAL)
    show(0, "held-out reward", before.mean())
    for number, (state, rewards) in enumerate(train(run, adapters, args.updates, args.seed), 1):
        adapters = state.adapters
        show(number, "reward", rewards.mean())
    _, after = play(run, adapters, held_out, 0, EVAL)
    print(f"held-out reward before {before.mean():.2f}, after {after.mean():.2f}")


if __name__ == "__main__":
    main()
