"""CoMLRL's `models`: modules of torch with a value head, which are not part of jmarl (see `only_in_comlrl`).

Open `jmarl/comlrl/only_in_comlrl.py` first.
"""

from jmarl.comlrl.module_paths import add_submodules
from jmarl.comlrl.only_in_comlrl import refused_class

ActorCriticOutput = refused_class("ActorCriticOutput")
CausalLMWithValueHead = refused_class("CausalLMWithValueHead")
ValueHead = refused_class("ValueHead")

add_submodules(__name__)
