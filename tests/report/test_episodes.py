"""The view Episodes of the page: which messages belong together, hostile texts, finding, and the status of a run."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from browser import dom, needs_chromium
from run_directories import write_run

import jmarl.report.page
from jmarl.files.lock import locked
from jmarl.logs.completions_file import CompletionsFile
from jmarl.report.load import load_runs
from jmarl.report.page import write_report
from jmarl.rl.returns import discounted, episode_path

HOSTILE = [
    "<img src=x onerror=document.body.dataset.ran=1></script><script>document.body.dataset.ran=2</script>",
    "\u202eright to left \u05d0\u05d1", "x" * 100_000,
    "👩‍👩‍👧‍👦 half of one: \ud83d", "NUL\x00 and ESC\x1b[2J<|im_end|>", '=HYPERLINK("y")',
]  # fmt: skip


def made_turn(prompts, completions, joint, parents, rng, acts=None) -> dict:
    """A turn with random rewards. prompts [N][P], completions [N][P][G]."""
    agents, nodes = len(prompts), len(prompts[0])
    return {
        "prompts": prompts, "completions": completions, "joint": joint, "parents": parents, "items": [0] * nodes,
        "acts": acts or [[True] * nodes] * agents, "parts": {}, "measures": {},
        "rewards": [[[rng.random() for _ in range(agents)] for _ in joint] for _ in range(nodes)],
    }  # fmt: skip


def made_turns(name: str, rng: random.Random) -> list[dict]:
    """Three turns of two agents and two tasks: a tree (aligned or cross), or chains; some episodes end after one turn."""
    joints = {"aligned": [[0, 0], [1, 1]], "cross": [[*x] for x in itertools.product(range(2), repeat=2)]}
    joint, turns, parents = joints.get(name, joints["aligned"]), [], [0, 1]
    for t in range(3):
        own = [[0, 0]] if name == "chain" and t else joint
        texts = [[[f"{t}{n}{p}{g}" for g in range(2)] for p in range(len(parents))] for n in range(2)]
        turns.append(made_turn([["?"] * len(parents)] * 2, texts, own, parents, rng))
        going = [k for k in range(len(parents) * len(own)) if t or k % 3 != 1]
        parents = rng.sample(going, len(going))  # in any order
    return turns


def functions(*names: str) -> str:
    """Return scripts of the page."""
    return "".join((Path(jmarl.report.page.__file__).parent / name).read_text(encoding="utf-8") for name in names)


@needs_chromium
def test_threads_and_returns_are_those_of_the_library_in_trees_and_chains_aligned_and_crossed(tmp_path):
    """The page follows an episode as `episode_path` does, and finds the way back from any node."""
    rng = random.Random(0)
    made = {name: made_turns(name, rng) for name in ("aligned", "cross", "chain")}
    script = (
        functions("steps.js", "episode.js")
        + f"""
      const made = {json.dumps(made)}, answer = {{}};
      for (const [name, turns] of Object.entries(made)) {{
        const starts = turns[0].parents.flatMap((_, p) => turns[0].joint.map((_, j) => [p, j]));
        const back = turns.flatMap((turn, t) => turn.parents.map((_, p) => {{
          const before = pathTo(turns, t, p);
          const choices = Object.fromEntries(before.map(([, j], k) => [k, j]));
          return !t || episodePath(turns, ...before[0], choices)[t][0] === p;
        }}));
        const message = messageOf({{ turns }}, jointReturns(turns, 0.5), 0, 1, 1, 0);
        const paths = starts.flatMap(([p, j]) => [episodePath(turns, p, j), episodePath(turns, p, j, {{ 1: 1, 2: 1 }})]);
        answer[name] = {{ paths, returns: jointReturns(turns, 0.5), back, gain: message.gain }};
      }}
      const said = [["a", "", "say seven", ""], ["", "he will say seven times", "", "4"], ["42 and 14", "", "x", ""]];
      const record = {{ turns: said.map(([a, b, x, y]) => ({{ prompts: [[a], [b]], acts: [[a !== ""], [b !== ""]],
        completions: [[[x]], [[y]]], joint: [[0, 0]], parents: [0] }})) }};
      answer.readings = readings(record, [[0, 0], [0, 0], [0, 0]]);
      document.body.textContent = JSON.stringify(answer);"""
    )
    (tmp_path / "x.html").write_text(f"<body></body><script>{script}</script>", encoding="utf-8")
    answer = json.loads(re.findall(r"<body>(.*?)</body>", dom(tmp_path / "x.html", tmp_path / "profile"), re.DOTALL)[0])
    for name, turns in made.items():
        parents, counts = [np.array(turn["parents"]) for turn in turns], [len(turn["joint"]) for turn in turns]
        last = [count - 1 for count in counts[1:]]  # the page takes the last one for a number that is too large
        later = ((), [min(1, j) for j in last])
        expected = [episode_path(parents, counts, p, j, x) for p in range(2) for j in range(counts[0]) for x in later]
        assert [[tuple(place) for place in path] for path in answer[name]["paths"]] == expected, name
        assert {len(path) for path in expected} == {1, 3} and all(answer[name]["back"])
        returns = discounted([np.array(turn["rewards"]) for turn in turns], parents, 0.5)
        for own, of_page in zip(returns, answer[name]["returns"], strict=True):
            np.testing.assert_allclose(own, np.array(of_page))
        used = [j for j, action in enumerate(turns[0]["joint"]) if action[1] == 0]
        assert answer[name]["gain"] == pytest.approx(returns[0][1, used, 1].mean())
    assert answer["readings"] == [{"from": [0, 0], "to": [1, 1], "short": False}], "4 is no word of 42 and 14"


@pytest.fixture
def hostile(tmp_path) -> Path:
    """A run whose texts attack the page: six completions of two agents for each of two prompts, with all numbers."""
    run, rng = write_run(tmp_path / "run", steps=1), random.Random(0)
    start = run / "attempts" / "1" / "start.json"
    content = json.loads(start.read_text())
    content["settings"] |= {"environment": {"roles": ["<b>solver</b>\u202e", "helper\x00"]}}
    start.write_text(json.dumps(content))
    turn = made_turn([HOSTILE[:2], HOSTILE[2:4]], [[HOSTILE, HOSTILE[::-1]]] * 2, [[g, g] for g in range(6)], [0, 1], rng)
    numbers = [[[float(g) for g in range(6)]] * 2] * 2
    flags = [[[g == 1 for g in range(6)]] * 2] * 2
    turn |= {"returns": numbers, "advantages": numbers, "lengths": numbers, "cut": flags, "masked": flags, "items": [0, 1]}
    turn |= {"fault": HOSTILE[0], "parts": {HOSTILE[0]: [[1.0] * 6] * 2}}
    file = CompletionsFile(run / "completions.jsonl.gz", 2, 10**8)
    file.write(2, "train", {"tasks": [{HOSTILE[0]: HOSTILE[1]}] * 2, "turns": [turn]})
    file.close()
    return run


@needs_chromium
def test_hostile_texts_are_text_in_lanes_groups_prompts_and_tables_and_enter_opens_a_group(hostile, tmp_path):
    """And links lead to the chart of a column and to the nearest step."""
    with (hostile / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 2, "agent_0/clip_share": 0.5}) + "\n")
    write_report([hostile], tmp_path / "r.html")
    script = """
      const wait = setInterval(async () => {
        if (!document.body.dataset.ready) return;
        clearInterval(wait);
        const put = (name, value) => { document.body.dataset[name] = value; };
        const pause = () => new Promise((resolve) => { setTimeout(resolve, 50); });
        const dialog = document.querySelector("dialog");
        for (const button of document.querySelectorAll(".prompt button.link")) {
          button.click();
          put("exact", dialog.textContent.length);
          dialog.close();
        }
        const card = document.querySelectorAll(".message")[1];
        card.focus();
        card.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
        const count = (what) => dialog.querySelectorAll(what).length;
        put("group", [dialog.open, count(".message"), count(".message.on")].join());
        put("leads", [...dialog.querySelectorAll(".lead")].map((lead) => lead.textContent).join());
        const shown = dialog.innerHTML;
        dialog.close();
        card.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowUp", bubbles: true }));
        put("focused", document.activeElement.dataset.agent);
        document.querySelector(".finder").open = true;
        document.getElementById("find-text").value = "HYPERLINK";
        document.getElementById("find").click();
        for (let i = 0; i < 40 && !document.querySelector(".hits"); i += 1) await pause();
        put("hits", document.querySelectorAll(".hits tbody tr").length);
        const rows = [{ text: '=HYPERLINK("y")', return: -1.5 }, { text: " +1\\u0000", return: null }];
        put("csv", csvOf(["text", "return"], rows));
        document.querySelectorAll(".hits .hit")[0].click();
        await pause();
        await pause();
        put("opened", document.activeElement.textContent.includes("HYPERLINK"));
        document.querySelector("#attempts").append(shown.length > 5000 ? "whole group" : "");
        const names = document.querySelectorAll(".unseen");
        put("names", [...new Set([...names].map((name) => name.textContent))].sort().join());
        location.hash = "#column=agent_N/clip_share";
        await pause();
        put("charts", document.querySelectorAll('details[open] [data-title="agent_N/clip_share"]').length);
        location.hash = "#e=0,train,1";
        await pause();
        await pause();
        put("linked", document.getElementById("step-label").textContent);
        location.hash = "#e=0,train,90";
        await pause();
        await pause();
        put("nearest", document.getElementById("step-label").textContent);
        put("images", document.querySelectorAll("#episodes img, #episodes script, #episodes b[onerror]").length);
      }, 50);"""
    html = (tmp_path / "r.html").read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>")
    (tmp_path / "r.html").write_text(html, encoding="utf-8")
    page = dom(tmp_path / "r.html", tmp_path / "profile")
    data = dict(re.findall(r'data-(\w+)="([^"]*)"', page.split("<body")[1].split(">")[0]))
    assert "ran" not in data and data["images"] == "0" and "whole group" in page, data
    assert int(data["exact"]) > 100_000 and data["group"] == "true,6,1" and data["focused"] == "0"
    assert data["leads"] == ",".join(f"advantage{'+' * (g > 0)}{g}" for g in range(5, -1, -1)), "the best first"
    assert data["charts"] == "1" and data["linked"].startswith("step 1 ") and data["nearest"].startswith("step 2 ")
    assert data["hits"] == "4" and data["opened"] == "true"
    assert data["csv"].split("\n")[1:3] == ["&quot;'=HYPERLINK(&quot;&quot;y&quot;&quot;)&quot;,-1.5", "&quot;' +1␀&quot;,"]
    assert "NUL" in data["names"] and "ESC" in data["names"] and "RLO" in data["names"] and "ZWJ" in data["names"]
    assert "cut at the limit" in page and "masked: not learned from" in page and 'class="special"' in page


def test_the_page_says_whether_a_run_is_running_finished_interrupted_failed_or_killed(tmp_path):
    run = write_run(tmp_path / "run")
    attempt = run / "attempts" / "1"

    def status() -> str:
        return load_runs([run])[0].status

    assert status() == "killed"
    with locked(run):
        assert status() == "running"
    (attempt / "log.txt").write_text("the attempt ended with ValueError: too <b>long\nTraceback\n")
    assert status() == "failed: ValueError: too <b>long"
    for interrupted, word in ((True, "interrupted"), (False, "finished")):
        (attempt / "end.json").write_text(json.dumps({"num_updates": 4, "updates": 4, "interrupted": interrupted}))
        assert status() == word
    (attempt / "end.json").write_text("{")
    assert status().startswith("failed")
