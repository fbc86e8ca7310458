"""The sections of `TrainConfig`: frozen dataclasses, hashable, so that they are static arguments of `jit`.

A setting that is None takes the default of the algorithm's row (`algorithms.resolve`). Every name occurs in one section only,
so the short name of a setting is enough in flags, YAML files and `TrainConfig.of`."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from jmarl.config.constraints import EPISODES, LEAGUE, LORA, LORA_TARGETS, LOSS, OPTIMIZER, SAMPLING, Constraint, require
from jmarl.config.paths import expand_home
from jmarl.config.validation import Count, CountOrAuto, CountOrOff, NotNegative, Positive, Range, Share, check_fields

Scale = Literal["none", "std", "batch_std", "running_std"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
Decay = Annotated[float, Range(0, 1, high_open=True, note="0 is off")]


@dataclasses.dataclass(frozen=True)
class Chat:
    """Whether prompts are put into chat templates, and what templates read besides the messages."""

    on: bool | tuple[bool, ...] = False
    """For all agents, or one per agent."""
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    date: datetime.date | None = None
    """What templates write as today's date; None: today's."""

    def of(self, agent: int) -> Chat:
        """Return the settings of one agent."""
        if not isinstance(self.on, tuple):
            return self
        if agent >= len(self.on):
            raise ValueError(
                f"chat has {len(self.on)} values, and there is an agent {agent}: give one for all, or one per agent"
            )
        return dataclasses.replace(self, on=self.on[agent])

    def __bool__(self) -> bool:
        if isinstance(self.on, tuple):
            raise TypeError("chat has one value per agent: choose an agent with `of`")
        return self.on


def as_chat(chat: bool | Chat) -> Chat:
    """Return settings of chats; a bool says whether prompts are put into templates."""
    return chat if isinstance(chat, Chat) else Chat(chat)


def is_default(part: Any, field: dataclasses.Field) -> bool:
    """Return whether a field of a part or a section has its default."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return getattr(part, field.name) == default and type(getattr(part, field.name)) is type(default)


class Section:
    """Base of the sections: checks each field against its annotation, and then its constraints."""

    constraints = tuple[Constraint, ...]()
    paths = tuple[str, ...]()  # settings that are paths

    def __post_init__(self) -> None:
        for name in self.paths:
            object.__setattr__(self, name, expand_home(getattr(self, name)))
        check_fields(self)
        require(self.constraints, self)

    def __repr__(self) -> str:  # what differs from the defaults
        changed = [f for f in dataclasses.fields(self) if not is_default(self, f)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Sampling(Section):
    """How completions are sampled. The names are those of Hugging Face's generation config."""

    constraints = SAMPLING

    max_new_tokens: Count = 128
    """Longest completion, in tokens."""
    min_new_tokens: Annotated[int, Range(0)] = 0
    """A completion does not end before this many tokens. For timing only: the forbidden end token still counts in the scored
    probabilities, so negative advantages move probability there without any sample that corrects it."""
    stop: str | tuple[str, ...] = ()
    """Texts that end a completion: the token that completes one is its last, and is trained. The text stays in the completion
    (`jmarl serve` leaves it out). One text or several, up to 256 bytes in all, for all agents. None ends a completion before
    min_new_tokens. For models without the habit of ending: "</answer>", "\\nUser:"."""
    temperature: Annotated[float, Range(0, note="0 is greedy")] = 1.0
    """Temperature of sampling and of the scored log-probabilities; 0 is greedy (scored at 1)."""
    top_k: CountOrOff = 0
    """Sample from the k most likely tokens; 0 is off."""
    top_p: Annotated[float, Range(0, 1, low_open=True, note="1 is off")] = 1.0
    """Sample from the smallest set of tokens that holds this much probability; 1 is off."""
    min_p: Decay = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 is off."""
    repetition_penalty: Annotated[float, Range(0, low_open=True, note="1 is off")] = 1.0
    """Divide the logits of tokens that occurred before by this; 1 is off."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations in sampling and training: float32 (on GPUs too; TF32 is jax's
    JAX_DEFAULT_MATMUL_PRECISION=tensorfloat32), or bfloat16 with float32 master weights. auto: bfloat16 on GPUs of compute
    capability 8.0 or more, else float32."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, also of one alone."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclasses.dataclass(frozen=True, repr=False)
