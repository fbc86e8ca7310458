"""Show where the seconds go until the first update of three commands, each in a new process.

Claim: on a second start nothing but imports, tracing and the models' own work is left before the first update.
Command: python -m experiments.bench.first_minutes            (flags: --help; --root . OTHER compares two checkouts)
`readme` is the first script of README.md, `story` is `python -m experiments.story_length`, and `tiny` is `jmarl train` with two
agents of random weights (two layers of width 64). A first start has empty caches: SmolLM2 is converted from its GGUF file, and
all programs are compiled. A second start finds what the first one has kept.
A thread of the process reads the stack of the main thread every few milliseconds and counts the time for one part: that of the
innermost function that `PARTS` names. So parts add up to the time that a user waits. What threads beside it compile is counted
by the events of `jax.monitoring`: compiling takes their processor time while the main thread traces. Prints two tables, and
writes JSON with --out; `functions` there has the functions of jmarl in which the seconds of each part were.
Expected: see experiments/README.md. Time: 4 minutes on two cores; --quick (tiny alone) 30 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROCESS = "JMARL_FIRST_MINUTES_PROCESS"  # environment variable: the process that is watched, which may call exec
PERIOD = 0.004  # seconds between two looks at the main thread
PACKAGES = re.compile(r"site-packages/([^/.]+)")
NO_PART = ""  # the functions that call this one decide, and those of JAX no longer count

PARTS: dict[str, tuple[str, ...]] = {  # part -> files of it, or file:function
    "imports": ("<frozen importlib._bootstrap>",),
    "convert GGUF": ("hub/agents.py:_smollm2_directory",),
    "chat template": ("hub/agents.py:ends",),
    "tokenizer": ("hub/agents.py:load_tokenizer", "hub/special_tokens.py:tokenizer_for"),
    "read weights": ("models/stack.py:stack_params", "models/stack.py:share_params"),
    "kept programs": ("jax/_src/compilation_cache.py", "_src/compiler.py:_cache_read", "_src/compiler.py:_cache_write"),
    "XLA": ("jax/_src/compiler.py", "runs/precompile.py:compile_all"),
    NO_PART: ("interpreters/pxla.py:__call__",),  # a compiled program runs
    "lower": ("interpreters/mlir.py", "pxla.py:lower_sharding_computation", "pxla.py:_cached_lowering_to_hlo"),
    "trace": ("interpreters/partial_eval.py", "jax/_src/pjit.py", "jax/_src/linear_util.py"),
    "start JAX": ("jax/_src/xla_bridge.py",),
    "check": ("runs/kinds/rollouts.py:check", "runs/run.py:identity_of"),
    "open run": ("files/run_directory.py:open_run", "files/config_file.py:record_choices"),
    "evaluate": ("runs/loop.py:evaluate_if_due",),
    "sample": ("rollouts.py:play_episodes",),
    "update": ("rollout/make_batches.py:rollout_batches", "learning/team_update.py:update_team"),
}
IN_JAX = ("lower", "trace", "XLA", "kept programs")
OF_PLACE = {place: part for part, places in PARTS.items() for place in places}


# --- in the process that is watched ------------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Counts the time of the main thread by parts, until the first update has ended. Then it writes what it counted, and ends
    the process."""

    def __init__(self, root: str, report: str) -> None:
        super().__init__(daemon=True)
        self.root, self.report, self.main = root, Path(report), threading.main_thread().ident or 0
        self.started = process_start()
        self.seconds = defaultdict[str, float](float, {"start Python": time.time() - self.started})
        self.functions = defaultdict[str, defaultdict[str, float]](lambda: defaultdict(float))
        self.events = defaultdict[str, float](float)
        self.updated = self.listens = False

    def run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(PERIOD)
            frames = list(stack_of(sys._current_frames().get(self.main)))
            now = time.monotonic()
            places = [f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_code.co_name}" for frame in frames]
            part = part_of(frames)
            part = "update" if part == "sample" and self.updated else part  # the next sampling waits for it
            self.seconds[part] += now - before
            self.functions[part][place_of(part, frames, self.root)] += now - before
            before = now
            self.listen()
            self.updated |= any(place == "learning/team_update.py:update_team" for place in places)
            if self.updated and "rollout/play.py:play_turn" in places and "sampling/generate.py:sample_team" in places:
                self.end()

    def listen(self) -> None:
        """Count the events of JAX as soon as it is imported."""
        monitoring = getattr(sys.modules.get("jax"), "monitoring", None)
        if self.listens or monitoring is None:
            return
        self.listens = True
        monitoring.register_event_duration_secs_listener(self.count)

    def count(self, event: str, seconds: float, **details: Any) -> None:
        """Add up an event of JAX."""
        del details
        self.events[event.rpartition("/")[2]] += seconds
        self.events[f"number of {event.rpartition('/')[2]}"] += 1

    def end(self) -> None:
        functions = {part: dict(sorted(x.items(), key=lambda y: -y[1])[:12]) for part, x in self.functions.items()}
        content = {"total": time.time() - self.started, "seconds": self.seconds, "events": self.events, "functions": functions}
        self.report.write_text(json.dumps(content), encoding="utf-8")
        os._exit(0)


