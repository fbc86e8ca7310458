"""Configurations: frozen dataclasses, hashable, so that they are static arguments of `jit`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

from jmarl.config.sections import Episodes, Files, Preferences, check, check_types, with_known_names


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How completions are sampled; the fields are those of Hugging Face's generation config."""

    max_new_tokens: int = 128
    """Longest completion, in tokens."""
    min_new_tokens: int = 0
    """Completions do not end before this many tokens. For timing: the end that is forbidden still counts in the probabilities
    that are scored, so negative advantages move mass there, which no sample answers for."""
    temperature: float = 1.0
    """Sampling temperature, at which completions are scored too; 0 is greedy (scored at 1)."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this much probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens seen before; 1 is off."""
    compute_dtype: str = "float32"
    """float32 (on GPUs too; TF32 is jax's JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32), or bfloat16 with float32 master
    weights."""

    def __post_init__(self):
        check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, ">= 1")
        allowed = f"0..max_new_tokens={self.max_new_tokens}"
        check("min_new_tokens", self.min_new_tokens, 0 <= self.min_new_tokens <= self.max_new_tokens, allowed)
        check("temperature", self.temperature, self.temperature >= 0, ">= 0 (0 is greedy)")
        check("top_k", self.top_k, self.top_k >= 0, ">= 0 (0 is off)")
        check("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1] (1 is off)")
        check("min_p", self.min_p, 0 <= self.min_p < 1, "in [0, 1) (0 is off)")
        check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "> 0 (1 is off)")
        check("compute_dtype", self.compute_dtype, self.compute_dtype in DTYPES, f"one of {DTYPES}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


DTYPES = ("float32", "bfloat16")


def each(value: Any) -> tuple:
    """The values of a setting that may be one for all agents or a tuple of one an agent."""
    return value if isinstance(value, tuple) else (value,)


def single(name: str, value: Any) -> Any:
    """The value of such a setting in a stack's own settings, which are plain."""
    if isinstance(value, tuple):
        raise TypeError(f"{name}={value} is of a whole team: make a stack's settings of it with learners.of_stack")
    return value


@dataclasses.dataclass(frozen=True)
class Learning:
    """How an agent learns from a batch. Every agent of a stack has its own optimiser state, clip and schedule."""

    algorithm: str = "magrpo"
    """Row of the algorithm table, `python -m experiments.algorithms`: magrpo, grpo and so on."""
    advantage_scale: str | None = None
    """Divide advantages by the std of returns minus what a critic or greedy completion made expect (advantages of tokens by
    theirs): none, std (of the group), batch_std, running_std (of all returns so far); None: as the algorithm's row says."""
    loss_aggregation: str | None = None
    """How tokens are averaged: token_mean, sequence_mean, sequence_sum, constant; None: as the algorithm's row says."""
    clip_eps_low: float | None = None
    """Lower clip of the ratio in clipped losses (PPO, arXiv 1707.06347); None: as the algorithm's row says, mostly 0.2."""
    clip_eps_high: float | None = None
    """Upper clip of the ratio in clipped losses; None: as the algorithm's row says, mostly 0.2."""
    ratio_level: str | None = None
    """Ratio of clipped losses: token, sequence (GSPO, arXiv 2507.18071) or turn; None: as the algorithm's row says."""
    dual_clip: float | None = None
    """Bound of clipped losses for negative advantages, in units of the advantage (arXiv 1912.09729); 0 is off."""
    mask_overlong: bool | None = None
    """Leave completions out that were cut off at max_new_tokens (DAPO, arXiv 2503.14476); None: as the algorithm's row says."""
    ema_decay: float | None = None
    """Decay of the moving average of each role's returns, the baseline of rae (arXiv 2506.24119); None: 0.95."""
    gae_lambda: float | None = None
    """Lambda of advantages by a critic (GAE, arXiv 1506.02438): over the tokens of a completion in ppo and ippo, over the turns
    of an episode in iac, maac and mappo. 1: return - value; 0: the TD(0) target - value; None: as the algorithm's row says.
    With several turns ppo and ippo take the plain return of a completion, discounted over the turns, as the reward of its last
    token: no value of a later turn is in it."""
    critic_type: str | None = None
    """v: the critic reads the prompt; q: the completion too, and the baseline is its mean over the group, which biases the
    gradient; None: v. Both of arXiv 2601.21972."""
    separate_critic: bool | None = None
    """An own critic is a model beside the actor, or (False) a second head of the actor; None: a model."""
    critic_learning_rate: float | None = None
    """Peak learning rate of separate and central critics; None: that of the agents."""
    value_coef: float | None = None
    """Weight of the value loss where the critic is a head of the actor; None: 0.5."""
    value_clip: float | None = None
    """Values move no further than this from the old ones in a loss (arXiv 2005.12729); 0 is off; None: 0."""
    beta: float | None = None
    """How far the preference loss lets the policy go from the reference: what margins are multiplied by; None: 0.1, of a reward
    model 1 (DPO, arXiv 2305.18290)."""
    preference_loss: str | None = None
    """Of pairs: sigmoid (DPO), hinge (SLiC, arXiv 2305.10425) or ipo (arXiv 2310.12036); None: sigmoid."""
    label_smoothing: float | None = None
    """Share of preferences that are taken to be wrong, in the sigmoid loss (cDPO); None: 0."""
    reference_free: bool | None = None
    """Margins of the policy's log-probabilities alone, without the reference's; None: False."""
    bc_weight: float | None = None
    """Weight of what agents wrote in sft (behaviour cloning); None: 1."""
    world_model_weight: float | None = None
    """Weight of what they were answered in sft (a world model predicts it); None: 0."""
    importance_cap: float | None = None
    """Weigh tokens by the learner's probability over the one sampled with (truncated by top-k and top-p), at most this much:
    truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561); None: off."""
    importance_level: str = "token"
    """What importance_cap weighs: token, or sequence, by the product over its tokens."""
    old_logprobs: str = "sampler"
    """The behaviour policy's log-probabilities in ratios: sampler, or rescored by the learner before it changes."""
    kl_coef: float = 0.0
    """Weight of the KL term to the untrained policy; above 0 a frozen copy of the weights is kept (LoRA has one)."""
    kl_target: float | None = None
    """Make kl_coef follow this KL a token: times 1 + 0.1 clip(KL / target - 1, -0.2, 0.2) an update (arXiv 1909.08593); None:
    it stays."""
    kl_estimator: str | None = None
    """k1, k2 or k3 (see `losses.kl_estimate`); None: k3 in the loss, k1 in the reward."""
    kl_in: str = "loss"
    """Where the KL term goes: loss, or reward, from which each token's estimate is taken (arXiv 2203.02155): in ppo and ippo
    token by token, in advantages and in what critics learn; in other rows the completion's sum, in advantages."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    optimizer: str | tuple[str, ...] = "adamw"
    """adamw (arXiv 1711.05101), lion (arXiv 2302.06675, with its own decays 0.9 and 0.99) or sgd; one for all agents or one an
    agent, the same for agents of one architecture."""
    learning_rate: float | tuple[float, ...] = 1e-5
    """Peak learning rate: one for all agents or one an agent."""
    lr_schedule: str = "constant"
    """After the warm-up: constant, linear or cosine down to 0 at num_updates."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly."""
    num_updates: int = 0
    """Updates of every agent, each of num_epochs times num_minibatches optimiser steps: the length of the schedule, which
    linear and cosine need. Steps that target_kl holds back do not count, nor those in which an agent has nothing to learn
    from."""
    weight_decay: float | tuple[float, ...] = 0.0
    """Decoupled weight decay: one for all agents or one an agent."""
    momentum: float = 0.0
    """Decay of sgd's sum of gradients; 0 is off."""
    adam_b1: float = 0.9
    """Decay of Adam's first moment."""
    adam_b2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    max_grad_norm: float | tuple[float, ...] = 1.0
    """Clip of each agent's global gradient norm: one for all agents or one an agent."""
    num_epochs: int = 1
    """Passes over each batch (PPO, arXiv 1707.06347)."""
    num_minibatches: int = 1
    """Parts of a batch, each with an optimiser step of its own, in a pass."""
    target_kl: float | None = None
    """Make no further step on a batch once the policy has moved this far from the one that sampled (k3 a token); None: off."""
    lora_rank: int = 0
    """Train adapters of this rank over one frozen copy of the weights (LoRA, arXiv 2106.09685); 0: train all weights."""
    lora_alpha: float | None = None
    """What adapters add is scaled by lora_alpha / lora_rank; None: lora_rank, which scales by 1."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs left out in an update (not in sampling, and not where values or log-probabilities are made
    anew, so ratios differ from 1 on a first step too)."""
    lora_targets: str | None = None
    """Weights that have adapters, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; all, and
    None: all of these."""
    micro_batches: int = 1
    """Split an optimiser step's rows into this many parts and add up their gradients; saves memory."""
    remat: str = "dots"
    """What the backward pass keeps: none (everything), dots (the large weight products), full (layer inputs only)."""
    compute_dtype: str = "float32"
    """float32 (on GPUs too; TF32 is jax's JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32), or bfloat16 with float32 master
    weights."""
    temperature: float = 1.0
    """Sampling temperature, at which completions are scored too; 0 is greedy (scored at 1)."""
    max_new_tokens: int = 128
    """Longest completion, in tokens."""

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            check(name, getattr(self, name), getattr(self, name) in allowed, f"one of {allowed}")
        for name in ("optimizer", "learning_rate", "max_grad_norm", "weight_decay"):
            if isinstance(getattr(self, name), list):  # settings are hashable
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("learning_rate", "max_grad_norm", "adam_eps"):
            check(name, getattr(self, name), all(x > 0 for x in each(getattr(self, name))), "> 0")
        for name in ("kl_coef", "warmup_updates", "weight_decay"):
            check(name, getattr(self, name), all(x >= 0 for x in each(getattr(self, name))), ">= 0")
        check("optimizer", self.optimizer, set(each(self.optimizer)) <= set(OPTIMIZERS), f"one of {OPTIMIZERS}")
        check("momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1) (0 is off)")
        for name, (of, default) in OF_OPTIMIZER.items():
            used = getattr(self, name) == default or of in each(self.optimizer)
            check(name, getattr(self, name), used, f"{default} without optimizer={of}")
        for name in (
            "clip_eps_low",
            "clip_eps_high",
            "dual_clip",
            "value_coef",
            "value_clip",
            "bc_weight",
            "world_model_weight",
        ):
            value = getattr(self, name)
            check(name, value, value is None or value >= 0, ">= 0, or None: as the algorithm's row says")
        for name, allowed in (("ema_decay", "in [0, 1)"), ("gae_lambda", "in [0, 1]")):
            value = getattr(self, name)
            check(name, value, value is None or 0 <= value < 1 or (value == 1 and name == "gae_lambda"), f"{allowed}, or None")
        smoothing = self.label_smoothing
        check("label_smoothing", smoothing, smoothing is None or 0 <= smoothing < 0.5, "in [0, 0.5), or None")
        allowed = "0 or None where preference_loss is hinge or ipo"
        check("label_smoothing", smoothing, not smoothing or self.preference_loss in (None, "sigmoid"), allowed)
        for name in ("critic_learning_rate", "importance_cap", "kl_target", "beta"):
            check(name, getattr(self, name), getattr(self, name) is None or getattr(self, name) > 0, "> 0, or None")
        check("kl_target", self.kl_target, self.kl_target is None or self.kl_coef > 0, "None where kl_coef=0")
        check("dual_clip", self.dual_clip, not self.dual_clip or self.dual_clip > 1, "> 1, or 0 (off)")
        for name in ("micro_batches", "num_epochs", "num_minibatches"):
            check(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        check("target_kl", self.target_kl, self.target_kl is None or self.target_kl > 0, "> 0, or None (off)")
        several = self.num_epochs * self.num_minibatches > 1
        check("target_kl", self.target_kl, self.target_kl is None or several, "None where a batch is one optimiser step")
        if self.lr_schedule != "constant":
            allowed = f"> warmup_updates={self.warmup_updates} for lr_schedule={self.lr_schedule}"
            check("num_updates", self.num_updates, self.num_updates > self.warmup_updates, allowed)
        check("lora_rank", self.lora_rank, self.lora_rank >= 0, ">= 0 (0: all weights are trained)")
        check("lora_alpha", self.lora_alpha, self.lora_alpha is None or self.lora_alpha > 0, "> 0, or None: lora_rank")
        check("lora_dropout", self.lora_dropout, 0 <= self.lora_dropout < 1, "in [0, 1)")
        given = [] if self.lora_targets in (None, "all") else [name.strip() for name in self.lora_targets.split(",")]
        known = all(name in LORA_TARGETS for name in given) and len(set(given)) == len(given)
        check("lora_targets", self.lora_targets, known, f"all, or some of {','.join(LORA_TARGETS)}, each once")
        if not self.lora_rank:
            for name, off in (("lora_alpha", None), ("lora_dropout", 0), ("lora_targets", None)):
                check(name, getattr(self, name), getattr(self, name) == off, f"{off} where lora_rank=0, which has no adapters")

    @property
    def lora_modules(self) -> tuple[str, ...]:
        """The weights that have adapters, in the order of `LORA_TARGETS`."""
        given = self.lora_targets
        wanted = LORA_TARGETS if given in (None, "all") else [name.strip() for name in given.split(",")]
        return tuple(name for name in LORA_TARGETS if name in wanted)


OPTIMIZERS = ("adamw", "lion", "sgd")
OF_OPTIMIZER = {"adam_b1": ("adamw", 0.9), "adam_b2": ("adamw", 0.999), "adam_eps": ("adamw", 1e-8), "momentum": ("sgd", 0.0)}
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # Hugging Face's names
CHOICES = {
    "advantage_scale": (None, "none", "std", "batch_std", "running_std"),
    "loss_aggregation": (None, "token_mean", "sequence_mean", "sequence_sum", "constant"),
    "ratio_level": (None, "token", "sequence", "turn"),
    "critic_type": (None, "v", "q"),
    "preference_loss": (None, "sigmoid", "hinge", "ipo"),
    "importance_level": ("token", "sequence"),
    "old_logprobs": ("sampler", "rescored"),
    "kl_estimator": (None, "k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "lr_schedule": ("constant", "linear", "cosine"),
    "remat": ("none", "dots", "full"),
    "compute_dtype": DTYPES,
}


ORDERS = ("simultaneous", "alternating")


@with_known_names
@dataclasses.dataclass(frozen=True)
class TrainConfig(Learning, Sampling, Episodes, Preferences, Files):
    """A training run. Every field is a flag of the experiments, also those of `Sampling`, `Learning`, `Episodes`,
    `Preferences` and `Files`."""

    num_updates: int = 100
    """Updates of the team, in which all agents learn (in alternating order one). Each samples a batch and makes num_epochs
    times num_minibatches optimiser steps on it."""
    seed: int = 0
    """All randomness follows from the seed and the step."""
    num_prompts: int = 1
    """Prompts an update (P)."""
    num_generations: int = 8
    """Completions a prompt and agent (G, the group)."""
    dynamic_sampling: int = 0
    """Rounds of further prompts that an update may play in place of those whose returns are all equal (DAPO, arXiv
    2503.14476); 0: none. For rows whose baseline is of a group."""
    frozen_agents: tuple[int, ...] = ()
    """Agents that are played but never updated, by their numbers from 0 on."""
    update_order: str = "simultaneous"
    """simultaneous: all agents learn in every update; alternating: one at a time, in turn, while the others are held."""
    alternate_every: int = 1
    """Updates that an agent's turn lasts in alternating order."""
    per_agent: str = "map"
    """Gradients of the agents on one device: map (one after the other) or vmap (at once; for small models)."""
    mesh: str = "auto"
    """Devices by axis, such as agent=2,data=2,model=2; agent=1 is one device; auto: agents over the devices there are."""
    log_every: int = 10
    """Updates between text samples and histograms in TensorBoard."""
    eval_every: int = 0
    """Updates between evaluations on the held-out prompts; 0: only before and after training, if there are any."""
    eval_generations: int = 4
    """Completions a held-out prompt and agent."""
    eval_temperature: float | None = None
    """Temperature of evaluations, 0 is greedy; None: as in training."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self):
        check_types(self)
        for name in (
            "num_updates",
            "num_prompts",
            "num_generations",
            "log_every",
            "eval_generations",
        ):
            check(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        check("seed", self.seed, 0 <= self.seed < 2**31, "in 0..2147483647")
        for name in ("eval_every", "dynamic_sampling"):
            check(name, getattr(self, name), getattr(self, name) >= 0, ">= 0 (0 is off)")
        object.__setattr__(self, "frozen_agents", tuple(self.frozen_agents))
        frozen, alternating = self.frozen_agents, self.update_order == "alternating"
        check(
            "frozen_agents", frozen, all(a >= 0 for a in frozen) and len(set(frozen)) == len(frozen), "different numbers >= 0"
        )
        check("update_order", self.update_order, self.update_order in ORDERS, f"one of {ORDERS}")
        allowed = ">= 1" if alternating else "1 where update_order is simultaneous"
        check(
            "alternate_every",
            self.alternate_every,
            self.alternate_every >= 1 and (alternating or self.alternate_every == 1),
            allowed,
        )
        check("per_agent", self.per_agent, self.per_agent in ("map", "vmap"), "map or vmap")
        if self.algorithm == "c3":  # is nothing but leave-one-out over such joint actions
            object.__setattr__(self, "joint_mode", "counterfactual" if self.joint_mode == "aligned" else self.joint_mode)
            object.__setattr__(self, "branching", "chain")
            check("joint_mode", self.joint_mode, self.joint_mode == "counterfactual", "counterfactual for algorithm=c3")
        Sampling.__post_init__(self)
        Learning.__post_init__(self)
        Episodes.__post_init__(self)
        Preferences.__post_init__(self)
        Files.__post_init__(self)

    def of_seed(self, seed: int, **changes: Any) -> Self:
        """The settings of one of several runs (`seeds.train_seeds`), as it would have them alone: its directory is `seed_S` in
        theirs."""
        where = self.output_dir and f"{self.output_dir}/seed_{seed}"
        return dataclasses.replace(self, seed=seed, output_dir=where, progress=False, **changes)

    def sampling(self) -> Sampling:
        return Sampling(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)})

    def eval_sampling(self) -> Sampling:
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        return dataclasses.replace(self.sampling(), temperature=temperature)

    def learning(self) -> Learning:
        return self._learning

    @functools.cached_property  # asked for at every step, and its checks take longer than the rest
    def _learning(self) -> Learning:
        found = Learning(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Learning)})
        if found.lr_schedule == "constant":  # says nothing there, and runs of other lengths have one program
            found = dataclasses.replace(found, num_updates=found.warmup_updates + 1)
        return found

    def episodes(self) -> Episodes:
        return Episodes(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Episodes)})

    def eval_episodes(self) -> Episodes:
        """Evaluations do not branch and count every turn in full."""
        several: dict[str, Any] = dict(branching="chain", joint_mode="aligned", gamma=1.0) if self.num_turns > 1 else {}
        several |= dict(joint_mode="aligned") if self.forks else {}
        return dataclasses.replace(self.episodes(), **several)