class Episodes(Section):
    """What one step plays: how many prompts and completions, turns, joint actions."""

    constraints = EPISODES

    num_prompts: Count = 1
    """Prompts of a step (P)."""
    num_generations: Count = 8
    """Completions of each prompt and agent (G, the group)."""
    chat: bool | tuple[bool, ...] = False
    """Whether a prompt that is a text becomes the user's message of a chat, in the tokenizer's chat template. True for models
    that were trained on chats (instruct), False for base models. Prompts that are lists of messages are chats in any case. One
    for all agents, or one per agent (as a flag: --chat True False).
    What agents, environments and data write is text inside a template, whatever special tokens it spells. Without a template
    the special tokens in a prompt are tokens; in later turns those that the prompts of the first turn spell, and no agent."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Further values that chat templates read, such as enable_thinking: false. As a flag: JSON."""
    chat_date: str = "auto"
    """The date (2026-11-26) that chat templates write where they ask for today's. auto: the day on which the run first starts;
    the run keeps it when it resumes."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the completions that rewards and environments read, and that are logged. False: they read all
    of them, the end token too. Environments that need some, such as the marks of tool calls in `tools`, read these always."""
    joint_mode: Literal["aligned", "cross", "counterfactual"] = "aligned"
    """aligned: completion g of every agent forms a joint action. cross: all G^N combinations do. counterfactual: each
    completion of an agent is judged together with the first completions of all other agents and, with several turns, with what
    was written after those (C3, arXiv 2603.06859)."""
    cross_credit: Literal["mean", "sum"] = "mean"
    """Only for joint_mode=cross, where each completion of an agent is in G^(N-1) joint actions of the N agents and has as many
    returns: it is credited with their mean, or with their sum (as CoMLRL), which is G^(N-1) times as large, and so are its
    advantages unless advantage_scale divides them."""
    num_turns: Count = 1
    """Turns of an episode; each is a joint action and the environment's answer."""
    branching: Literal["tree", "chain"] = "tree"
    """How an episode with several turns (num_turns > 1) goes on; with one turn both are the same. chain: each joint action
    continues with one completion of each agent, so a prompt has G episodes side by side, and a turn has as many completions as
    the first. tree: each joint action continues with a group of G completions of its own, which are compared with each other,
    as in CoMLRL; an agent writes G + G^2 + ... + G^T completions of a prompt in T turns (more with joint_mode=cross)."""
    history: Literal["none", "append"] = "none"
    """What an agent reads in later turns. none: the new prompt only. append: the conversation so far and the new prompt."""
    long_prompts: Literal["error", "truncate_left", "drop"] = "error"
    """What to do with a prompt that leaves no room for max_new_tokens in the context. error: raise. truncate_left: keep the
    last tokens that fit and the chat template around them; a list of chat messages keeps the template of all of them, and the
    oldest ones lose their text first. drop: leave such items out before training, and end an episode before such a later turn
    (where the environment itself writes the first prompts, a long one of these is an error).
    Prompts made by formatters are checked for all items before training starts; `long_prompts` in the log counts the others.
    Of given pairs and texts it is about rows longer than the context; truncate_left leaves out those whose completions alone
    are too long. What a reward model cannot read with drop has no valid reward."""
    gamma: Share = 1.0
    """Discount of the next turn's return."""
    early_termination_threshold: float | None = None
    """A node whose mean reward is above this has no next turn; None: every node has one."""
    dynamic_sampling: CountOrOff = 0
    """Rounds of further prompts that a step may play in place of prompts whose returns are all equal (DAPO, arXiv 2503.14476);
    0: none. For algorithms whose advantages compare the returns of a group."""
    sample_parts: Count = 1
    """Sample the prompts of a turn in this many parts (as far as they divide evenly; 1 with history=append) and compute the
    rewards of one part while the next is sampled. For slow rewards, such as running programs. The environment is then called
    once per part."""
    async_steps: Annotated[int, Range(0, 1)] = 0
    """1: completions of the next step begin in the slots of those that have ended, so they are at most one update off-policy.
    Faster where lengths differ much. The loss then weights tokens by importance_cap (2 unless it is set). For one turn, on
    meshes that split only agents, without sample_parts and dynamic_sampling. The keys and values of completions under way stay
    in memory during updates, twice, and are part of checkpoints. 0: every completion is sampled with the newest parameters."""
    rewards_divided: bool = False
    """In several processes, call reward functions in each, with a share of the joint actions; False: in the first, with all."""
    overlap_rewards: bool = True
    """False: wait for the rewards of a part before the next is sampled, one after the other. The numbers are the same."""

    def __post_init__(self) -> None:
        if isinstance(self.chat_date, datetime.date):  # as YAML reads a date
            object.__setattr__(self, "chat_date", self.chat_date.isoformat())
        super().__post_init__()

    @property
    def chat_settings(self) -> Chat:
        """How the agents' prompts are put into chat templates."""
        date = None if self.chat_date == "auto" else datetime.date.fromisoformat(self.chat_date)
        return Chat(self.chat, self.chat_template_kwargs, date)

    @property
    def forks(self) -> bool:
        """Whether only the first joint action of a node has a next turn; the others are alternatives to single completions."""
        return self.joint_mode == "counterfactual"


