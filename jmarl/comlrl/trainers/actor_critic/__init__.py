"""CoMLRL's `trainers.actor_critic`: trainers with critics.

Each is defined in the module of `trainers` that has its name. Open `ac_base.py` first.
"""

from jmarl.comlrl.module_paths import add_submodules
from jmarl.comlrl.trainers.iac import ActorCriticTrainerBase as ActorCriticTrainerBase
from jmarl.comlrl.trainers.iac import IACConfig as IACConfig
from jmarl.comlrl.trainers.iac import IACTrainer as IACTrainer
from jmarl.comlrl.trainers.iac import RolloutSample as RolloutSample
from jmarl.comlrl.trainers.maac import MAACConfig as MAACConfig
from jmarl.comlrl.trainers.maac import MAACTrainer as MAACTrainer

add_submodules(__name__)
