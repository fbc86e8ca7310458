"""Models with a value head at their module path in CoMLRL. They are parts of torch, and refuse to be used."""

from jmarl.comlrl.only_in_comlrl import refused_class

ActorCriticOutput = refused_class("ActorCriticOutput")
CausalLMWithValueHead = refused_class("CausalLMWithValueHead")
ValueHead = refused_class("ValueHead")
