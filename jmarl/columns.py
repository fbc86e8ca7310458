"""The names of the columns of a run's rows: which the library writes, and which numbers of the user get.

A name of the user stands after a prefix: `reward/NAME` (a reward function, a part of the reward), `measures/NAME`, `eval/NAME`
(a metric of an evaluation), `agent_N/NAME` (a metric of an own loss). The library writes columns with these prefixes too. Its
names are reserved: before the first update `check_names` refuses them. A name that comes later, such as a part that an
environment returns in update 3 only, gets the suffix `_own` from `own_columns`, with a warning. So no number replaces another.
`experiments/README.md` describes all columns.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

REWARD, MEASURES, EVALUATION, AGENT = "reward/", "measures/", "eval/", "agent_N/"  # prefixes
# Ends of columns about another one: half of its 95 % interval; the episodes, and the runs of several seeds, that it is of.
INTERVAL, EPISODES, RUNS = "_ci95", "_episodes", "_runs"
SUFFIX = "_own"
AT_K = rf"(.*/)?(pass|best|majority)@\d+({INTERVAL}|{EPISODES}|{RUNS})?"
MEMBERS = r"member_\d+|best_member"  # of a population
RESERVED = {  # prefix -> pattern of the names that the library writes
    REWARD: rf"mean|std|max|invalid|raised|truncated|comparator|comparator_invalid|{AT_K}",
    MEASURES: AT_K,
    EVALUATION: rf"updates|reward|episodes|long_prompts|joint_actions|{MEMBERS}|(reward|measures)/.*|{AT_K}",
    AGENT: "return|length|ended|distinct_1|distinct_2|repeated|loss|grad_norm|learning_rate|skipped|frozen|steps|entropy"
    "|advantages|advantage_std|zero_variance_share|ratio|mismatch|importance|importance_capped|kl|kl_coef|kl_moved|values?|value_loss"
    "|value_clip_share|explained_variance|router_balance|chosen|rejected|nll|nll_world|critic_.*",
}


def is_reserved(prefix: str, name: str, names: Iterable[str]) -> bool:
    """Return whether a column of the library has this name, or one about a column of the library.

    names: all names of the user with this prefix. With `solved` there may be `solved_ci95`, its interval, but not
    `solved_episodes` or `solved_runs`, which the library writes."""
    if re.fullmatch(RESERVED[prefix], name):
        return True
    base = name.removesuffix(INTERVAL)
    if base != name:
        return base not in names or is_reserved(prefix, base, names)
    ends = {REWARD: (EPISODES, RUNS), MEASURES: (EPISODES, RUNS), EVALUATION: (RUNS,), AGENT: ()}[prefix]
    return any(name.endswith(end) and name.removesuffix(end) in names for end in ends)


def check_names(prefix: str, names: Iterable[Any], what: str) -> None:
    """Raise a ValueError for a name that is reserved, or that is there twice. what: a word for the numbers, such as "part"."""
    texts = [text_of(name) for name in names]
    for i, text in enumerate(texts):
        if is_reserved(prefix, text, texts):
            reason = f"{prefix}{text} is a column of the library"
        elif text in texts[:i]:
            reason = f"two of them would be the column {prefix}{text}"
        else:
            continue
        raise ValueError(
            f"{text!r} is not allowed as the name of a {what}, because {reason}: choose another one, such as "
            f"{free(text, texts)!r}"
        )


def own_columns(prefix: str, names: Iterable[Any]) -> dict[Any, str]:
    """Return the column of each name of the user. One that is taken gets a suffix, with a warning."""
    names = list(names)
    texts, columns = [text_of(name) for name in names], dict[Any, str]()
    for name, text in zip(names, texts, strict=True):
        own = text
        if is_reserved(prefix, text, texts) or prefix + text in columns.values():
            own = free(text, [*texts, *(column.removeprefix(prefix) for column in columns.values())])
            warn_of_taken(prefix + text, prefix + own)
        columns[name] = prefix + own
    return columns


def join_numbers(own: Mapping[str, T], *tables: Mapping[str, T]) -> dict[str, T]:
    """Return numbers by name: those that an environment around another one adds, then those of the inner one by table.

    A name that is there already gets a suffix, with a warning where `own` has it."""
    joined = dict(own)
    for table in tables:
        for name, values in table.items():
            new = free(name, [*joined, *table]) if name in joined else name
            if name in own:
                warn_of_taken(name, new)
            joined[new] = values
    return joined


def warn_of_taken(taken: str, new: str) -> None:
    """Warn that a number gets another column."""
    warnings.warn(f"the name {taken} is taken by a column of the library, so your number is {new}: rename it", stacklevel=4)


def free(name: str, taken: Iterable[str]) -> str:
    """Return a name with a suffix that is not taken."""
    taken = set(taken)
    while (name := name + SUFFIX) in taken:
        pass
    return name


def text_of(name: Any) -> str:
    """Return a name as the logs write it."""
    return valid(str(name))


def valid(text: str) -> str:
    """Return text without lone surrogates, which UTF-8 cannot encode: they become U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
