"""CoMLRL's `trainers.preference`: trainers that learn from pairs of the team's completions.

Each is defined in the module of `trainers` that has its name. Open `iterative.py` first.
"""

from jmarl.comlrl.module_paths import add_submodules
from jmarl.comlrl.trainers.centralized import CentralizedComparatorAdapter as CentralizedComparatorAdapter
from jmarl.comlrl.trainers.centralized import CentralizedComparatorParseError as CentralizedComparatorParseError
from jmarl.comlrl.trainers.centralized import TaggedCentralizedComparatorAdapter as TaggedCentralizedComparatorAdapter
from jmarl.comlrl.trainers.madpo import MADPOConfig as MADPOConfig
from jmarl.comlrl.trainers.madpo import MADPOIterConfig as MADPOIterConfig
from jmarl.comlrl.trainers.madpo import MADPOIterTrainer as MADPOIterTrainer
from jmarl.comlrl.trainers.madpo import MADPOTrainer as MADPOTrainer
from jmarl.comlrl.trainers.marlhf import JointRewardModel as JointRewardModel
from jmarl.comlrl.trainers.marlhf import MARLHFConfig as MARLHFConfig
from jmarl.comlrl.trainers.marlhf import MARLHFIterConfig as MARLHFIterConfig
from jmarl.comlrl.trainers.marlhf import MARLHFIterTrainer as MARLHFIterTrainer
from jmarl.comlrl.trainers.marlhf import MARLHFTrainer as MARLHFTrainer

add_submodules(__name__)