@dataclasses.dataclass(frozen=True, repr=False)
class Loss(Section):
    """Advantages, the policy loss and its KL and entropy terms."""

    constraints = LOSS

    advantage_scale: Scale | None = None
    """What advantages are divided by: nothing, or the std of returns minus baseline over the group (std), over the batch
    (batch_std) or over all returns so far (running_std). Advantages of tokens are divided by their own std. None: the
    algorithm's default."""
    loss_aggregation: Aggregation | None = None
    """How the losses of tokens become one number. token_mean: the mean over all tokens, where long completions weigh more
    (loss_type dapo or bnpo of TRL). sequence_mean: first the mean over a completion, where all completions weigh the same
    (grpo of TRL). sequence_sum: the sum over a completion, then the mean (REINFORCE). constant: the sum over all tokens,
    divided by the number of completions times max_new_tokens (dr_grpo of TRL). None: the algorithm's default."""
    clip_eps_low: NotNegative | None = None
    """Lower clip of the ratio in clipped losses (PPO, arXiv 1707.06347); None: the algorithm's default, mostly 0.2."""
    clip_eps_high: NotNegative | None = None
    """Upper clip of the ratio in clipped losses; None: the algorithm's default, mostly 0.2."""
    ratio_level: Literal["token", "sequence", "turn"] | None = None
    """Level of the ratio in clipped losses: token, sequence (GSPO, arXiv 2507.18071) or turn; None: the algorithm's default."""
    dual_clip: NotNegative | None = None
    """Bound of clipped losses for negative advantages, in units of the advantage (arXiv 1912.09729), above 1; 0 is off."""
    mask_overlong: bool | None = None
    """Ignore completions that were cut off at max_new_tokens (DAPO, arXiv 2503.14476); None: the algorithm's default."""
    ema_decay: Annotated[float, Range(0, 1, high_open=True)] | None = None
    """Decay of the moving average of each role's returns, the baseline of rae (arXiv 2506.24119); None: 0.95."""
    align_coef: NotNegative | None = None
    """Weight in adalign of past advantages times those of the other agent (beta of arXiv 2406.14662); None: 0.5. It grows with
    rewards, whose product it weights."""
    importance_cap: Positive | None = None
    """Weight tokens by the ratio of the learner's probability to the one sampled with (truncated by top-k and top-p), at most
    this much: truncated importance sampling (Ionides 2008; IMPALA, arXiv 1802.01561). None: off."""
    importance_level: Literal["token", "sequence"] = "token"
    """What importance_cap weights. token: each token by its own ratio. sequence: all tokens of a completion by the product of
    their ratios. Both at most importance_cap: token_truncate and sequence_truncate of TRL's vllm_importance_sampling_mode. The
    level of the clipped ratio, importance_sampling_level of TRL, is ratio_level."""
    old_logprobs: Literal["sampler", "rescored"] = "sampler"
    """Where the behavior policy's log-probabilities in ratios come from: the sampler, or the learner before it changes."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL term to the untrained policy. Above 0 a frozen copy of the weights is kept (LoRA has one anyway)."""
    kl_target: Positive | None = None
    """Adapt kl_coef to this KL per token: multiply it by 1 + 0.1 clip(KL / target - 1, -0.2, 0.2) in each update (arXiv
    1909.08593). None: kl_coef is constant."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL (see `losses.kl_estimate`); None: k3 in the loss, k1 in the reward."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL term goes: into the loss, or into the reward of each token (arXiv 2203.02155). In ppo and ippo it enters the
    advantages and critic targets token by token; in other algorithms the sum over a completion enters its advantage."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    router_aux_coef: NotNegative = 0.0
    """Weight of the load-balancing term of models with experts (arXiv 2101.03961); 0: it is only a metric."""
    bc_weight: NotNegative | None = None
    """Weight in sft of what agents wrote (behavior cloning); None: 1."""
    world_model_weight: NotNegative | None = None
    """Weight in sft of what the environment answered (a world model predicts it); None: 0."""


@dataclasses.dataclass(frozen=True, repr=False)
class Critic(Section):
    """Critics, in algorithms that have them."""

    critic_type: Literal["v", "q"] | None = None
    """v: the critic reads the prompt. q: it reads the completion too, and the baseline is its mean over the group, which biases
    the gradient. None: v. Both of arXiv 2601.21972."""
    separate_critic: bool | None = None
    """Whether an agent's own critic is a separate model, or (False) a second head of the agent; None: separate."""
    critic_learning_rate: Positive | None = None
    """Peak learning rate of separate and central critics; None: that of the agents."""
    gae_lambda: Share | None = None
    """Lambda of advantages that use a critic (GAE, arXiv 1506.02438): over the tokens of a completion in ppo and ippo, over the
    turns of an episode in iac, maac and mappo. 1: return - value. 0: the TD(0) target - value. None: the algorithm's default.
    With several turns ppo and ippo take the plain return of a completion, discounted over the turns, as the reward of its last
    token: no value of a later turn is in it."""
    value_coef: NotNegative | None = None
    """Weight of the value loss where the critic is a head of the agent; None: 0.5."""
    value_clip: NotNegative | None = None
    """Clip values to this distance from the old ones in the value loss (arXiv 2005.12729); 0 is off; None: 0."""


