"""The environments of `jmarl.envs` under their names and arguments in MRLM, which trainers and `reset()`/`step(message)` play.

Open `math.py` first.
"""

from jmarl.mrlm.environments.code import CodeExecutionEnvironment as CodeExecutionEnvironment
from jmarl.mrlm.environments.debate import DebateEnvironment as DebateEnvironment
from jmarl.mrlm.environments.debate import DebateTopic as DebateTopic
from jmarl.mrlm.environments.debate import RuleBasedJudge as RuleBasedJudge
from jmarl.mrlm.environments.math import MathReasoningEnvironment as MathReasoningEnvironment
from jmarl.mrlm.environments.tools import CalculatorTool as CalculatorTool
from jmarl.mrlm.environments.tools import PythonREPLTool as PythonREPLTool
from jmarl.mrlm.environments.tools import ToolRegistry as ToolRegistry
from jmarl.mrlm.environments.tools import ToolUseEnvironment as ToolUseEnvironment
from jmarl.mrlm.environments.tools import WebSearchTool as WebSearchTool
from jmarl.mrlm.names import refusing

__getattr__ = refusing(__name__)
