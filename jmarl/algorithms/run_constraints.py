"""Constraints between settings and the team, the seeds or the data of a run: rows as in `constraints`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jmarl.algorithms.constraints import PER_AGENT
from jmarl.config import Episodes, Sampling, TrainConfig, flat
from jmarl.config.constraints import Constraint, off_unless

DEFAULTS = flat(TrainConfig())
USED_BY_DATA = {
    "chat",
    "chat_template_kwargs",
    "chat_date",
    "long_prompts",
    "compute_dtype",
}  # of the settings of episodes and sampling
UNUSED_BY_DATA = {field.name for cls in (Episodes, Sampling) for field in dataclasses.fields(cls)} - USED_BY_DATA
IN_ITS_PLACE = {"num_prompts": "set batch_size, the number of pairs or texts of an update, and "}


def alike(value: Any, agents: Iterable[int]) -> bool:
    """Return whether some agents have the same value of a setting that is one for all agents or a tuple with one per agent."""
    return not isinstance(value, tuple) or len({value[agent] for agent in agents}) == 1


# fmt: off
ITEMS: Constraint = ("items", lambda s: s.items, "there are no items to train on: items is empty")

HELD_OUT: Constraint = (
    "keep_best", lambda s: not s.keep_best or s.held_out,
    "keep_best={s.keep_best!r} needs held-out tasks that the best is chosen by: give eval_items (eval_data of fit), or set "
    "held_out",
)

FILES: Constraint = (
    "wandb", lambda s: s.wandb is None or s.output_dir,
    "wandb_config was given without output_dir: W&B keeps its files there, so set output_dir",
)

# --- a team of num_agents, of which those in `learning` are not frozen, each in `updates` updates

AGENTS: list[Constraint] = [
    *[(name, lambda s, x=name: not isinstance(getattr(s, x), tuple) or len(getattr(s, x)) == s.num_agents,
       lambda s, x=name: f"{x}={getattr(s, x)} has {len(getattr(s, x))} values for {s.num_agents} agents: give one for all, or "
                         "one per agent")
      for name in (*PER_AGENT, "optimizer", "chat")],
    ("frozen_agents", lambda s: max(s.frozen_agents, default=-1) < s.num_agents,
     lambda s: f"frozen_agents={s.frozen_agents} is not allowed: the agents of this team are 0 to {s.num_agents - 1}"),
    ("frozen_agents", lambda s: s.learning,
     "frozen_agents={s.frozen_agents} leaves none of {s.num_agents} agents to learn: use jmarl.evaluate to only play"),
    ("update_order", lambda s: s.update_order != "alternating" or len(s.learning) > 1,
     "update_order='alternating' needs two agents that learn in turn, and only agent {s.learning[0]} learns: use simultaneous"),
    ("warmup_updates", lambda s: s.update_order != "alternating" or s.lr_schedule == "constant" or s.updates > s.warmup_updates,
     lambda s: f"warmup_updates={s.warmup_updates} is not allowed: in alternating order each of {len(s.learning)} agents "
               f"learns in only {s.updates} of num_updates={s.num_updates} updates, which is the length of its schedule"),
]

# team: its stacks and other models. divides_agents: whether the mesh divides the rows or weights of an agent; divides_rows: its
# rows; processes: of the run
TEAM: list[Constraint] = [
    ("reward_model", lambda s: s.team.reward_model is None or s.row.learned,
     "the team has a reward model, but algorithm={s.algorithm!r} has none: it is for marlhf and marlhf_iter"),
    ("critic", lambda s: s.team.critic is None or s.row.data == "rollouts" or s.row.learned,
     "the team has a critic, but algorithm={s.algorithm!r} has none: it is for iac, maac, ippo, mappo"),
    ("async_steps", lambda s: not s.async_steps or not s.divides_agents,
     "async_steps=1 does not go with mesh={s.mesh!r}, which divides an agent: which rows begin early would follow from the "
     "slots of each device, and the tokens with them; spread whole agents (mesh=auto)"),
    ("async_steps", lambda s: not s.async_steps or s.processes == 1,
     "async_steps=1 needs one process, and this run has {s.processes}: set async_steps=0"),
    ("micro_batches", lambda s: not s.lora_dropout or not s.divides_rows or s.micro_batches in (1, "auto"),
     "micro_batches={s.micro_batches} with lora_dropout does not go with mesh={s.mesh!r}: the noise of each micro-batch is its "
     "own, and would be another than on one device; set micro_batches=1"),
    ("algorithm", lambda s: s.num_agents == 1 or not s.row.for_teams,
     lambda s: f"algorithm={s.algorithm!r} is for a team of one, this one has {s.num_agents} agents: choose "
               f"{' or '.join(s.row.for_teams)}"),
    off_unless("router_aux_coef", 0, lambda s: any(spec.config.num_experts for spec in s.team.stacks), "without experts"),
    *AGENTS,
]

# roles: agents that share one set of weights
SHARED: list[Constraint] = [
    ("update_order",
     lambda s: len(s.roles) == 1 or (s.update_order != "alternating" and len({x in s.frozen_agents for x in s.roles}) == 1),
     "agents {s.roles} share one set of weights, so they can neither learn in turn (update_order={s.update_order!r}) nor be "
     "frozen apart (frozen_agents={s.frozen_agents}): set update_order='simultaneous' and freeze all of them or none, or give "
     "each its own weights"),
    *[(name, lambda s, x=name: alike(getattr(s, x), s.roles),
       f"{name}={{s.{name}}}: agents {{s.roles}} share one set of weights, which has one {name}: give one value")
      for name in PER_AGENT],
]

# order: agents of one stack
STACK: list[Constraint] = [
    ("optimizer", lambda s: alike(s.optimizer, s.order),
     "optimizer={s.optimizer}: agents {s.order} have one architecture, so they are one stack and one program with one "
     "optimizer; only agents of different architectures may have different ones"),
]

# formatters: their number; transition: what writes the prompts of later turns, or None
REWARD_ENVIRONMENT: list[Constraint] = [
    ("formatters", lambda s: s.formatters == s.num_agents,
     "{s.formatters} formatters for {s.num_agents} agents: give one function for all of them, or a list with one per agent"),
    ("num_turns", lambda s: s.num_turns == 1 or s.transition is not None,
     "num_turns={s.num_turns} needs external_transition, which writes the prompts of the next turn; in Python it is "
     "RewardEnvironment(reward, formatters, transition)"),
    ("external_transition", lambda s: s.num_turns > 1 or s.transition is None,
     "external_transition writes the prompts of later turns, and num_turns=1 has none: set num_turns"),
]

# --- several seeds in one program. seeds: a list; single_run: whether output_dir holds the checkpoints of a single run

SEEDS: list[Constraint] = [
    ("seeds", lambda s: s.seeds and len({*s.seeds}) == len(s.seeds),
     "seeds={s.seeds} is not allowed: give at least one, and each once"),
    ("algorithm", lambda s: s.row.data == "rollouts",
     "algorithm={s.algorithm!r} learns from pairs in rounds, and only algorithms on rollouts (magrpo, ippo, c3, ...) train "
     "several seeds together: call train once per seed"),
    ("async_steps", lambda s: not s.async_steps,
     "async_steps=1 is for one seed in a program: call train once per seed, or set async_steps=0"),
    ("save_total_limit", lambda s: not s.saves or s.save_total_limit >= 2,
     "save_total_limit={s.save_total_limit} is not allowed with several seeds: keep at least 2, because a kill may come when "
     "only some runs have the newest checkpoint"),
    ("replay_rollout", lambda s: not s.replay_rollout,
     "replay_rollout repeats the update of one run: leave seeds out, and set output_dir to its seed_N"),
    ("output_dir", lambda s: not s.single_run,
     "the output directory {s.output_dir} holds the checkpoints of a single run, but those of several seeds are in its folders "
     "seed_0, ...: choose another directory"),
]

# --- an experiment. plays: whether it learns from completions, or from given data

EXPERIMENT: list[Constraint] = [
    *[(name, lambda s, x=name: not s.seeds or not getattr(s, x),
       f"{name}={{s.{name}!r}} is not for several seeds in one program: remove it, or train them one by one")
      for name in ("wandb", "eval_metrics")],
    ("seeds", lambda s: s.plays or not s.seeds,
     "seeds={s.seeds} is for completions with a reward: run given data once per seed of train"),
    ("eval_metrics", lambda s: s.plays or s.eval_metrics is None,
     "eval_metrics={s.eval_metrics!r} is for completions with a reward: remove it"),
]

# --- given data

GIVEN_DATA: list[Constraint] = [
    ("algorithm", lambda s: s.row.data != "rollouts" and not s.row.rounds and not s.row.learned,
     "algorithm={s.algorithm!r} learns from completions that the team samples: use jmarl.train"),
    FILES,
    ("keep_best", lambda s: s.keep_best is not True and s.keep_best != "eval/reward",
     "keep_best={s.keep_best!r} is the held-out reward, and given data have none: set keep_best='eval/loss min'"),
    *[(name, lambda s, x=name: getattr(s, x) == DEFAULTS[x],
       f"{name}={{s.{name}!r}} has no effect for algorithm={{s.algorithm!r}}, which trains on given "
       f"data; {IN_ITS_PLACE.get(name, '')}leave it at {DEFAULTS[name]!r}")
      for name in sorted(UNUSED_BY_DATA | {"eval_generations", "eval_temperature"})],
]