def process_start() -> float:
    """Return the time at which this process began, before any exec."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def stack_of(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of a thread, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def part_of(frames: list[FrameType]) -> str:
    """Return the part that a stack counts for."""
    runs = False
    for frame in frames:
        file = "/".join(frame.f_code.co_filename.split("/")[-3:])
        tails = [file, file.partition("/")[2], file.rpartition("/")[2]]
        places = [*tails, *(f"{tail}:{frame.f_code.co_name}" for tail in tails)]
        part = next((OF_PLACE[place] for place in places if place in OF_PLACE), None)
        runs |= part == NO_PART
        if part and not (runs and part in IN_JAX):
            return part
    return "other"


def place_of(part: str, frames: list[FrameType], root: str) -> str:
    """Return where a stack is: of imports the package that jmarl imports, else the innermost function of jmarl."""
    own = [frame for frame in frames if f"{root}/" in frame.f_code.co_filename]
    if part != "imports":
        return own[0].f_code.co_filename.removeprefix(f"{root}/") + f":{own[0].f_code.co_name}" if own else "-"
    inner = frames[: frames.index(own[0])] if own else frames
    packages = [name[1] for frame in reversed(inner) if (name := PACKAGES.search(frame.f_code.co_filename))]
    return packages[0] if packages else "jmarl and Python"


def watch(root: str, report: str) -> None:
    """Watch this process, but none that it starts. Called by `sitecustomize`, before anything else runs.

    root: of the checkout. report: the file that is written."""
    if os.environ.setdefault(PROCESS, str(os.getpid())) == str(os.getpid()):
        Watch(root, report).start()


# --- in the process of the benchmark -----------------------------------------------------------------------------------------


def readme(directory: Path) -> list[str]:
    """Return the command of the first script of README.md, which is written to a directory."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (directory / "script.py").write_text(text.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    return ["script.py"]


def story(directory: Path) -> list[str]:
    """Return the command of the experiment."""
    return ["-m", "experiments.story_length", "--output-dir", str(directory / "run")]


