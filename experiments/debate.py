"""Two language models debate, and a judge scores both sides after the last speech.

Claim: the command trains against trained, scripted and frozen opponents, and takes rules, a model or a web service as the
    judge; with rules, a debater's score rises.
Command: python -m experiments.debate            (flags: --help)
    --opponent trained | scripted | frozen      frozen: agent 1 is not trained
    --judge rules | agent | http://host:8000/v1 agent: --judge-model, loaded in this process; URL: --judge-model is its name
    there
    --swap                                      agents argue both sides of every motion; with --shared one policy plays itself
Reward: `jmarl.envs.debate.debate`: 0 until the last turn, then from 0 to 1, or with --zero-sum from -1 to 1.
Expected: `--opponent scripted --temperature 0.9 --num-prompts 1 --num-generations 8 --learning-rate 5e-5 --num-updates 36
    --held-out 16`, seed 0: held-out score from 0.36 ± 0.05 to 0.62 ± 0.03 (the script has 0.76), debates won from 0 to 3 %, in
    10 minutes of CPU time (15.5 minutes on two cores that also ran other work). After training, speeches are full sentences
    about the motion and cite studies that do not exist ("However, a recent study found ..."); they describe the debate more
    than they take a side.
    Two trained debaters, `--temperature 0.9 --num-prompts 1 --num-generations 8 --learning-rate 5e-5 --num-updates 20
    --held-out 12`, seed 0: from 0.38 ± 0.05 to 0.61 ± 0.02 in 13.7 minutes; both write about "the debate" and take no side.
    SmolLM2-135M as the judge gives no useful reward. Asked for a winner, it names the side that comes first (position_bias 1.0,
    so every debate is a draw), and 2.5 answers of 6 could not be read; asked for scores, no answer could. Use a larger model.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from experiments.report import command, report
from experiments.start import TeamTraining, load_and_train
from jmarl.config import Count, CountOrOff, Episodes, Optimizer, Run, Sampling, check, check_fields
from jmarl.envs.chat_api import ChatAPI, ChatModel
from jmarl.envs.debate.debate import Debate, DebateScripted
from jmarl.envs.debate.llm_judge import LLMJudge
from jmarl.envs.debate.rule_judge import RuleBasedJudge
from jmarl.models.hub.agents import load_agent
from jmarl.rollout.text_model import AgentModel
from jmarl.runs.records import TrainResult

KEY = "JUDGE_API_KEY"
NUM_TASKS = 1000  # to train on, or as many as there are


@dataclasses.dataclass(frozen=True)
class DebateConfig(TeamTraining):
    """Agents debate."""

    opponent: Literal["trained", "scripted", "frozen"] = "trained"
    """trained, scripted (a team of one against a script) or frozen (agent 1 is not trained)."""
    shared: bool = False
    """One policy for both agents."""
    speeches: Count = 1
    """Speeches of each side."""
    zero_sum: bool = False
    """Reward the difference of the scores."""
    swap: bool = False
    """For every motion there are two tasks, in which the agents argue opposite sides."""
    judge: str = "rules"
    """rules, agent (a model in this process), or the URL of a service such as http://localhost:8000/v1, whose key is read from
    the environment variable JUDGE_API_KEY."""
    judge_model: str = ""
    """Model of the judge: for agent as in --model (empty: that of the debaters), for a service its name there."""
    judge_asks: Literal["winner", "scores"] = "winner"
    """What a model that judges is asked for: winner, which small models can answer, or scores."""
    judge_samples: Count = 3
    """Answers of a model that judges, for each order of the two sides."""
    data_path: str = ""
    """A JSON Lines file of motions, to use instead of those of the project."""
    held_out: CountOrOff = 8
    run: Run = Run(num_updates=100, output_dir="runs/debate")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=4, branching="chain", chat=True)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.8)
    optimizer: Optimizer = Optimizer(learning_rate=1e-05)

    def __post_init__(self) -> None:
        check_fields(self, ["opponent", "speeches"])
        turns, num_turns = self.speeches * self.num_agents, self.episodes.num_turns
        check("num_turns", num_turns, num_turns in (1, turns), f"left out: it follows from speeches, here {turns}")
        object.__setattr__(self, "episodes", dataclasses.replace(self.episodes, num_turns=turns))
        if self.opponent == "frozen":
            frozen = self.run.frozen_agents
            check("frozen_agents", frozen, frozen in ((), (1,)), "1 or left out: agent 1 is the frozen opponent")
            object.__setattr__(self, "run", dataclasses.replace(self.run, frozen_agents=(1,)))
        super().__post_init__()

    @property
    def num_agents(self) -> int:
        return 1 if self.opponent == "scripted" else 2

    def check_together(self) -> None:
        super().check_together()
        known = self.judge in ("rules", "agent") or self.judge.startswith(("http://", "https://"))
        check("judge", self.judge, known, "rules, agent or a URL that begins with http:// or https://")
        check("shared", self.shared, not self.shared or self.opponent == "trained", "off unless opponent=trained")
        check("judge_model", self.judge_model, not self.judge_model or self.judge != "rules", "left out for judge=rules")


def make_judge(cfg: DebateConfig) -> RuleBasedJudge | LLMJudge:
    if cfg.judge == "rules":
        return RuleBasedJudge()
    if cfg.judge == "agent":
        chat = dataclasses.replace(cfg.episodes.chat_settings, on=True)
        model = AgentModel(load_agent(cfg.judge_model or cfg.model), chat=chat)
    else:
        model = ChatModel(ChatAPI(cfg.judge, cfg.judge_model, api_key_env=KEY, timeout_s=30, name="judge"))
    return LLMJudge(model, cfg.judge_samples, cfg.judge_asks)


def run(cfg: DebateConfig) -> TrainResult:
    judge, data = make_judge(cfg), cfg.data_path or None
    if cfg.opponent == "scripted":
        env = DebateScripted(cfg.speeches, judge, cfg.zero_sum, data)
    else:
        env = Debate(cfg.speeches, judge, cfg.zero_sum, cfg.swap, data=data)
    items = env.tasks("train", NUM_TASKS, cfg.run.seed)
    held_out = env.tasks("eval", cfg.held_out) if cfg.held_out else []
    return load_and_train(cfg, env, items, held_out, shared_weights=cfg.shared)


if __name__ == "__main__":
    command(DebateConfig, run, report)
