"""MADPO on one page: a team learns from pairs of joint actions of which one was preferred, by the log-ratio of the whole team.

Against `magrpo.py`: nothing is sampled during training. The data set is made here, once: the starting team writes, and of two
joint actions on a prompt the better one is preferred. `make_pairs` is the line to replace by a data set of your own. The loss
of a pair is of all agents together, so the margin of one agent counts what the others have learned (DPO, arXiv 2305.18290).

Claim: two agents of random weights learn from pairs alone that the second text is to be three times as long as the first. The
    first updates are those of `jmarl.train` (tests/test_pages.py).
Command: python -m experiments.pages.pairs    (--help; --model takes a real one)
Expected: held-out reward 0.28, 0.27, 0.25 before and 0.53, 0.40, 0.55 after 300 updates (seeds 0, 1, 2), loss 0.693 before and
    0.35, 0.49, 0.49 after, each in a minute on 2 cores.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.pages.common import make_agents, make_flags, pad, show
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import decode, encode_completion, encode_prompts
from jmarl.models.stack import stack_params
from jmarl.randomness import EVAL, PAIRS
from jmarl.rl import masked
from jmarl.rl.losses import preference
from jmarl.sampling.sampler import RowIds, SampleInputs, Sampling, row_keys, sample
from jmarl.sampling.scoring import score
from jmarl.types import Completions

# Axes: A agents, P prompts, or pairs of an update, G completions of a prompt, M pairs, S tokens of a prompt, T of a completion.
A, P, G, T, BETA = 2, 20, 16, 24, 0.1
TOPICS = ["a city in the clouds", "a new fruit", "a dragon who cannot sleep", "the last library", "a robot that dreams"]
HELD_OUT = ["a river of glass", "the first snow", "a city under the sea", "a robot that sleeps", "a dragon of snow"]
WORDS = ("city", "clouds", "fruit", "dragon", "sleep", "library", "robot", "dreams", "river", "snow", "sea", "story")
Params = Any  # a pytree of arrays [A, ...]


class Pairs(NamedTuple):
    """Pairs as tokens: of an update, or all."""

    prompts: Any  # [A, M, S], padded on the right
    lengths: Any  # [A, M]
    tokens: Any  # [A, M, 2, T]: chosen, rejected
    mask: Any  # [A, M, 2, T]: tokens of the completions, the one that ends included
    reference: Any  # [A, M, 2]: the completions' log-probabilities under the starting team

    def take(self, numbers: Any) -> "Pairs":
        """Return the pairs with these numbers."""
        return Pairs(*(x[:, numbers] for x in self))


class State(NamedTuple):
    params: Params
    opt_state: Any  # pytree [A, ...]


class Run(NamedTuple):
    """Everything of a run that does not change."""

    agent: Agent  # model and tokenizer of all agents
    init: Callable  # params -> state
    sample: Callable  # (params, prompts, lengths, step, purpose) -> completions: one program for all agents
    logprobs: Callable  # (params, pairs) -> log-probabilities of the completions [A, M, 2]
    loss: Callable  # (params, pairs) -> loss of the team, metrics
    update: Callable  # (state, pairs) -> state, metrics; the old state is donated


def reward(setup: str, story: str) -> float:
    """Return 1 for a story that is three times as long as the setup, less for others: what is preferred."""
    return 1 - min(abs(len(story) / max(len(setup), 1) - 3) / 3, 1)


def prepare(agent: Agent, learning_rate: float, seed: int) -> Run:
    """Resolve all settings, once."""
    model, stop = agent.config, jnp.array(agent.stop)
    sampling = Sampling(max_new_tokens=T, temperature=1.0, compute_dtype="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))

    def sample_team(params: Params, prompts: Any, lengths: Any, step: int, purpose: int) -> Completions:
        numbers = jnp.arange(prompts.shape[1])  # of the prompts; the random key of a row follows from numbers alone
        keys = row_keys(RowIds(seed, step, purpose, stack=0, agents=jnp.arange(A), prompt_ids=numbers), G)  # [A, P, G]
        return sample(params, model, sampling, SampleInputs(prompts, lengths, keys, stop))

    def logprobs(params: Params, pairs: Pairs) -> jax.Array:  # of one agent: log pi(completion | prompt), [M, 2]
        tokens = score(params, model, pairs.prompts, pairs.lengths, pairs.tokens).logprobs  # [M, 2, T]
        return masked.total(tokens, pairs.mask, -1)

    def loss(params: Params, pairs: Pairs) -> tuple[jax.Array, dict[str, jax.Array]]:  # mean of -log sigma(beta sum_a m_a)
        ratios = jax.vmap(logprobs)(params, pairs) - pairs.reference  # log pi - log pi_ref, [A, M, 2]
        margins = (ratios[..., 0] - ratios[..., 1]).sum(0)  # of the team: the sum over its agents, [M]
        return preference(margins, jnp.full(len(margins), 1 / len(margins)), beta=BETA)

    def update(state: State, pairs: Pairs) -> tuple[State, dict[str, jax.Array]]:
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, pairs)  # for each agent with the others as they are
        changes, opt_state = jax.vmap(optimizer.update)(gradient, state.opt_state, state.params)  # each clips its own norm
        return State(optax.apply_updates(state.params, changes), opt_state), metrics

    def init(params: Params) -> State:
        return State(params, jax.vmap(optimizer.init)(params))

    programs = jax.jit(sample_team), jax.jit(jax.vmap(logprobs)), jax.jit(loss), jax.jit(update, donate_argnums=0)
    return Run(agent, init, *programs)


def prompt(topic: str) -> str:
    """Return what both agents read."""
    return f"Tell a story about {topic}."


def play(run: Run, params: Params, topics: Sequence[str], step: int, purpose: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the joint actions [P, G, A] that a team writes, g-th setups with g-th stories, and their rewards [P, G]."""
    ids, lengths = pad(encode_prompts(run.agent.tokenizer, [prompt(x) for x in topics], run.agent.config.max_positions, T))
    completions = run.sample(params, np.stack([ids] * A), np.stack([lengths] * A), step, purpose)
    rows = zip(*(x.reshape(-1, T) for x in jax.device_get((completions.tokens, completions.action_mask))), strict=True)
    texts = decode(run.agent.tokenizer, [tokens[mask] for tokens, mask in rows])  # mask: up to the end token
    joint = np.array(texts, object).reshape(A, len(topics), G).transpose(1, 2, 0)
    return joint, np.array([[reward(*action) for action in actions] for actions in joint], np.float32)


