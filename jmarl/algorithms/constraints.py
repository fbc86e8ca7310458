"""Constraints between settings and the algorithm, the team, the seeds or the data of a run: rows as in `config.constraints`.

The conditions read the record that `facts` makes: all settings by their short names, the row of the algorithm, and what the
caller adds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from jmarl.algorithms.table import ALGORITHMS, DEFAULTS, REWARD_MODEL, ROUNDS, AlgorithmRow, find_row
from jmarl.config import Episodes, Preference, Sampling, TrainConfig, flat, per_agent_values
from jmarl.config.constraints import Constraint, off_unless

PER_AGENT = ("learning_rate", "max_grad_norm", "weight_decay")  # settings with one number for all agents, or one per agent

OFF = flat(TrainConfig())  # values of settings that are not given
ONLY_ROLLOUTS = (  # settings of rows that learn from rollouts
    *("advantage_scale", "loss_aggregation", "importance_cap", "old_logprobs", "kl_coef", "entropy_coef", "num_epochs"),
    *("num_minibatches", "dynamic_sampling", "async_steps", "snapshots", "strangers", "talk_every"),
)
USED_BY_DATA = {"chat", "chat_template_kwargs", "chat_date", "long_prompts", "compute_dtype"}  # of episodes and sampling
UNUSED_BY_DATA = {field.name for cls in (Episodes, Sampling) for field in dataclasses.fields(cls)} - USED_BY_DATA
IN_ITS_PLACE = {"num_prompts": "set batch_size, the number of pairs or texts of an update, and "}

USES: dict[tuple[str, ...], Callable[[AlgorithmRow], Any]] = {  # settings among `DEFAULTS` -> whether a row uses them
    ("mask_overlong",): lambda row: row.data == "rollouts",
    ("ema_decay",): lambda row: row.baseline == "ema",
    ("align_coef",): lambda row: row.across_turns,
    ("gae_lambda", "critic_learning_rate", "value_clip"): lambda row: row.critic,
    ("separate_critic", "value_coef"): lambda row: row.critic == "own",
    ("critic_type",): lambda row: row.critic and not row.per_token,
    ("batch_size",): lambda row: row.data != "rollouts",
    ("bc_weight", "world_model_weight"): lambda row: row.data == "texts",
    ("reference_free",): lambda row: row.margin in ("own", "joint"),
    ("num_candidates", "pair_selection", "pairs_per_prompt"): lambda row: row.makes_pairs,
    REWARD_MODEL: lambda row: row.learned,
    ROUNDS: lambda row: row.rounds,
}


def facts(cfg: TrainConfig, **more: Any) -> SimpleNamespace:
    """Return what constraints read: the settings, the row of the algorithm, the completions of a prompt (group) with the
    setting that says how many (group_name), and more."""
    settings, row = flat(cfg), find_row(cfg.algorithm)
    name = "num_candidates" if row.makes_pairs and settings["num_candidates"] else "num_generations"
    return SimpleNamespace(**(settings | {"row": row, "group": settings[name], "group_name": name} | more))


def used_settings(row: AlgorithmRow) -> set[str]:
    """Return the settings among `DEFAULTS` that a row uses."""
    return {*row.options.values(), *(name for names, uses in USES.items() if uses(row) for name in names)}


def users(setting: str) -> str:
    """Return the names of the algorithms that use a setting."""
    return ", ".join(name for name, row in ALGORITHMS.items() if setting in used_settings(row))


A_LEAGUE = "a league (snapshots={s.snapshots}, strangers={s.strangers})"  # in texts


def in_league(s: Any) -> bool:
    """Return whether the team has opponents."""
    return bool(s.snapshots or s.strangers)


def smallest_group(s: Any) -> int:
    """Return the fewest completions of a prompt that the baseline needs."""
    return 2 if s.row.critic and s.critic_type == "q" else s.row.min_group


def has_value_baseline(s: Any) -> bool:
    """Return whether the baseline is a value of a critic or the greedy completion's return."""
    return bool(s.row.critic) or s.row.baseline == "greedy"


def alike(value: Any, agents: Iterable[int]) -> bool:
    """Return whether some agents have the same value of a setting that is one for all agents or a tuple with one per agent."""
    return not isinstance(value, tuple) or len({value[agent] for agent in agents}) == 1


ELSEWHERE = {"beta": ". The beta of TRL's GRPO is kl_coef"}  # settings that mean another one elsewhere

