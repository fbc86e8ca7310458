"""Trainer classes under the names, arguments and module paths of CoMLRL.

Replace `comlrl` by `jmarl.comlrl` in imports. `convert` turns a trainer's arguments into what `jmarl.train` takes. The room
imports all rooms before it. Open `convert.py` first, then `trainers`.

Its settings are in `settings`, with what each does here; other names of ours in `config.aliases`; module paths in `paths`.

Left out: models of torch after training, because a trainer copies their weights and returns agents (`trainer.agents`,
`save_model`), and names that are parts of torch (`only_in_comlrl`, which says what to use instead).
"""

from jmarl.comlrl.paths import add_paths

__version__ = "1.4.3"  # the version of CoMLRL whose names and settings these are

add_paths(__name__)
