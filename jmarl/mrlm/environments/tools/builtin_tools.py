"""MRLM's default tools at their module path; they are defined in `jmarl.envs.tools`."""

from jmarl.envs.tools.tool_use import create_default_tool_registry as create_default_tool_registry
