"""CoMLRL's `models`: modules of torch with a value head, which are not part of jmarl (see `only_in_comlrl`).

Open `actor_critic.py` first.
"""

from jmarl.comlrl.models.actor_critic import ActorCriticOutput as ActorCriticOutput
from jmarl.comlrl.models.actor_critic import CausalLMWithValueHead as CausalLMWithValueHead
from jmarl.comlrl.models.actor_critic import ValueHead as ValueHead
