"""The entries of MRLM's lists of environments, as names and constructor arguments of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jmarl.config.validation import did_you_mean
from jmarl.mrlm.rules import Notes, Values

ENVIRONMENTS = ("environment", "train_envs", "eval_envs")

# key of an entry -> the constructor argument of the environment (see `OPTIONS` for those with another name), or what it is for
ENVIRONMENT_KEYS: Mapping[str, str] = {
    "env_type": "name",
    "mode": "client, as all environments",
    "max_turns": "max_turns",
    "max_attempts": "max_turns",
    "difficulty_range": "difficulty_range",
    "dataset": "data",
    "problems": "problems",
    "timeout": "timeout",
    **{name: name for name in ("reward_scale", "reward_clip", "reward_bias")},
    "remote": "servers, which server_address names",
    "server_address": "servers",
    "custom_class": "name",
    "custom_kwargs": "options",
}

# keys of an entry with remote: true -> arguments of `RemoteEnvironment`; all but the first are additions to MRLM
SERVER_KEYS = {"server_address": "address"} | {key: key for key in ("token_file", "tls_ca", "tls_cert", "tls_key")}

# environment -> key -> its constructor argument, where that has another name than in `ENVIRONMENT_KEYS`
OPTIONS: dict[str, dict[str, str]] = {"debate": {"max_turns": "speeches"}, "debate_scripted": {"max_turns": "speeches"}}


# keys that MRLM gives to every entry, with the values that it gives them, -> the environments that do not read them
DEFAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "timeout": (5.0, ("math", "debate", "debate_scripted", "tool", "tools")),
    "max_attempts": (3, ("debate", "debate_scripted", "tool", "tools")),
}


def environments(values: Values, kind: str, notes: Notes) -> dict[str, Any]:
    """The environments to train in (train_envs, or eval_envs alone) and to evaluate in."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        if key == "environment":
            one = environment(value, notes) if value is not None else {"name": None, "options": {}}
            settings |= {key: one["name"]} | ({"options": one["options"]} if one["options"] else {})
        else:
            settings[key] = [environment(entry, notes) for entry in (value if isinstance(value, list) else [value])]
    return settings


def environment(entry: Any, notes: Notes) -> dict[str, Any]:
    """Return an entry as {"name": ..., "options": {...}}.

    Keys that MRLM does not have are arguments of the constructor. notes: gets keys that the environment does not read."""
    if isinstance(entry, str):
        return {"name": entry, "options": {}}
    if not isinstance(entry, Mapping):
        raise ValueError(f"{entry!r:.60} is no environment: give its name, or a mapping with env_type")
    if "name" in entry:
        if unknown := entry.keys() - {"name", "options"}:
            raise ValueError(f"an environment with a name has options, and no {min(unknown)}")
        return {"name": entry["name"], "options": dict(entry.get("options") or {})}
    name = environment_name(entry)
    options: dict[str, Any] = dict(entry.get("custom_kwargs") or {})
    if entry.get("remote"):
        servers = {argument: entry[key] for key, argument in SERVER_KEYS.items() if entry.get(key) is not None}
        options["servers"] = servers if len(servers) > 1 else servers["address"]
    for key, value in entry.items():
        if value is None or key in ("env_type", "custom_class", "custom_kwargs", "mode", "remote"):
            continue
        if key in SERVER_KEYS:
            if not entry.get("remote"):
                notes[key] = "the environment is not remote"
            continue
        default, without = DEFAULTS.get(key, (None, ()))
        if name in without or (":" in name and value == default):
            notes[f"{key} of {name}"] = "the environment does not read it"
            continue
        if key not in ENVIRONMENT_KEYS and (meant := did_you_mean(key, ENVIRONMENT_KEYS)):
            raise ValueError(f"{name} has no option {key!r}{meant}")
        option = OPTIONS.get(name, {}).get(key, ENVIRONMENT_KEYS.get(key, key))
        if option in options:
            raise ValueError(f"{key} and another key set {option} of {name}: give one of them")
        options[option] = own_problems(value) if key == "problems" else value
    return {"name": name, "options": options}


def environment_name(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry's environment, here or on its servers."""
    if entry.get("remote") and not entry.get("server_address"):
        raise ValueError("remote: true needs server_address: HOST:PORT, a list of them, or a file with one on each line")
    if entry.get("mode", "client") != "client":
        raise ValueError(f"mode={entry['mode']!r}: an environment is never trained, so its mode is client; agents have modes")
    kind, custom = entry.get("env_type"), entry.get("custom_class")
    kind = kind.lower() if isinstance(kind, str) else kind
    if custom is None:
        if kind is None or kind == "custom":
            raise ValueError(
                "an environment needs env_type (code, math, debate, tools, ...), or custom_class: pkg.module:Class"
            )
        if entry.get("custom_kwargs"):
            raise ValueError("custom_kwargs are for custom_class: options of the environment are keys beside env_type")
        return str(kind)
    if kind not in (None, "custom"):
        raise ValueError(f"env_type={kind!r} and custom_class={custom!r} are two environments: give one of them")
    return custom if ":" in custom else ":".join(custom.rsplit(".", 1))


def own_problems(problems: Any) -> Any:
    """Return problems of the user with those in MRLM's fields as tasks of ours; the path of a file stays.

    MRLM's programming problems have function_name and test_cases, pairs of arguments and result: a tuple has the arguments, a
    dict has them by name, and anything else, a list too, is the only one. Answers may be numbers."""
    return [_own_problem(row) for row in problems] if isinstance(problems, list | tuple) else problems


def _own_problem(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    if "function_name" in row and "test_cases" in row:
        tests = [f"    assert {_call(case)} == {case[1]!r}\n" for case in row["test_cases"]]
        others = {name: value for name, value in row.items() if name not in ("function_name", "test_cases", "id")}
        checked = {"entry_point": row["function_name"], "test": f"def check(candidate):\n{''.join(tests)}"}
        return {"task_id": str(row.get("id", row["function_name"])), **others, **checked}
    answer = row.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return {**row, "answer": str(answer) if isinstance(answer, int) else f"{answer:.12g}"}
    return dict(row)


def _call(case: Any) -> str:
    """Return the call of a test case as Python."""
    if not isinstance(case, list | tuple) or len(case) != 2:
        raise ValueError(f"test_cases has {case!r:.60}: give pairs of arguments and result, such as ((1, 2), 3)")
    given = case[0]
    if isinstance(given, Mapping):
        return f"candidate(**{dict(given)!r})"
    return f"candidate(*{given if isinstance(given, tuple) else (given,)!r})"