def make_pairs(run: Run, params: Params, topics: Sequence[str], step: int) -> list[dict]:
    """Return a data set: rows with prompt, chosen and rejected, a text of each agent. Replace it by one of your own."""
    joint, rewards = play(run, params, topics, step, PAIRS)
    data = []
    for topic, actions, order in zip(topics, joint, rewards.argsort(1, kind="stable"), strict=True):
        for low, high in zip(order[: G // 4], order[::-1], strict=False):  # the worst with the best, and so on
            data.append({"prompt": prompt(topic), "chosen": [*actions[high]], "rejected": [*actions[low]]})
    return data


def encode(run: Run, params: Params, data: Sequence[dict]) -> Pairs:
    """Return a data set as tokens, with the log-probabilities under params, the reference."""
    tokenizer, end = run.agent.tokenizer, run.agent.stop[0]
    ids, lengths = pad(encode_prompts(tokenizer, [row["prompt"] for row in data], run.agent.config.max_positions, T))
    texts = [row[name][a] for a in range(A) for row in data for name in ("chosen", "rejected")]
    tokens, counts = pad([encode_completion(tokenizer, text, end) for text in texts], T + 1)
    tokens, mask = (x.reshape(A, len(data), 2, -1) for x in (tokens, np.arange(tokens.shape[1]) < counts[:, None]))
    pairs = Pairs(np.stack([ids] * A), np.stack([lengths] * A), tokens, mask, np.zeros((A, len(data), 2), np.float32))
    parts = [pairs.take(slice(i, i + P)) for i in range(0, len(data), P)]
    return pairs._replace(reference=np.concatenate([run.logprobs(params, part) for part in parts], 1))


def train(run: Run, params: Params, pairs: Pairs, updates: int, seed: int) -> Iterator[tuple[State, dict[str, jax.Array]]]:
    """Yield the state and the metrics after each update. The next update consumes the state."""
    state, count = run.init(params), pairs.lengths.shape[1]
    for step in range(updates):
        epoch, part = divmod(step, max(count // P, 1))  # every epoch has an order of its own
        numbers = np.random.default_rng((seed, epoch)).permutation(count)[part * P : (part + 1) * P]
        state, metrics = run.update(state, pairs.take(numbers))
        yield state, metrics


def main() -> None:
    flags = make_flags(__doc__, updates=300, rate=1e-3)
    flags.add_argument("--draws", type=int, default=32, help="how often the starting team writes on each topic")
    args = flags.parse_args()
    agents = make_agents(args.model, WORDS, A, args.seed)
    run, params = prepare(agents[0], args.rate, args.seed), stack_params([agent.params for agent in agents])
    _, before = play(run, params, HELD_OUT, 0, EVAL)
    show(0, "held-out reward", before.mean())
    data = [row for step in range(args.draws) for row in make_pairs(run, params, TOPICS, step)]
    others = make_pairs(run, params, HELD_OUT, 0)
    pairs, held_out = encode(run, params, data), encode(run, params, others)
    print(f"{len(data)} pairs to learn from, {len(others)} held out", flush=True)
    loss, _ = run.loss(params, held_out)
    for number, (state, metrics) in enumerate(train(run, params, pairs, args.updates, args.seed), 1):
        params = state.params
        show(number, "accuracy", float(metrics["accuracy"].mean()))
    _, after = play(run, params, HELD_OUT, 0, EVAL)
    new_loss, metrics = run.loss(params, held_out)
    print(f"held-out loss before {loss:.3f}, after {new_loss:.3f}; accuracy {metrics['accuracy'].mean():.2f}")
    print(f"held-out reward before {before.mean():.2f}, after {after.mean():.2f}")


if __name__ == "__main__":
    main()
