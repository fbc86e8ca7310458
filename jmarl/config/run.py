"""The sections of `TrainConfig` for the run as a whole: its length, devices, evaluations and files; and for a population."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from jmarl.config.constraints import POPULATION, RUN
from jmarl.config.sections import Section
from jmarl.config.validation import Count, CountOrOff, NotNegative, Range


@dataclasses.dataclass(frozen=True, repr=False)
class Run(Section):
    """How long a run trains, which agents learn when, where it runs, and what it writes and keeps."""

    constraints = RUN
    paths = ("output_dir", "replay_rollout")

    num_updates: Count = 100
    """Updates of the team. In each, all agents learn (in alternating order one) from one batch, in num_epochs times
    num_minibatches optimizer steps."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """All randomness is derived from the seed and the step."""
    frozen_agents: tuple[int, ...] = ()
    """Numbers, from 0 on, of agents that play but are never updated."""
    update_order: Literal["simultaneous", "alternating"] = "simultaneous"
    """simultaneous: all agents learn in every update. alternating: one agent at a time, in turn."""
    alternate_every: Count = 1
    """Updates of an agent's turn in alternating order."""
    mesh: str = "auto"
    """Devices by axis, such as agent=2,data=2,model=2; agent=1 is one device; data=all: all devices; auto: agents spread over
    the available devices."""
    strategy: Literal["fsdp", "ddp"] = "fsdp"
    """How the axis `data` of the mesh divides an agent: fsdp: rows and weights; ddp: rows only, each device has all weights."""
    long_context: bool | Literal["auto"] = "auto"
    """Of models with longrope (Phi-3.5, Phi-4-mini), which have factors for short and for long contexts: whether all rows,
    short ones too, are computed with the long factors. auto: if a first prompt with max_new_tokens (of all turns with
    history=append), or a given example, has more tokens than the short ones are for. Where prompts are not known before they
    are played, and outside of runs: no."""
    log_every: Count = 10
    """Updates between text samples and histograms in TensorBoard."""
    talk_every: CountOrOff = 0
    """Updates between measurements, from the first one on, of how much messages change what agents write after them, in
    episodes of several turns; 0: never. Every completion behind the first turn is scored under the prompts of all other
    episodes of its group: with G of them such a step computes G times the tokens of its update, without gradients."""
    talk_swap: bool = False
    """Measure with talk_every also how much the return falls if what agents write in the first turn is exchanged between
    tasks: such a step is played twice. For environments in which the first turn earns nothing."""
    max_completions_mb: CountOrOff = 100
    """Largest size in MB of completions.jsonl.gz in output_dir, which has the completions and rewards of every step; when it is
    full, every second step is dropped. 0: it is not written."""
    log_tokens: CountOrOff = 0
    """How many completions of each agent, turn and step have their tokens in completions.jsonl.gz, each with its
    log-probability, by which the page of `jmarl report` shades them: the first ones of the step. A token takes about 8 bytes
    of the file. 0: none."""
    eval_every: CountOrOff = 0
    """Updates between evaluations on held-out items; 0: only before and after training, if there are held-out items."""
    eval_generations: Count = 4
    """Completions of each held-out prompt and agent."""
    eval_temperature: Annotated[float, Range(0, note="0 is greedy")] | None = None
    """Temperature of evaluations, 0 is greedy; None: as in training."""
    progress: bool = True
    """Print lines about the steps, and on a terminal a bar with what the run does now."""
    tensorboard: bool = True
    """Write event files of TensorBoard to output_dir."""
    trackio: str = ""
    """Project of trackio that the run logs to; empty: none. Its files are in the directory that the variable TRACKIO_DIR names,
    by default that of trackio, so that `trackio show` has all runs side by side; nothing is sent anywhere unless
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set. Needs the extra trackio."""
    output_dir: str = ""
    """Directory of metrics, checkpoints and final models; empty: nothing is written."""
    resume: bool | Literal["auto"] = False
    """Continue from the newest checkpoint in output_dir. auto: begin if there is none, for queues that start a job again."""
    resume_step: Count | None = None
    """Continue from the checkpoint after this many updates; None: the newest."""
    strict_checkpoints: bool = False
    """Refuse to resume if the newest checkpoint is damaged; otherwise it is set aside and the one before is used."""
    allow_changed: str | None = None
    """Resume although these have changed, separated by commas: data, reward, environment, held_out."""
    save_every: CountOrOff | None = None
    """Updates between checkpoints in output_dir; None: by time, see save_minutes; 0: no checkpoints. If there are any, one is
    written at the end too, and when the run is interrupted or fails."""
    save_minutes: NotNegative = 3.0
    """Minutes between checkpoints where save_every is None, or 20 times the duration of the last one, if that is longer."""
    save_total_limit: Count = 2
    """Newest checkpoints kept."""
    keep_every: CountOrOff = 0
    """Also write and keep a checkpoint after each update that is a multiple of this, so that `jmarl replay` begins near any
    step; 0: none. A run that resumes without it deletes them."""
    keep_best: bool | str = False
    """Also keep the checkpoint of the best evaluation, by the held-out reward (true, the same as eval/reward) or by another
    column of evaluations; with min behind it the smallest is the best: eval/loss min. Of equal ones the first is kept, and the
    untrained team counts too. An evaluation in which an episode has no valid reward is never the best. It needs held-out tasks
    and eval_every; --best of jmarl play, eval and export takes these weights."""
    stop_after_nonfinite: CountOrOff = 3
    """Stop with an error after this many updates in a row in which the loss or gradient of an agent was not finite or no reward
    was valid; 0: never."""
    replay_rollout: str = ""
    """Make only the update in this file, such as failed_update_N.pkl of a run that stopped, and print its metrics; with resume
    on the weights of the newest checkpoint."""
    save_models: bool = True
    """Write the trained agents to output_dir/models at the end: all weights of each agent, with LoRA merged and as an
    adapter."""

    @property
    def saves(self) -> bool:
        """Whether the run makes checkpoints."""
        return bool(self.output_dir) and self.save_every != 0

    @property
    def best_column(self) -> tuple[str, bool]:
        """The column of evaluations by which the best is chosen, and whether the smallest is the best."""
        text = "eval/reward" if self.keep_best is True else self.keep_best or ""
        name, _, end = text.rpartition(" ")
        return (name, end == "min") if end in ("min", "max") else (text, False)

    @property
    def allowed_changes(self) -> list[str]:
        return [name.strip() for name in (self.allow_changed or "").split(",") if name.strip()]


@dataclasses.dataclass(frozen=True, repr=False)
class Population(Section):
    """Population based training (arXiv 1711.09846): teams that learn in one program, of which the worst copy the best."""

    constraints = POPULATION

    members: Annotated[int, Range(0, note="0: no population")] = 0
    """Teams that learn at once, from the seeds seed, seed + 1, ...; each has a directory `seed_S`. 0: no population."""
    exploit_every: Count = 20
    """Updates from one exploit to the next: members are ranked by the mean return on held-out tasks, and the worst take
    weights, optimizer state and settings of some of the best. A multiple of eval_every."""
    exploit: Literal["truncation"] = "truncation"
    """Who copies whom. truncation: the worst max(1, round(members / 5)), each one of as many best ones, drawn uniformly."""
    perturb: dict[str, Any] = dataclasses.field(default_factory=lambda: {"learning_rate": [0.8, 1.25]}, hash=False)
    """Settings of a member that change when it copies another, and the factors of which one is drawn: of learning_rate,
    max_grad_norm, weight_decay (these also of critics) and kl_coef. As a flag: JSON."""
