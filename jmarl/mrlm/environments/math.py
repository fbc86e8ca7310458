"""MRLM's `environments.math`; the classes are defined in `jmarl.envs.math`."""

from jmarl.envs.math.problems import MathProblemGenerator as MathProblemGenerator
from jmarl.envs.math.reasoning import MathReasoningEnvironment as MathReasoningEnvironment
