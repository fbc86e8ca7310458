"""Configurations: frozen dataclasses, hashable, so that they are static arguments of `jit`."""

from __future__ import annotations

import dataclasses


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
    """float32, or bfloat16 with float32 master weights."""

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


def check(name: str, given, ok: bool, allowed: str) -> None:
    """Refuse a bad setting, saying what was given and what is allowed."""
    if not ok:
        raise ValueError(f"{name}={given!r} is not allowed: {name} must be {allowed}")


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
    of an episode in iac, maac and mappo. 1: return - value; 0: the TD(0) target - value; None: as the algorithm's row says."""
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
    kl_estimator: str = "k3"
    """k1, k2 or k3."""
    kl_in: str = "loss"
    """Where the KL term goes: loss or reward."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""
    lr_schedule: str = "constant"
    """After the warm-up: constant, linear or cosine down to 0 at num_updates."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly."""
    num_updates: int = 0
    """Updates of every agent, each of num_epochs times num_minibatches optimiser steps: the length of the schedule, which
    linear and cosine need. Steps that target_kl holds back do not count."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    adam_b1: float = 0.9
    """Decay of Adam's first moment."""
    adam_b2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Adam's epsilon."""
    max_grad_norm: float = 1.0
    """Clip of each agent's global gradient norm."""
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
    """float32, or bfloat16 with float32 master weights."""
    temperature: float = 1.0
    """Sampling temperature, at which completions are scored too; 0 is greedy (scored at 1)."""
    max_new_tokens: int = 128
    """Longest completion, in tokens."""

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            check(name, getattr(self, name), getattr(self, name) in allowed, f"one of {allowed}")
        for name in ("learning_rate", "max_grad_norm", "adam_eps"):
            check(name, getattr(self, name), getattr(self, name) > 0, "> 0")
        for name in ("kl_coef", "warmup_updates", "weight_decay"):
            check(name, getattr(self, name), getattr(self, name) >= 0, ">= 0")
        for name in ("clip_eps_low", "clip_eps_high", "dual_clip", "value_coef", "value_clip"):
            value = getattr(self, name)
            check(name, value, value is None or value >= 0, ">= 0, or None: as the algorithm's row says")
        for name, allowed in (("ema_decay", "in [0, 1)"), ("gae_lambda", "in [0, 1]")):
            value = getattr(self, name)
            check(name, value, value is None or 0 <= value < 1 or (value == 1 and name == "gae_lambda"), f"{allowed}, or None")
        for name in ("critic_learning_rate", "importance_cap", "kl_target"):
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


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # Hugging Face's names
CHOICES = {
    "advantage_scale": (None, "none", "std", "batch_std", "running_std"),
    "loss_aggregation": (None, "token_mean", "sequence_mean", "sequence_sum", "constant"),
    "ratio_level": (None, "token", "sequence", "turn"),
    "critic_type": (None, "v", "q"),
    "importance_level": ("token", "sequence"),
    "old_logprobs": ("sampler", "rescored"),
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("loss", "reward"),
    "lr_schedule": ("constant", "linear", "cosine"),
    "remat": ("none", "dots", "full"),
    "compute_dtype": DTYPES,
}


