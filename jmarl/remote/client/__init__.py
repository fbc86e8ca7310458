"""The client of environments as services: training plays an environment on servers as if it were in its own process.

Host code: no jax. It needs grpcio (extra `serve`). Open `environment.py` first: `RemoteEnvironment` is what training plays.
"""
