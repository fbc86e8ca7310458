"""The environments of `jmarl.envs` at their module paths in MRLM.

Open `math.py` first.
"""