# fmt: off
# --- settings that a row does not use, alone or together with others

USED: list[Constraint] = [
    (name, lambda s, x=name: getattr(s, x) is None or x in used_settings(s.row),
     lambda s, x=name: f"{x}={getattr(s, x)!r} has no effect for algorithm={s.algorithm!r}; it is for {users(x)}"
                        f"{ELSEWHERE.get(x, '')}")
    for name in DEFAULTS
]

# Of a row that trains a reward model: its other settings are for the row that trains the team.
USED_BY_REWARD_MODELS = [row for row in USED if row[0] in {field.name for field in dataclasses.fields(Preference)}]

ROW: list[Constraint] = [
    *USED,
    *[(name, lambda s, x=name: s.row.data == "rollouts" or getattr(s, x) == OFF[x],
       f"{name}={{s.{name}!r}} has no effect for algorithm={{s.algorithm!r}}, which learns from {{s.row.data}}: leave it at "
       f"{OFF[name]!r}")
      for name in ONLY_ROLLOUTS],
    ("advantage_scale", lambda s: not s.row.per_token or s.advantage_scale != "std",
     "advantage_scale='std' has no effect on advantages of tokens: use batch_std, running_std or none"),
    ("align_coef", lambda s: s.align_coef is None or s.num_turns > 1,
     "align_coef={s.align_coef} has no effect with num_turns=1: it is of earlier turns"),
    ("advantage_scale", lambda s: not s.row.across_turns or s.advantage_scale in (None, "none"),
     "advantage_scale={s.advantage_scale!r} does not go with algorithm={s.algorithm!r}, which adds products of advantages to "
     "them: leave it at none, and scale the reward and align_coef"),
    ("value_clip", lambda s: not s.value_clip or (s.num_epochs * s.num_minibatches > 1 and s.row.critic != "central"),
     "value_clip={s.value_clip} never clips if a critic makes one step on a batch: own critics make several with num_epochs or "
     "num_minibatches, a central one never does"),
    ("critic_learning_rate", lambda s: s.critic_learning_rate is None or s.separate_critic is not False,
     "critic_learning_rate is for separate critics; a value head learns with its agent, weighted by value_coef"),
    ("importance_level", lambda s: s.importance_level == "token" or s.importance_cap is not None or s.async_steps,
     "importance_level={s.importance_level!r} needs importance_cap, which is off"),
    ("value_coef", lambda s: s.value_coef is None or s.separate_critic is False,
     "value_coef={s.value_coef} weights a value head on the agent: set separate_critic to false"),
]

# --- a run that samples

SAMPLES: Constraint = (
    "algorithm", lambda s: s.row.data == "rollouts" or s.row.makes_pairs,
    "algorithm={s.algorithm!r} learns from given data: use jmarl.fit",
)

# Of a run that learns from pairs or texts, by the settings of its algorithm. Where a reward model learns, the team learns from
# rollouts, and the model uses at most one part per pair.
MICRO_BATCHES: Constraint = (
    "micro_batches", lambda s: s.row.learned or s.micro_batches == "auto" or s.micro_batches <= (s.batch_size or 1),
    lambda s: f"micro_batches={s.micro_batches} is more than batch_size={s.batch_size or 1}: use fewer",
)

MAKES_PAIRS: list[Constraint] = [
    ("num_turns", lambda s: s.num_turns == 1 and s.joint_mode == "aligned",
     "algorithm={s.algorithm!r} needs num_turns=1 and joint_mode='aligned'; got num_turns={s.num_turns} and "
     "joint_mode={s.joint_mode!r}"),
    MICRO_BATCHES,
    ("temperature", lambda s: s.temperature != 0 or s.comparator != "current",
     "temperature=0 makes all completions of a prompt alike: preferences need temperature > 0"),
    ("pair_selection", lambda s: s.row.rounds or s.pair_selection != "comparator_reward",
     "pair_selection='comparator_reward' needs a comparator: it is for madpo_iter and marlhf_iter"),
]

# A reward model learns, and the team from its scores.
LEARNS_REWARD: list[Constraint] = [
    ("async_steps", lambda s: not s.async_steps,
     "async_steps=1 does not go with algorithm={s.algorithm!r}, whose reward changes: set it to 0"),
    ("rl_algorithm", lambda s: find_row(s.rl_algorithm).data == "rollouts",
     "rl_algorithm={s.rl_algorithm!r} does not learn from rollouts: choose magrpo, grpo, maac, ..."),
    ("num_generations", lambda s: s.group >= s.row.min_group,
     "{s.group_name}={s.group} is too small for algorithm={s.algorithm!r}: pairs need 2; set it higher"),
]

