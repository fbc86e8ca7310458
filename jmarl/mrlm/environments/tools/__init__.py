"""MRLM's `environments.tools`; the classes are defined in `jmarl.envs.tools`.

Open `builtin_tools.py` first.
"""

from jmarl.envs.tools.tool_use import ToolUseEnvironment as ToolUseEnvironment
