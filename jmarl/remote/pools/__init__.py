"""Where environments and rewards are called: in processes of this machine, or on a cluster of Ray. No jax.

Imports `envs`. Open `ray_pool.py` first; `envs.pool` chooses one.
"""
