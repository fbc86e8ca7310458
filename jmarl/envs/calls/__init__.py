"""How functions of the user are called: which arguments they get, how long they may take, `async def`, and where they fail.

Imports nothing of this package. Open `arguments.py` first: the parameters of reward functions.
"""

from jmarl.lazy import modules_of

__getattr__ = modules_of(__name__)
