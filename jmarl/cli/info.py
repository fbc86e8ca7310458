"""`jmarl info`: devices, versions, the level of the sandbox, algorithms, environments and optional packages.

All of it is tried out: the devices compute something, the sandbox runs a program, every environment is constructed, starts an
episode of its first task if it has tasks of its own, and every optional package that is installed is imported (in another
process, beside the rest). The exit code is 1 if one of them is there and does not work. What is not installed is no error; the
sandbox may be missing too, and environments that need it are then listed as such.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from typing import Any

from jmarl.cli.main import plural
from jmarl.files.run_files import PACKAGES, version_of

OPTIONAL = {  # package -> (module to import, what it is for)
    "gguf": ("gguf", ".gguf files"),
    "wandb": ("wandb", "Weights & Biases"),
    "trackio": ("trackio", "trackio"),
    "matplotlib": ("matplotlib.pyplot", "figures"),
    "nbclient": ("nbclient", "notebooks"),
    "textarena": ("textarena", "games of TextArena"),
    "torch": ("torch", "models of transformers as arguments"),
}
LEVELS = {  # of the sandbox
    "S4": "S4, the strictest: namespaces, and a control group that caps memory",
    "S3": "S3: namespaces",
    "S2": "S2, the weakest that is chosen: Landlock and seccomp",
    "none": "none",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    imports = start_imports()
    report: dict[str, Any] = {"versions": versions(), "devices": devices(), "sandbox": sandbox(), "algorithms": algorithms()}
    report["environments"] = environments(has_sandbox=not report["sandbox"]["error"])
    report["optional"] = finish_imports(imports)
    report["problems"] = problems(report)
    print(json.dumps(report, ensure_ascii=False, indent=1) if args.json else text_of(report))
    return 1 if report["problems"] else 0


def versions() -> dict[str, str]:
    """Return the versions of Python and the packages that jmarl is built on."""
    packages = {name: version_of(name) or "not installed" for name in PACKAGES}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}


def devices() -> dict[str, Any]:
    """Return the devices of JAX, on each of which something is computed."""
    try:
        import jax

        names = []
        for device in jax.devices():
            x = jax.device_put(2.0, device)
            if float(x * x) != 4:
                return {"error": f"{device} computes 2 * 2 = {float(x * x)}", "names": names}
            names.append(f"{device.platform} {device.id}: {device.device_kind}")
        return {"error": "", "names": names}
    except Exception as error:  # all that can go wrong is reported
        return {"error": one_line(error), "names": []}


def sandbox() -> dict[str, Any]:
    """Return the level at which programs that models write are confined, and why not at a higher one."""
    from jmarl.sandbox import Sandbox, SandboxUnavailable

    try:
        with Sandbox() as box:
            return {"error": "", "level": box.level, "reasons": box.reasons}
    except SandboxUnavailable as error:
        return {"error": one_line(error), "level": "none", "reasons": {}}


def algorithms() -> dict[str, str]:
    """Return what each algorithm learns from. Every row of the table is resolved."""
    from jmarl.algorithms import ALGORITHMS, resolve
    from jmarl.config import TrainConfig

    rows = {}
    for name, row in ALGORITHMS.items():
        try:
            resolve(TrainConfig.of(algorithm=name))
            rows[name] = row.data
        except Exception as error:
            rows[name] = f"error: {one_line(error)}"
    return rows


def environments(has_sandbox: bool) -> dict[str, dict[str, Any]]:
    """Return the roles of each environment, or why it cannot be made."""
    from jmarl.envs import ENVIRONMENTS, OTHER_NAMES

    names = [*ENVIRONMENTS, *(name for name, cls in OTHER_NAMES.items() if cls not in ENVIRONMENTS.values())]
    return {name: environment(name, has_sandbox) for name in sorted(names)}


def environment(name: str, has_sandbox: bool) -> dict[str, Any]:
    """Return the roles of an environment and its longest episode, or why it cannot be made or reset."""
    import numpy as np

    from jmarl.cli.teams.match import built
    from jmarl.sandbox import SandboxUnavailable

    try:
        env = built(name, {})[0]
        env.reset(env.tasks("eval", 1, 0), np.random.default_rng(0))
        return {"error": "", "roles": list(env.roles), "max_turns": env.max_turns}
    except SandboxUnavailable as error:
        return {"error": one_line(error) if has_sandbox else "", "missing": "needs the sandbox", "roles": []}
    except FileNotFoundError as error:  # its data are an extra, as an optional package is
        return {"error": "", "missing": one_line(error), "roles": []}
    except Exception as error:
        return {"error": one_line(error), "roles": []}


def start_imports() -> dict[str, subprocess.Popen]:
    """Start to import the optional packages that are installed, each in a process of its own."""
    return {
        package: subprocess.Popen(
            [sys.executable, "-c", f"import {module}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        for package, (module, _) in OPTIONAL.items()
        if version_of(package)
    }


def finish_imports(processes: dict[str, subprocess.Popen]) -> dict[str, dict[str, str]]:
    """Return for each optional package its version and why it cannot be imported."""
    result = {}
    for package, (_, purpose) in OPTIONAL.items():
        entry = {"version": version_of(package), "for": purpose, "error": ""}
        if package in processes:
            errors = processes[package].communicate()[1]
            if processes[package].returncode:
                entry["error"] = (errors.strip().splitlines() or [f"exit code {processes[package].returncode}"])[-1]
        result[package] = entry
    return result


def problems(report: dict[str, Any]) -> list[str]:
    """Return what is installed and does not work."""
    lines = [f"devices: {report['devices']['error']}"] if report["devices"]["error"] else []
    lines += [f"algorithm {name}: {text}" for name, text in report["algorithms"].items() if text.startswith("error")]
    lines += [f"environment {name}: {x['error']}" for name, x in report["environments"].items() if x["error"]]
    lines += [f"package {name}: {x['error']}" for name, x in report["optional"].items() if x["error"]]
    lines += [f"package {name} is not installed" for name, x in report["versions"].items() if x == "not installed"]
    return lines


def text_of(report: dict[str, Any]) -> str:
    """Return a report as text."""
    lines = ["versions", *(f"  {name:<18}{x}" for name, x in report["versions"].items())]
    lines += ["devices", *(f"  {name}" for name in report["devices"]["names"])]
    box = report["sandbox"]
    lines += [f"sandbox (programs that models write): {LEVELS[box['level']]}" + (f", {box['error']}" if box["error"] else "")]
    lines += [f"  not {level}: {one_line(reason)}" for level, reason in box["reasons"].items()]
    rows = report["algorithms"]
    for kind in dict.fromkeys(rows.values()):
        names = [name for name, x in rows.items() if x == kind]
        lines += [f"algorithms on {kind}: {', '.join(names)}"]
    lines += ["environments"]
    for name, x in report["environments"].items():
        text = (
            x.get("missing") or f"{', '.join(x['roles'])}; at most {plural(x['max_turns'], 'turn')}"
            if not x["error"]
            else "broken"
        )
        lines.append(f"  {name:<18}{text}")
    lines += ["optional packages"]
    lines += [f"  {name:<18}{x['version'] or 'not installed'} ({x['for']})" for name, x in report["optional"].items()]
    return "\n".join([*lines, *(f"does not work: {line}" for line in report["problems"])])


def one_line(error: object) -> str:
    """Return an error or a text as one line."""
    return " ".join(str(error).split()) or type(error).__name__