@dataclasses.dataclass(frozen=True, repr=False)
class Optimizer(Section):
    """The optimizer of every agent, and how a batch is split into optimizer steps."""

    constraints = OPTIMIZER

    optimizer: Literal["adamw", "lion", "sgd"] | tuple[Literal["adamw", "lion", "sgd"], ...] = "adamw"
    """adamw (arXiv 1711.05101), lion (arXiv 2302.06675, with its own decays 0.9 and 0.99) or sgd. One for all agents, or one
    per agent; agents of one architecture have the same."""
    learning_rate: Positive | tuple[Positive, ...] = 1e-5
    """Peak learning rate: one for all agents, or one per agent."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or linear or cosine down to 0 at num_updates. It follows the number of the
    update, also where optimizer steps are skipped; in alternating order that of an agent's own updates."""
    warmup_updates: Annotated[int, Range(0)] = 0
    """Updates over which the learning rate rises linearly."""
    weight_decay: NotNegative | tuple[NotNegative, ...] = 0.0
    """Decoupled weight decay of matrices; norms, biases and other vectors do not decay, as in transformers and TRL. One for all
    agents, or one per agent."""
    momentum: Decay = 0.0
    """Momentum of sgd; 0 is off."""
    adam_b1: Annotated[float, Range(0, 1, high_open=True)] = 0.9
    """Decay of Adam's first moment."""
    adam_b2: Annotated[float, Range(0, 1, high_open=True)] = 0.999
    """Decay of Adam's second moment."""
    adam_eps: Positive = 1e-8
    """Adam's epsilon."""
    max_grad_norm: Positive | tuple[Positive, ...] = 1.0
    """Clip of each agent's global gradient norm: one for all agents, or one per agent."""
    num_epochs: Count = 1
    """Passes over each batch (PPO, arXiv 1707.06347)."""
    num_minibatches: Count = 1
    """Parts of a batch in a pass, each with an optimizer step of its own."""
    target_kl: Positive | None = None
    """Stop making steps on a batch once the policy has moved this far from the behavior policy (k3 per token); None: off."""
    micro_batches: CountOrAuto = "auto"
    """Split the rows of an optimizer step into this many parts and add up their gradients; saves memory. auto: 1, and on GPUs
    as many as the update needs to fit, chosen at the start of a run together with remat."""
    remat: Literal["auto", "none", "dots", "full"] = "auto"
    """What the backward pass keeps: everything (none), the large products (dots), or only the inputs of layers (full). auto:
    dots, and on GPUs the fastest with which the update fits."""
    per_agent: Literal["map", "vmap"] = "map"
    """How the gradients of the agents on one device are computed: one after the other (map) or at once (vmap, for small
    models)."""

    def micro_batches_of(self, rows: int) -> int | Literal["auto"]:
        """Return micro_batches for another run whose optimizer steps have this number of rows."""
        return "auto" if self.micro_batches == "auto" else min(self.micro_batches, rows)


