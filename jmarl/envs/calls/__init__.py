"""How functions of the user are called: which arguments they get, how long they may take, `async def`, and where they fail.

Imports nothing of this package. Open `arguments.py` first: the parameters of reward functions.
"""
