"""What runs inside the sandbox: the server that forks, and for every program a runner, the program and its judge.

This folder is all that is visible of the project in there. It is imported as the package `inside` by a bare interpreter, so it
imports nothing but the standard library and itself. Open `server.py` first.
"""
