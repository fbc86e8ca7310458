"""Files of a run: checkpoints with manifests, the lock of the output directory, fingerprints of data and reward.

Open `run_directory.py` first.
"""