@dataclasses.dataclass(frozen=True)
class Episodes:
    """What an episode is made of."""

    chat: bool = False
    """Put prompts into the tokenizer's chat template."""
    joint_mode: str = "aligned"
    """aligned: completion g of every agent forms a joint action; cross: all G^N combinations do."""
    cross_credit: str = "mean"
    """Return of a completion in cross mode: mean or sum over the joint actions that contain it."""
    num_turns: int = 1
    """Turns of an episode, each a joint action and its answer."""
    branching: str = "tree"
    """tree: every joint action of a turn goes on with a group of completions of its own; chain: with a single one."""
    history: str = "none"
    """What an agent reads in later turns: none, the new prompt alone; append, the conversation so far and the new prompt."""
    gamma: float = 1.0
    """Discount of the next turn's return."""
    early_termination_threshold: float | None = None
    """A node whose mean reward is above this is not played on; None: all are."""

    def __post_init__(self):
        check("joint_mode", self.joint_mode, self.joint_mode in JOINT_MODES, f"one of {tuple(JOINT_MODES)}")
        check("cross_credit", self.cross_credit, self.cross_credit in ("mean", "sum"), "mean or sum")
        check("num_turns", self.num_turns, self.num_turns >= 1, ">= 1")
        check("branching", self.branching, self.branching in ("tree", "chain"), "tree or chain")
        check("history", self.history, self.history in ("none", "append"), "none or append")
        check("gamma", self.gamma, 0 <= self.gamma <= 1, "in [0, 1]")
        threshold = self.early_termination_threshold
        check("early_termination_threshold", threshold, threshold is None or self.num_turns > 1, "None where num_turns=1")
        object.__setattr__(self, "joint_mode", JOINT_MODES[self.joint_mode])
        if self.num_turns > 1 and self.branching == "chain":
            check(
                "joint_mode",
                self.joint_mode,
                self.joint_mode == "aligned",
                "aligned for branching=chain: chains have one joint action a node",
            )


JOINT_MODES = {"aligned": "aligned", "align": "aligned", "cross": "cross", "crossed": "cross"}


@dataclasses.dataclass(frozen=True)
class TrainConfig(Learning, Sampling, Episodes):
    """A training run. Every field is a flag of the experiments, also those of `Sampling`, `Learning` and `Episodes`."""

    num_updates: int = 100
    """Updates of every agent: each samples a batch and makes num_epochs times num_minibatches optimiser steps on it."""
    seed: int = 0
    """All randomness follows from the seed and the step."""
    num_prompts: int = 1
    """Prompts an update (P)."""
    num_generations: int = 8
    """Completions a prompt and agent (G, the group)."""
    per_agent: str = "map"
    """Gradients of the agents on one device: map (one after the other) or vmap (at once; for small models)."""
    mesh: str = "auto"
    """Devices by axis, such as agent=2,data=2,model=2; agent=1 is one device; auto: agents over the devices there are."""
    output_dir: str = ""
    """Where metrics, checkpoints and final models go; empty: nothing is written."""
    resume: bool = False
    """Go on from the newest checkpoint in output_dir."""
    save_every: int = 0
    """Updates between checkpoints; 0: none, not even at the end."""
    save_total_limit: int = 2
    """Checkpoints kept."""
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
        for name in (
            "num_updates",
            "num_prompts",
            "num_generations",
            "log_every",
            "eval_generations",
            "save_total_limit",
        ):
            check(name, getattr(self, name), getattr(self, name) >= 1, ">= 1")
        check("seed", self.seed, 0 <= self.seed < 2**31, "in 0..2147483647")
        for name in ("save_every", "eval_every"):
            check(name, getattr(self, name), getattr(self, name) >= 0, ">= 0 (0 is off)")
        check("per_agent", self.per_agent, self.per_agent in ("map", "vmap"), "map or vmap")
        for name in ("resume", "save_every"):
            check(name, getattr(self, name), not getattr(self, name) or bool(self.output_dir), "off without output_dir")
        Sampling.__post_init__(self)
        Learning.__post_init__(self)
        Episodes.__post_init__(self)

    def sampling(self) -> Sampling:
        return Sampling(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)})

    def eval_sampling(self) -> Sampling:
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        return dataclasses.replace(self.sampling(), temperature=temperature)

    def learning(self) -> Learning:
        return Learning(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Learning)})

    def episodes(self) -> Episodes:
        return Episodes(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Episodes)})

    def eval_episodes(self) -> Episodes:
        """Evaluations do not branch and count every turn in full."""
        several = dict(branching="chain", joint_mode="aligned", gamma=1.0) if self.num_turns > 1 else {}
        return dataclasses.replace(self.episodes(), **several)
