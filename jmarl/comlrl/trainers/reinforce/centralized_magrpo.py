"""MAGRPO of one model for all roles, at its module path in CoMLRL; it is defined in `jmarl.comlrl.trainers.centralized`."""

from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOConfig as CentralizedMAGRPOConfig
from jmarl.comlrl.trainers.centralized import CentralizedMAGRPOTrainer as CentralizedMAGRPOTrainer
