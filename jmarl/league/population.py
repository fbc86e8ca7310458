"""Population based training (arXiv 1711.09846): teams that learn in one program, of which the worst copy the best.

Members are several runs in the same stacks (`runs.kinds.seeds`): until the first exploit each is the run of its seed alone.
Before step t, a multiple of `exploit_every`, the evaluation after t updates ranks them by their mean held-out return. The worst
max(1, round(K / 5)) of K members each take weights, optimizer state, statistics and settings of a member drawn from as many
best ones, and the settings in `perturb` are multiplied by one of their factors. One program copies whoever is drawn.

What a member has of its own is in `StackState.scales`, factors of the settings, and so in its checkpoints. A checkpoint after t
updates is from before the exploit, or after it: the best never change, so that a resumed run copies the same again.

Left out: settings that are parts of a program, such as temperature and entropy_coef. Items and random keys stay those of the
member's seed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl.config import Population
from jmarl.evaluation.evaluate import Evaluation
from jmarl.learning.setup import Setup
from jmarl.logs.terminal import say
from jmarl.models import sharding
from jmarl.models.sharding import DeviceMesh
from jmarl.models.stack import to_host
from jmarl.randomness import POPULATION
from jmarl.rollout.experience import Source
from jmarl.rollout.turns import Rollout
from jmarl.team import map_stacks
from jmarl.types import StackState, TeamState


class Exploit(NamedTuple):
    """Who copies whom in an exploit, and what changes on the way."""

    children: np.ndarray  # [n] the worst members, the worst first
    parents: np.ndarray  # [n] of as many best ones
    factors: Mapping[str, np.ndarray]  # [n] by setting: child = parent * factor


def with_scales(state: TeamState, mesh: DeviceMesh | None, settings: Population) -> TeamState:
    """Return the state of a member at step 0, whose settings are those of the run: all factors are 1."""

    def one_of(stack: StackState) -> StackState:
        scales = {name: jnp.ones(stack.skipped.shape, jnp.float32) for name in settings.perturb}
        return stack._replace(scales=sharding.place(scales, mesh))

    return map_stacks(state, one_of)


def with_exploits(source: Source, joint: Setup, count: int) -> Source:
    """Return the source of a population from that of its members. joint: of all members."""
    members = Members(source, joint, count)
    return source._replace(play=members.play, evaluate=members.evaluate, renew=members.renew)


def truncation(settings: Population, scores: Sequence[float], rng: np.random.Generator) -> Exploit:
    """Return which members copy which, from their scores; one that is not finite is the lowest. The worst copy the best."""
    ranked = np.argsort(np.nan_to_num(np.asarray(scores, float), nan=-np.inf, neginf=-np.inf), kind="stable")
    n = max(1, round(len(scores) / 5))
    parents = rng.choice(ranked[-n:], n)
    return Exploit(ranked[:n], parents, {name: rng.choice(values, n) for name, values in sorted(settings.perturb.items())})


EXPLOITS = {"truncation": truncation}


def copied(state: TeamState, exploit: Exploit, count: int, mesh: DeviceMesh | None) -> TeamState:
    """Return the state of `count` members after an exploit; the old one is donated."""

    def copied_stack(stack: StackState) -> StackState:
        agents = np.arange(agents_of_member := stack.skipped.shape[0] // count)
        children, parents = ((x[:, None] * agents_of_member + agents).ravel() for x in exploit[:2])
        factors = {name: np.repeat(x, agents_of_member).astype(np.float32) for name, x in exploit.factors.items()}
        own = stack._replace(base=None, grads=None)  # shared, and overwritten by the next update
        return _copy(own, children, parents, factors, mesh=mesh)._replace(base=stack.base, grads=stack.grads)

    return map_stacks(state, copied_stack)


@partial(jax.jit, static_argnames="mesh", donate_argnames="stack")
def _copy(
    stack: StackState, children: jax.Array, parents: jax.Array, factors: dict[str, jax.Array], *, mesh: DeviceMesh | None
) -> StackState:
    """Copy agents of a stack, and multiply what they have of settings by factors."""
    new = jax.tree.map(lambda x: x.at[children].set(x[parents]), stack)
    scales = {name: x.at[children].multiply(factors[name]) for name, x in new.scales.items()}
    if "kl_coef" in factors:  # the one that an update reads
        new = new._replace(running=new.running._replace(kl_coef=new.running.kl_coef.at[children].multiply(factors["kl_coef"])))
    return sharding.constrain(new._replace(scales=scales), mesh)


class Members:
    """The source of a population. It keeps the columns of the exploit before a step, and nothing that is learned."""

    def __init__(self, source: Source, joint: Setup, count: int):
        self.source, self.count = source, count
        self.settings, self.run, self.seeds = joint.cfg.population, joint.cfg.run, joint.seeds
        self.mesh = joint.team.stacks[0].mesh
        self.columns: dict[str, float] = {}

    def renew(self, step: int, state: TeamState, evaluation: Sequence[Evaluation] | None) -> TeamState:
        """Return the state that a step plays with, see `Source`. evaluation: of each member, after `step` updates if it is time
        for an exploit."""
        self.columns = {}
        if not step or step % self.settings.exploit_every:
            return state
        assert evaluation is not None  # exploit_every is a multiple of eval_every
        scores = [result.mean for result in evaluation]
        rng = np.random.default_rng((self.seeds[0], step, POPULATION))
        exploit = EXPLOITS[self.settings.exploit](self.settings, scores, rng)
        state = copied(state, exploit, self.count, self.mesh)
        scales = {name: to_host(x)[:: len(x) // self.count] for name, x in state.stacks[0].scales.items()}
        lineage = np.arange(self.count)
        lineage[exploit.children] = exploit.parents
        for member, parent in enumerate(lineage):
            own = {"parent": float(parent), **{f"{name}_factor": float(x[member]) for name, x in scales.items()}}
            self.columns |= {f"population/member_{member}/{name}": x for name, x in own.items()}
        if self.run.progress:
            pairs = zip(exploit.children, exploit.parents, strict=True)
            copies = [f"member {a} ({scores[a]:.3f}) copies member {b} ({scores[b]:.3f})" for a, b in pairs]
            say(f"population after update {step}, by held-out return: {', '.join(copies)}")
        return state

    def play(self, step: int, state: TeamState) -> list[Rollout]:
        """Play a step; the log of each member has the columns of all."""
        played = self.source.play(step, state)
        return [rollout._replace(notes={**rollout.notes, **self.columns}) for rollout in played]

    def evaluate(self, state: TeamState) -> list[Evaluation]:
        """Evaluate the members; the evaluation of each says what all earned, and who is best."""
        assert self.source.evaluate is not None  # a population has held-out tasks
        results = self.source.evaluate(state)
        scores = [result.mean for result in results]
        notes = {f"member_{k}": score for k, score in enumerate(scores) if np.isfinite(score)}
        notes["best_member"] = float(best := best_of(results))
        if self.run.progress and int(state.step) == self.run.num_updates:
            say(f"best member: {best} (seed_{self.seeds[best]}), held-out return {scores[best]:.3f}")
        return [x._replace(rollout=x.rollout._replace(notes={**x.rollout.notes, **notes})) for x in results]


def best_of(results: Sequence[Evaluation]) -> int:
    """Return which member has the highest mean held-out return, of those with equal ones the first."""
    return int(np.argmax(np.nan_to_num([result.mean for result in results], nan=-np.inf, neginf=-np.inf)))
