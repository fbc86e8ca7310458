"""MRLM's `environments.debate`; the classes are defined in `jmarl.envs.debate`."""

from jmarl.envs.debate.debate import DebateEnvironment as DebateEnvironment
from jmarl.envs.debate.rule_judge import RuleBasedJudge as RuleBasedJudge
