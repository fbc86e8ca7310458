"""Environments in which agents call tools, or write function calls that are compared with the expected ones and never run.

The room imports `envs` and `sandbox`. Open `tool_use.py` first, or `function_calling.py` for the second environment.
"""

from jmarl.lazy import modules_of

__getattr__ = modules_of(__name__)
