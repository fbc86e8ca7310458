"""MAGRPO over several turns on one page: an environment with a tool, which answers what the agents write.

Against `magrpo.py`: the environment is a class (the same that `jmarl.train` takes), an episode has turns, and what an agent
reads in a turn is its conversation so far. An episode is one completion of each agent per turn. A completion is compared with
those that its agent wrote in the same turn of the other episodes on the task, by the rewards from its turn on.

Claim: two agents of random weights learn to open the right box with a tool, and to say what is in it. The first updates are
    those of `jmarl.train` (tests/test_pages.py).
Command: python -m experiments.pages.turns    (--help; --model takes a real one)
Expected: held-out return 0.12, 0.12, 0.13 before and 0.98, 0.98, 1.00 after 200 updates (seeds 0, 1, 2), each in a minute on 2
    cores. Without the reward of the first turn the team learns to guess one animal: 0.3.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.pages.common import make_agents, make_flags, pad, show
from jmarl.envs.base import Step, TextEnvironment
from jmarl.models.hub.agents import Agent
from jmarl.models.hub.tokenize import decode, encode_prompts, follow_ups
from jmarl.models.stack import stack_params
from jmarl.randomness import EVAL, TRAIN, tasks_of
from jmarl.rl.advantages import estimate, group_mean
from jmarl.rl.losses import policy_gradient, token_weights
from jmarl.sampling.sampler import RowIds, SampleInputs, Sampling, row_keys, sample
from jmarl.sampling.scoring import score
from jmarl.types import Completions

# Axes: A agents, E episodes of a step (P tasks, G episodes of each), S tokens of a conversation, T tokens of a completion.
A, P, G, T, TURNS = 2, 8, 8, 2, 2
BOXES, ANIMALS = ("red", "blue", "green"), ("owl", "cat", "dog")
WORDS = (*BOXES, *ANIMALS, "open", "inside", "nothing")
Params = Any  # a pytree of arrays [A, ...]


class Boxes(TextEnvironment):
    """Each agent is asked what is in a box of its own. Its first message calls the tool, its second one answers."""

    roles, reward_range, max_turns = ("first", "second"), (0.0, 1.0), TURNS

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return tasks: a box and what is in it, for each agent."""
        all_tasks = [{"boxes": [a, b], "animals": [x, y]} for a in BOXES for b in BOXES for x in ANIMALS for y in ANIMALS]
        order = np.random.default_rng(seed).permutation(len(all_tasks))
        return [all_tasks[i] for i in (order[:P] if split == "eval" else order[P:])][:count]

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Any, list[str]]:
        """Return the state and what each agent reads first."""
        return task | {"turn": 0}, [f"What is in the {box} box? Name a box to look." for box in task["boxes"]]

    def step(self, state: Any, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Return the answers of the tool, and half a reward for the share of agents that open their box; in the last turn half
        a reward for the share that name their animal."""
        wanted = state["boxes"] if state["turn"] == 0 else state["animals"]
        right = [text.split()[:1] == [name] for text, name in zip(messages, wanted, strict=True)]
        inside = [animal if opened else "nothing" for animal, opened in zip(state["animals"], right, strict=True)]
        observations = [f"\nInside: {name}.\nAnswer:" for name in inside]
        return Step(state | {"turn": state["turn"] + 1}, observations, float(np.mean(right)) / 2, state["turn"] == TURNS - 1)


class Batch(NamedTuple):
    """The completions of one turn or of all; a row is one completion."""

    ids: Any  # [A, R, S] conversations before the completions, padded on the right
    lengths: Any  # [A, R]
    completions: Completions  # tokens, action_mask, logprobs, ... [A, R, 1, T]
    returns: Any  # [A, R]: the rewards from this turn on
    groups: Any  # [A, R]: rows with equal numbers are compared with each other


class State(NamedTuple):
    params: Params
    opt_state: Any  # pytree [A, ...]


class Run(NamedTuple):
    """Everything of a run that does not change."""

    agent: Agent  # model and tokenizer of all agents
    env: TextEnvironment
    seed: int
    init: Callable  # params -> state
    sample: Callable  # (params, ids, lengths, step, purpose, turn) -> completions: one program for all agents and turns
    update: Callable  # (state, batch) -> state: one program for all agents; the old state is donated


def prepare(agent: Agent, env: TextEnvironment, learning_rate: float, seed: int) -> Run:
    """Resolve all settings, once."""
    model, stop = agent.config, jnp.array(agent.stop)
    sampling = Sampling(max_new_tokens=T, temperature=1.0, compute_dtype="float32")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))

    def sample_team(params: Params, ids: Any, lengths: Any, step: int, purpose: int, turn: int) -> Completions:
        tasks, agents, episodes = ids.shape[1] // G, jnp.arange(A), jnp.arange(ids.shape[1])
        first = row_keys(RowIds(seed, step, purpose, 0, agents, jnp.arange(tasks), turn), G).reshape(A, -1, 1)
        later = row_keys(RowIds(seed, step, purpose, 0, agents, episodes, turn), 1)  # [A, E, 1]
        return sample(params, model, sampling, SampleInputs(ids, lengths, jnp.where(turn == 0, first, later), stop))

    def update_agent(state: State, batch: Batch) -> State:  # of one agent: arrays without the axis A
        ids, lengths, (tokens, mask, old_logprobs, *_), returns, groups = batch
        advantages = estimate(group_mean, returns[:, None], groups[:, None])  # A_r = R_r - mean of the group, [R, 1]
        weights = token_weights(mask, "token_mean")  # w_t = 1 / number of tokens, [R, 1, T]

        def loss(params: Params) -> jax.Array:  # -sum_t w_t A_r log pi(a_t | conversation, a_<t)
            logprobs = score(params, model, ids, lengths, tokens).logprobs  # [R, 1, T]
            return policy_gradient(logprobs, old_logprobs, advantages[..., None], weights)[0]

        changes, opt_state = optimizer.update(jax.grad(loss)(state.params), state.opt_state, state.params)
        return State(optax.apply_updates(state.params, changes), opt_state)

    def init(params: Params) -> State:
        return State(params, jax.vmap(optimizer.init)(params))

    return Run(agent, env, seed, init, jax.jit(sample_team), jax.jit(jax.vmap(update_agent), donate_argnums=0))


def written(tokens: np.ndarray, mask: np.ndarray) -> list[list[int]]:
    """Return the token ids of one agent's completions [E, 1, T], the end token included."""
    return [row[chosen].tolist() for row, chosen in zip(tokens[:, 0], mask[:, 0], strict=True)]


def play(run: Run, params: Params, tasks: Sequence[dict], step: int, purpose: int) -> tuple[Batch, np.ndarray]:
    """Play G episodes of each task side by side. Return the completions of all turns, and the returns of the episodes [E]."""
    tokenizer, room, rng = run.agent.tokenizer, run.agent.config.max_positions, np.random.default_rng((run.seed, step, purpose))
    states, read = zip(*(run.env.reset(task, rng) for task in tasks for _ in range(G)), strict=True)
    rows = [encode_prompts(tokenizer, own, room, T) for own in zip(*read, strict=True)]  # [A][E] conversations so far
    width = 4 * max(map(len, sum(rows, []))) + 2 * T  # more than any conversation gets: one width, one program
    turns, rewards = [], []
    for turn in range(TURNS):
        ids, lengths = (np.stack(x) for x in zip(*(pad(own, width) for own in rows), strict=True))  # [A, E, S], [A, E]
        completions = jax.device_get(run.sample(params, ids, lengths, step, purpose, turn))
        chosen = [written(*x) for x in zip(completions.tokens, completions.action_mask, strict=True)]  # [A][E] token ids
        messages = zip(*(decode(tokenizer, own) for own in chosen), strict=True)
        answers = [run.env.step(state, joint, rng) for state, joint in zip(states, messages, strict=True)]
        assert all(x.done == (turn + 1 == TURNS) for x in answers), "here every episode has TURNS turns"
        turns.append((ids, lengths, completions))
        rewards.append([answer.reward for answer in answers])
        if turn + 1 < TURNS:
            states, read = [x.state for x in answers], zip(*(x.observations for x in answers), strict=True)
            history = [[a + b for a, b in zip(*own, strict=True)] for own in zip(rows, chosen, strict=True)]
            rows = [follow_ups(tokenizer, old, new, room, T) for old, new in zip(history, read, strict=True)]
    to_go = np.cumsum(rewards[::-1], 0)[::-1].astype(np.float32)  # [TURNS, E]
    ids, lengths, completions = jax.tree.map(lambda *x: np.concatenate(x, 1) if x[0].ndim > 1 else x[0], *turns)
    groups = np.arange(TURNS * len(tasks)).repeat(G)  # of a turn and a task
    return Batch(ids, lengths, completions, np.stack([to_go.reshape(-1)] * A), np.stack([groups] * A)), to_go[0]


def train(run: Run, params: Params, updates: int) -> Iterator[tuple[State, np.ndarray]]:
    """Yield the state and the returns of the episodes after each update. The next update consumes the state."""
    state, tasks = run.init(params), run.env.tasks()
    for step in range(updates):
        batch, returns = play(run, state.params, [tasks[i] for i in tasks_of(step, len(tasks), P, run.seed)], step, TRAIN)
        state = run.update(state, batch)
        yield state, returns


def main() -> None:
    args = make_flags(__doc__, updates=200, rate=1e-3).parse_args()
    agents = make_agents(args.model, WORDS, A, args.seed)
    run, params = prepare(agents[0], Boxes(), args.rate, args.seed), stack_params([agent.params for agent in agents])
    held_out = run.env.tasks("eval")
    _, before = play(run, params, held_out, 0, EVAL)
    show(0, "held-out return", before.mean())
    for number, (state, returns) in enumerate(train(run, params, args.updates), 1):
        params = state.params
        show(number, "return", returns.mean())
    _, after = play(run, params, held_out, 0, EVAL)
    print(f"held-out return before {before.mean():.2f}, after {after.mean():.2f}")


if __name__ == "__main__":
    main()
