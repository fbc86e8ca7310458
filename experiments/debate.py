"""Two language models debate, and a judge scores both sides when all speeches are made.

Claim: against trained, scripted or frozen opponents, under a judge by rules, a jmarl agent or a service, episodes are played,
    judged and learned from; by rules, a debater's score rises.
Command: python -m experiments.debate            (flags: --help)
    --opponent trained | scripted | frozen      frozen: agent 1 stays as it was loaded
    --judge rules | agent | http://host:8000/v1 agent: --judge-model in this process; an address: its name there
    --swap                                      every motion from both sides; with --shared one policy plays itself
Expected: `--opponent scripted --temperature 0.9 --num-prompts 1 --num-generations 8 --learning-rate 5e-5 --num-updates 36
    --held-out 16`, seed 0: held-out score from 0.36 ± 0.05 to 0.62 ± 0.03 (the script has 0.76), debates won from 0 to 3 %,
    10 minutes of CPU time (15.5 on two cores with other work). Speeches now keep to the motion, in full sentences, and
    cite studies that do not exist ("However, a recent study found ..."); they tell of the debate more than they take a side.
Two trained debaters, `--temperature 0.9 --num-prompts 1 --num-generations 8 --learning-rate 5e-5 --num-updates 20 --held-out
    12`, seed 0: from 0.38 ± 0.05 to 0.61 ± 0.02 in 13.7 minutes; both write about "the debate" and take no side.
As a judge the same model teaches nothing. Asked for a winner, it names whoever comes first (position_bias 1.0, every debate a
    draw), and 2.5 answers of 6 could not be read; asked for scores, none could. Use a larger model.
Reward: `jmarl.envs.debate.debate`, 0 until the last turn, then from 0 to 1, or with --zero-sum from -1 to 1.
"""

from __future__ import annotations

import dataclasses

from experiments.report import command, report
from jmarl.config import Episodes, Optimizer, Run, Sampling, TrainConfig, check
from jmarl.envs.chat_api import ChatAPI, ChatModel
from jmarl.envs.debate.debate import Debate, DebateScripted
from jmarl.envs.debate.llm_judge import QUESTIONS, LLMJudge
from jmarl.envs.debate.rule_judge import RuleBasedJudge
from jmarl.learning.per_agent import check_agents
from jmarl.models.hub.agents import load_agent
from jmarl.rollout.text_model import AgentModel
from jmarl.team import make_team
from jmarl.training.checks import check_settings
from jmarl.training.records import TrainResult
from jmarl.training.train import train

KEY = "JUDGE_API_KEY"


@dataclasses.dataclass(frozen=True)
class DebateConfig(TrainConfig):
    """Agents debate."""

    model: str = "smollm2-135m-instruct"
    """Model of the debaters: a name, a directory, a .gguf file or a hub id."""
    opponent: str = "trained"
    """trained, scripted (a team of one against a script) or frozen (agent 1 does not learn)."""
    shared: bool = False
    """One policy for both agents."""
    speeches: int = 1
    """Of each side."""
    zero_sum: bool = False
    """Reward the difference of the scores."""
    swap: bool = False
    """Agents argue for every motion in one task and against it in another."""
    judge: str = "rules"
    """rules, agent, or the address of a service such as http://localhost:8000/v1, whose key is read from the environment
    variable JUDGE_API_KEY."""
    judge_model: str = ""
    """Of an agent: a model as above (default: that of the debaters); of a service: its name there."""
    judge_asks: str = "winner"
    """What a judge that is a model is asked for: winner, which small models can answer, or scores."""
    judge_samples: int = 3
    """Answers of a judge that is a model, to each order of the sides."""
    data_path: str = ""
    """A JSON Lines file of motions, in place of the project's own."""
    held_out: int = 8
    """Held-out tasks that are played before and after training; 0: none."""
    run: Run = Run(num_updates=100, output_dir="runs/debate")
    episodes: Episodes = Episodes(num_prompts=2, num_generations=4, branching="chain", chat=True)
    sampling: Sampling = Sampling(max_new_tokens=96, temperature=0.8)
    optimizer: Optimizer = Optimizer(learning_rate=1e-05)

    def __post_init__(self):
        kinds = ("trained", "scripted", "frozen")
        check("opponent", self.opponent, self.opponent in kinds, ", ".join(kinds))
        known = self.judge in ("rules", "agent") or self.judge.startswith(("http://", "https://"))
        check("judge", self.judge, known, "rules, agent or an address that begins with http:// or https://")
        check("judge_asks", self.judge_asks, self.judge_asks in QUESTIONS, " or ".join(QUESTIONS))
        check("judge_samples", self.judge_samples, self.judge_samples >= 1, ">= 1")
        check("speeches", self.speeches, self.speeches >= 1, ">= 1")
        check("held_out", self.held_out, self.held_out >= 0, "0 or more")
        check("shared", self.shared, not self.shared or self.opponent == "trained", "off unless opponent is trained")
        check("judge_model", self.judge_model, not self.judge_model or self.judge != "rules", "left out where rules judge")
        turns = self.speeches * (1 if self.opponent == "scripted" else 2)
        given_turns = self.episodes.num_turns
        check("num_turns", given_turns, given_turns in (1, turns), f"{turns} or left out: it follows from speeches")
        object.__setattr__(self, "episodes", dataclasses.replace(self.episodes, num_turns=turns))
        if self.opponent == "frozen":
            own = self.run.frozen_agents in ((), (1,))
            check("frozen_agents", self.run.frozen_agents, own, "1 or left out: agent 1 is the opponent")
            object.__setattr__(self, "run", dataclasses.replace(self.run, frozen_agents=(1,)))
        super().__post_init__()
        check_settings(self)
        check_agents(self, self.agents)

    @property
    def agents(self) -> int:
        return 1 if self.opponent == "scripted" else 2


def judge_of(cfg: DebateConfig) -> RuleBasedJudge | LLMJudge:
    if cfg.judge == "rules":
        return RuleBasedJudge()
    if cfg.judge == "agent":
        model = AgentModel(load_agent(cfg.judge_model or cfg.model))
    else:
        model = ChatModel(ChatAPI(cfg.judge, cfg.judge_model, api_key_env=KEY, timeout_s=30, name="judge"))
    return LLMJudge(model, cfg.judge_samples, cfg.judge_asks)


def run(cfg: DebateConfig) -> TrainResult:
    judge, data = judge_of(cfg), cfg.data_path or None
    if cfg.opponent == "scripted":
        env = DebateScripted(cfg.speeches, judge, cfg.zero_sum, data)
    else:
        env = Debate(cfg.speeches, judge, cfg.zero_sum, cfg.swap, data=data)
    held_out = env.tasks("eval", cfg.held_out) if cfg.held_out else []
    agent = load_agent(cfg.model)
    team, params = make_team([agent] * cfg.agents, shared_weights=cfg.shared, lora=cfg.lora.lora_rank > 0)
    return train(team, env, env.tasks("train", 1000, cfg.run.seed), cfg, params=params, eval_items=held_out)


def main() -> None:
    command(DebateConfig, run, report)


if __name__ == "__main__":
    main()
