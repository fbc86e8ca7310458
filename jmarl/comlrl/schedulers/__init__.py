"""CoMLRL's `schedulers`: devices of torch, which are not part of jmarl (see `only_in_comlrl`).

Open `device_scheduler.py` first.
"""

from jmarl.comlrl.schedulers.device_scheduler import DeviceScheduler as DeviceScheduler