LEARNS: list[Constraint] = [
    ("num_turns", lambda s: not s.talk_every or s.num_turns > 1,
     "num_turns={s.num_turns} does not go with talk_every={s.talk_every}: nobody reads what another wrote; set talk_every=0"),
    ("num_generations", lambda s: s.group >= smallest_group(s),
     lambda s: f"{s.group_name}={s.group} is too small for algorithm={s.algorithm!r}: its baseline needs at least "
               f"{smallest_group(s)} completions of a prompt; set {s.group_name} higher"),
    ("cross_credit", lambda s: s.cross_credit != "sum" or not has_value_baseline(s),
     "cross_credit='sum' does not fit algorithm={s.algorithm!r}: its baseline is of a mean; use cross_credit='mean'"),
    ("joint_mode", lambda s: s.joint_mode != "counterfactual" or not s.dynamic_sampling,
     "joint_mode='counterfactual' does not go with dynamic_sampling={s.dynamic_sampling}: its groups are alternatives to "
     "single completions"),
    ("joint_mode", lambda s: s.joint_mode != "counterfactual" or not has_value_baseline(s),
     "joint_mode='counterfactual' does not go with algorithm={s.algorithm!r}: its groups are alternatives to single "
     "completions"),
    *[(name, lambda s, x=name, y=value: not s.row.across_turns or s.num_turns == 1 or getattr(s, x) == y,
       f"{name}={{s.{name}!r}} does not go with algorithm={{s.algorithm!r}} over several turns, which follows each episode "
       f"from its first turn to its last: set {name}={value}")
      for name, value in (("branching", "chain"), ("joint_mode", "aligned"))],
    ("dynamic_sampling", lambda s: not s.dynamic_sampling or s.row.compares_group,
     lambda s: f"dynamic_sampling={s.dynamic_sampling} has no effect for algorithm={s.algorithm!r}, whose advantages do not "
               "compare the returns of a group; it is for "
               + ", ".join(name for name, row in ALGORITHMS.items() if row.compares_group)),
]

NOT_IN_LEAGUES = {  # setting -> the value that it has, and why
    "joint_mode": ("aligned", "whose opponents write one text for all completions of a group"),
    "history": ("none", "in which agents do not act where another holds their seat"),
    "async_steps": (0, "whose opponents are drawn anew in each step"),
    "sample_parts": (1, "whose items are sampled at once"),
    "dynamic_sampling": (0, "whose opponents are drawn for the first prompts of a step"),
    "talk_swap": (False, "whose episodes are not played again"),
}

LEAGUE: list[Constraint] = [
    *[(name, lambda s, x=name: not in_league(s) or getattr(s, x) == NOT_IN_LEAGUES[x][0],
       f"{name}={{s.{name}!r}} does not go with {A_LEAGUE}, {why}: set {name}={value}")
      for name, (value, why) in NOT_IN_LEAGUES.items()],
    ("opponents_at_once",
     lambda s: s.opponents_at_once <= (1 if s.opponents == "latest" else max(1, s.snapshots + len(s.strangers))),
     "opponents_at_once={s.opponents_at_once} is more than there are with opponents={s.opponents!r}, snapshots={s.snapshots}, "
     "strangers={s.strangers}"),
    ("branching", lambda s: not in_league(s) or s.num_turns == 1 or s.branching == "chain",
     f"branching={{s.branching!r}} does not go with {A_LEAGUE} over several turns: set branching='chain'"),
    ("algorithm", lambda s: not in_league(s) or s.row.data == "rollouts" and s.row.baseline != "greedy",
     f"algorithm={{s.algorithm!r}} does not go with {A_LEAGUE}: choose one that learns from rollouts and "
     "has no greedy baseline, such as magrpo or grpo"),
]

CENTRAL: list[Constraint] = [  # what a central critic has one of
    (name, lambda s, x=name, y=own: (
        s.row.critic != "central" or len({*per_agent_values(getattr(s, x))}) <= 1 or (y and getattr(s, y) is not None)),
     f"{name}={{s.{name}}} leaves open which the central critic of {{s.algorithm!r}} uses: "
     + (f"set {own}" if own else f"give one {name} for all"))
    for name, own in (dict.fromkeys((*PER_AGENT, "optimizer"), "") | {"learning_rate": "critic_learning_rate"}).items()
]

