"""CoMLRL's module paths under `comlrl.utils`.

Open `reward_processor.py` first.
"""
