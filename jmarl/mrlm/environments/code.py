"""MRLM's `environments.code`; the classes are defined in `jmarl.envs.code`."""

from jmarl.envs.code.execution import CodeExecutionEnvironment as CodeExecutionEnvironment
from jmarl.envs.code.problems import CodeProblemGenerator as CodeProblemGenerator