# --- what a run needs

ITEMS: Constraint = ("items", lambda s: s.items, "there are no items to train on: items is empty")

HELD_OUT: Constraint = (
    "keep_best", lambda s: not s.keep_best or s.held_out,
    "keep_best={s.keep_best!r} needs held-out tasks that the best is chosen by: give eval_items (eval_data of fit), or set "
    "held_out",
)

RANKED: Constraint = (
    "members", lambda s: not s.members or s.held_out,
    "a population (members={s.members}) needs held-out tasks that rank its members: set held_out (in Python: eval_items)",
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

RANDOM_WEIGHTS: Constraint = (
    "lora_rank", lambda s: not s.lora_rank or not s.team.random_weights,
    "lora_rank={s.lora_rank} does not go with random_weights: the base of the adapters, one for all agents and seeds, would "
    "stay random; set lora_rank=0, which trains all weights",
)

# team: its stacks and other models. divides_agents: whether the mesh divides the rows or weights of an agent; divides_rows: its
# rows; processes: of the run
TEAM: list[Constraint] = [
    RANDOM_WEIGHTS,
    ("reward_model", lambda s: s.team.reward_model is None or s.row.learned,
     "the team has a reward model, but algorithm={s.algorithm!r} has none: it is for marlhf and marlhf_iter"),
    ("critic", lambda s: s.team.critic is None or s.row.data == "rollouts" or s.row.learned,
     "the team has a critic, but algorithm={s.algorithm!r} has none: it is for iac, maac, ippo, mappo"),
    ("async_steps", lambda s: not s.async_steps or not s.divides_agents,
     "async_steps=1 does not go with mesh={s.mesh!r}, which divides an agent: which rows begin early would follow from the "
     "slots of each device, and the tokens with them; spread whole agents (mesh=auto)"),
    ("snapshots", lambda s: not in_league(s) or s.num_agents > 1,
     f"{A_LEAGUE} needs another seat than that of the opponent, and this team has one agent"),
    ("opponent_share", lambda s: not in_league(s) or round(s.opponent_share * s.num_prompts / s.num_agents) > 0,
     "opponent_share={s.opponent_share} of num_prompts={s.num_prompts} is less than one item for each of {s.num_agents} seats: "
     "set one of them higher"),
    ("snapshots", lambda s: not in_league(s) or s.processes == 1,
     f"{A_LEAGUE} needs one process, and this run has {{s.processes}}"),
    ("talk_every", lambda s: not s.talk_every or s.processes == 1,
     "talk_every={s.talk_every} needs one process, and this run has {s.processes}: set talk_every=0"),
    ("async_steps", lambda s: not s.async_steps or s.processes == 1,
     "async_steps=1 needs one process, and this run has {s.processes}: set async_steps=0"),
    ("micro_batches", lambda s: not s.lora_dropout or not s.divides_rows or s.micro_batches in (1, "auto"),
     "micro_batches={s.micro_batches} with lora_dropout does not go with mesh={s.mesh!r}: the noise of each micro-batch is its "
     "own, and would be another than on one device; set micro_batches=1"),
    ("algorithm", lambda s: s.num_agents == 1 or not s.row.for_teams,
     lambda s: f"algorithm={s.algorithm!r} is for a team of one, this one has {s.num_agents} agents: choose "
               f"{' or '.join(s.row.for_teams)}"),
    ("algorithm", lambda s: not s.row.across_turns or s.num_agents == 2,
     "algorithm={s.algorithm!r} is for two agents, which read the advantages of each other, and this team has {s.num_agents}: "
     "choose another, such as magrpo"),
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

# env: in which the team learns; its transition writes the prompts of later turns
REWARD_ENVIRONMENT: list[Constraint] = [
    ("formatters", lambda s: s.env.num_agents == s.num_agents,
     "{s.env.num_agents} formatters for {s.num_agents} agents: give one function for all of them, or a list with one per "
     "agent"),
    ("num_turns", lambda s: s.num_turns == 1 or s.env.transition is not None,
     "num_turns={s.num_turns} needs external_transition, which writes the prompts of the next turn; in Python it is "
     "RewardEnvironment(reward, formatters, transition)"),
    ("external_transition", lambda s: s.num_turns > 1 or s.env.transition is None,
     "external_transition writes the prompts of later turns, and num_turns=1 has none: set num_turns"),
]

TURNS: Constraint = (
    "num_turns", lambda s: s.num_turns >= s.max_turns,
    "num_turns={s.num_turns}, and an episode of this environment has up to {s.max_turns}: set num_turns={s.max_turns}",
)

# --- several seeds in one program. seeds: a list; single_run: whether output_dir holds the checkpoints of a single run

SEEDS: list[Constraint] = [
    ("seeds", lambda s: s.seeds and len({*s.seeds}) == len(s.seeds),
     "seeds={s.seeds} is not allowed: give at least one, and each once"),
    ("algorithm", lambda s: s.row.data == "rollouts",
     "algorithm={s.algorithm!r} learns from pairs in rounds, and only algorithms on rollouts (magrpo, ippo, c3, ...) train "
     "several seeds together: call train once per seed"),
    ("snapshots", lambda s: not in_league(s),
     f"{A_LEAGUE} is for one seed in a program: call train once per seed (together: false in a sweep)"),
    ("talk_every", lambda s: not s.talk_every,
     "talk_every={s.talk_every} is for one seed in a program: set talk_every=0, or call train once per seed"),
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

POPULATION: list[Constraint] = [
    ("members", lambda s: s.members in (0, len(s.seeds)),
     lambda s: f"a population of members={s.members} learns in `jmarl.train_seeds` from as many seeds, and there are "
               f"{len(s.seeds) or 'none'}: call it with seeds=range({s.members}), or run an ExperimentConfig"),
]

# --- an experiment. plays: whether it learns from completions, or from given data

EXPERIMENT: list[Constraint] = [
    RANDOM_WEIGHTS,
    ("reward", lambda s: s.plays or s.row.data != "rollouts",
     "algorithm={s.algorithm!r} learns from completions of the prompts in data, which need a reward: set reward to "
     "module:function"),
    ("min_reward", lambda s: s.min_reward is None or s.row.data == "texts",
     "min_reward={s.min_reward} has no effect for algorithm={s.algorithm!r}: it is for sft"),
    *[(name, lambda s, x=name: not s.seeds or not getattr(s, x),
       f"{name}={{s.{name}!r}} is not for several seeds in one program: remove it, or train them one by one")
      for name in ("wandb", "eval_metrics")],
    ("seeds", lambda s: s.plays or not s.seeds,
     "seeds={s.seeds} is for completions with a reward: run given data once per seed of train"),
    ("members", lambda s: s.plays or not s.members,
     "members={s.members} is for completions with a reward: a population is not trained on given data"),
    ("eval_metrics", lambda s: s.plays or s.eval_metrics is None,
     "eval_metrics={s.eval_metrics!r} is for completions with a reward: remove it"),
    ("data", lambda s: not s.plays or s.row.data == "rollouts" or s.row.makes_pairs,
     "algorithm={s.algorithm!r} learns from given {s.row.data}: set data, and no reward or environment"),
    ("algorithm", lambda s: s.plays or s.row.trains_team,
     "algorithm={s.algorithm!r} trains no team: use jmarl.preferences.reward_model.fit_reward_model"),
    ("models", lambda s: s.plays or s.data is not None or s.team.size == 1,
     "sft in environments trains one model, and the team has {s.team.size}: train each on its own data"),
]

# --- given data

GIVEN_DATA: list[Constraint] = [
    ("algorithm", lambda s: s.row.data != "rollouts" and not s.row.rounds and not s.row.learned,
     "algorithm={s.algorithm!r} learns from completions that the team samples: use jmarl.train"),
    FILES,
    ("keep_best", lambda s: s.keep_best is not True and s.keep_best != "eval/reward",
     "keep_best={s.keep_best!r} is the held-out reward, and given data have none: set keep_best='eval/loss min'"),
    *[(name, lambda s, x=name: getattr(s, x) == OFF[x],
       f"{name}={{s.{name}!r}} has no effect for algorithm={{s.algorithm!r}}, which trains on given "
       f"data; {IN_ITS_PLACE.get(name, '')}leave it at {OFF[name]!r}")
      for name in sorted(UNUSED_BY_DATA | {"eval_generations", "eval_temperature", "log_tokens"})],
]