@dataclasses.dataclass(frozen=True, repr=False)
class League(Section):
    """Episodes against frozen copies of the team's past, in games in which each agent has a reward of its own."""

    constraints = LEAGUE

    snapshots: Annotated[int, Range(0)] = 0
    """Slots with past weights; 0, and no strangers: no league. Each takes as much memory of the host, and of a checkpoint, as
    the weights that are trained (with LoRA the adapters)."""
    snapshot_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: slots take half of the memory, and an opponent plays with weights that are rounded to it."""
    snapshot_every: Count = 10
    """Updates from one snapshot to the next, which takes the place of the oldest."""
    strangers: tuple[str, ...] = ()
    """Further opponents, which do not change: functions prompt -> text, as module:function or file.py:function, such as
    jmarl.envs.games.tictactoe:minimax; addresses with an OpenAI-compatible API, http://localhost:8000/v1#MODEL; directories of
    runs or agents like those of the team, without LoRA. Also without slots."""
    opponents: Literal["latest", "uniform", "winrate", "nash"] = "uniform"
    """Which slots and strangers a step meets. latest: the newest slot. uniform: all alike. winrate: by (1 - p)^2, with p how
    often the team wins against it (AlphaStar's PFSP); those that it never met come first. nash: the mixture of slots that no
    slot beats, for two agents whose rewards sum to 0; a new slot plays the step's items once more against all others."""
    opponent_share: Annotated[float, Range(0, 1, low_open=True)] = 0.5
    """Share of the items of a step that are played against an opponent, which holds one seat; the team plays the others alone.
    It is rounded so that opponents hold each seat equally often."""
    opponents_at_once: Count = 1
    """Opponents that are drawn for a step. A slot is sampled as one more copy of the team."""

    @property
    def on(self) -> bool:
        """Whether the team has opponents."""
        return bool(self.snapshots or self.strangers)


@dataclasses.dataclass(frozen=True, repr=False)
class LoRA(Section):
    """Adapters over one frozen base (LoRA, arXiv 2106.09685)."""

    constraints = LORA

    lora_rank: Annotated[int, Range(0, note="0: all weights are trained")] = 0
    """Rank of the adapters; 0: train all weights."""
    lora_alpha: Positive | None = None
    """The adapters' output is scaled by lora_alpha / lora_rank; None: lora_rank, which scales by 1."""
    lora_dropout: Annotated[float, Range(0, 1, high_open=True)] = 0.0
    """Share of an adapter's inputs dropped in an update. Not in sampling, and not where values or log-probabilities are
    computed again, so ratios differ from 1 in the first step too."""
    lora_targets: str | None = None
    """Weights that have adapters, separated by commas: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. all, and
    None: all of these that a model has; experts have none."""

    @property
    def target_names(self) -> list[str]:
        """The names in lora_targets, where all stands for all of them."""
        if self.lora_targets in (None, "all"):
            return [*LORA_TARGETS]
        return [name.strip() for name in self.lora_targets.split(",")]

    @property
    def modules(self) -> tuple[str, ...]:
        """The weights that have adapters, in the order of `LORA_TARGETS`."""
        return tuple(name for name in LORA_TARGETS if name in self.target_names)