def tiny(directory: Path) -> list[str]:
    """Return the command that trains a model of random weights, which a process writes to a directory."""
    write = "from experiments.bench.first_minutes import write_tiny; import sys; write_tiny(sys.argv[1])"
    subprocess.run([sys.executable, "-c", write, str(directory / "model")], check=True, cwd=ROOT)
    lines = ("models: [model, model]", "environment: story", "held_out: 4", "algorithm: magrpo", "num_updates: 4",
             "num_generations: 4", "max_new_tokens: 16", "chat: false")  # fmt: skip
    (directory / "tiny.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["-m", "jmarl", "train", "--config", "tiny.yaml", "--output", "run"]


def write_tiny(directory: str) -> None:
    """Write a model of two layers with the tokenizer of SmolLM2."""
    import jax

    from jmarl.models.config import ModelConfig
    from jmarl.models.decoder import init_params
    from jmarl.models.hub.agents import open_agent, save_pretrained

    model = ModelConfig("llama", 49152, 64, 128, 2, 4, 2, 16, 512)
    save_pretrained(directory, model, jax.device_get(init_params(model, jax.random.key(0))), open_agent().tokenizer)


COMMANDS: dict[str, Callable[[Path], list[str]]] = {"readme": readme, "story": story, "tiny": tiny}


def start(command: list[str], directory: Path, root: Path, limit: float) -> dict[str, Any]:
    """Run a command until its first update, in a directory that keeps its caches, and return what was counted.

    root: of the checkout that is imported."""
    (hook := directory / "hook").mkdir(exist_ok=True)
    (report := directory / "report.json").unlink(missing_ok=True)
    load = f"import importlib.util as u; s = u.spec_from_file_location('first_minutes', {__file__!r})"
    run = f"m = u.module_from_spec(s); s.loader.exec_module(m); m.watch({str(root)!r}, {str(report)!r})"
    (hook / "sitecustomize.py").write_text(f"{load}; {run}\n", encoding="utf-8")
    shutil.rmtree(directory / "run", ignore_errors=True)
    paths = [str(hook), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    cache = {"XDG_CACHE_HOME": str(directory / "cache"), "JMARL_CACHE": str(directory / "cache" / "jmarl")}
    left_out = ("JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE", PROCESS)
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PYTHONPATH": os.pathsep.join(paths), **cache}
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, env=env, capture_output=True, encoding="utf-8", timeout=limit
    )
    if not report.is_file():
        raise RuntimeError(f"{command} ended with {done.returncode} before its first update:\n{done.stdout}{done.stderr}")
    return json.loads(report.read_text(encoding="utf-8"))


def table(starts: dict[str, dict[str, Any]]) -> str:
    """Return a table with a column for each start and a row for each part."""
    names = [name for name in ("start Python", *PARTS, "other") if name != NO_PART]
    rows = [["part", *starts], ["---"] * (len(starts) + 1)]
    rows += [[part, *(f"{one['seconds'].get(part, 0):.1f}" for one in starts.values())] for part in names]
    rows += [["until the first update", *(f"{one['total']:.1f}" for one in starts.values())]]
    for name, event in (("XLA, all threads", "backend_compile_duration"), ("of it read", "cache_retrieval_time_sec")):
        rows.append([name, *(f"{one['events'].get(event, 0):.1f}" for one in starts.values())])
    rows.append(["programs", *(f"{one['events'].get('number of backend_compile_duration', 0):.0f}" for one in starts.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", nargs="+", choices=[*COMMANDS], default=[*COMMANDS], help="which to start; default: all")
    parser.add_argument("--starts", type=int, default=2, metavar="N", help="of each command, the first with empty caches")
    parser.add_argument(
        "--root", type=Path, nargs="+", default=[ROOT], metavar="DIR", help="checkouts to start; default: this one"
    )
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds after which a start is given up")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny alone")
    options = parser.parse_args()
    starts: dict[str, dict[str, Any]] = {}
    for name in ["tiny"] if options.quick else options.commands:
        for root in options.root:
            with tempfile.TemporaryDirectory() as place:
                command = COMMANDS[name](Path(place))
                for number in range(options.starts):
                    title = f"{name} {number + 1}" + f", {root.resolve().name}" * (len(options.root) > 1)
                    starts[title] = start(command, Path(place), root.resolve(), options.limit)
    print(table(starts), flush=True)
    if options.out:
        options.out.write_text(json.dumps(starts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
