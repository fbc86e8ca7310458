"""CoMLRL's `schedulers`: devices of torch, which are not part of jmarl (see `only_in_comlrl`).

Open `jmarl/comlrl/only_in_comlrl.py` first.
"""

from jmarl.comlrl.module_paths import add_submodules
from jmarl.comlrl.only_in_comlrl import refused_class

DeviceScheduler = refused_class("DeviceScheduler")

add_submodules(__name__)
