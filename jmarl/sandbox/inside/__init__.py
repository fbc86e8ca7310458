"""What runs inside the sandbox: the fork server, and for each request a runner, the program and its judge, or a session.

A bare interpreter imports this folder as the package `inside`, and nothing else of the project is visible there. So it imports
only the standard library (numpy if it is installed) and itself, by relative imports. Open `server.py` first.
"""
