"""The base of trainers with critics, at its module path in CoMLRL; it is defined in `jmarl.comlrl.trainers.iac`."""

from jmarl.comlrl.trainers.iac import ActorCriticTrainerBase as ActorCriticTrainerBase
