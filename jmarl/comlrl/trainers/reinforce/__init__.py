"""CoMLRL's `trainers.reinforce`: trainers without a critic, by the baseline of their advantages.

Each is defined in the module of `trainers` that has its name. Open `centralized_magrpo.py` first.
"""

from jmarl.comlrl.module_paths import add_submodules
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOConfig as CentralizedMAGRPOConfig
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOTrainer as CentralizedMAGRPOTrainer
from jmarl.comlrl.trainers.magrpo import MAGRPOConfig as MAGRPOConfig
from jmarl.comlrl.trainers.magrpo import MAGRPOTrainer as MAGRPOTrainer
from jmarl.comlrl.trainers.mareinforce import MAREINFORCEConfig as MAREINFORCEConfig
from jmarl.comlrl.trainers.mareinforce import MAREINFORCETrainer as MAREINFORCETrainer
from jmarl.comlrl.trainers.maremax import MAReMaxConfig as MAReMaxConfig
from jmarl.comlrl.trainers.maremax import MAReMaxTrainer as MAReMaxTrainer
from jmarl.comlrl.trainers.marloo import MARLOOConfig as MARLOOConfig
from jmarl.comlrl.trainers.marloo import MARLOOTrainer as MARLOOTrainer

add_submodules(__name__)
