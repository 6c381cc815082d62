"""Models that are named by their id in the hub: from a cache as huggingface_hub lays it out, and
from a server that answers as the hub does."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mtpkit.checkpoint import hub as hub_module
from mtpkit.checkpoint import save_hf_model
from mtpkit.checkpoint.hub import find_model
from mtpkit.cli import acceptance, bench, chat, convert, data, generate, run, serve, speedup
from mtpkit.engine import LLM
from mtpkit.errors import UserError
from tests.engine.tiny import greedy, make_llm, tiny_model

COMMIT = "0123456789abcdef" * 2 + "01234567"
OLDER = COMMIT[::-1]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_hf_model(tiny_model(), directory)
    return directory


@pytest.fixture
def cache(tmp_path, model_dir):
    """A cache with the model `org/tiny` at its main branch, and another model at an older commit
    and tag."""
    place = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(model_dir, place / "snapshots" / COMMIT)
    (place / "snapshots" / OLDER).mkdir()
    (place / "snapshots" / OLDER / "config.json").write_text('{"model_type": "older"}')
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    (place / "refs" / "v1").write_text(OLDER)
    return tmp_path / "hub"


def test_a_model_in_the_cache_decodes_as_its_directory(cache, model_dir):
    settings = dict(dtype="float32", device="cpu")
    want = make_llm(model_dir, 2, **settings).generate([[1, 2]], greedy())[0].outputs[0].token_ids
    llm = make_llm("org/tiny", 2, download_dir=cache, **settings)
    assert llm.generate([[1, 2]], greedy())[0].outputs[0].token_ids == want


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache):
    place = cache / "models--org--tiny" / "snapshots"
    for revision, commit in ((None, COMMIT), ("main", COMMIT), ("v1", OLDER), (OLDER, OLDER)):
        assert find_model("org/tiny", revision, cache) == place / commit
    with pytest.raises(UserError, match=r"^org/tiny is no directory here, and the .* hub cannot"):
        find_model("org/tiny", "v2", cache)


def test_a_directory_wins_and_other_paths_are_no_ids(cache, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert str(find_model("org/tiny", download_dir=cache)) == "org/tiny" and not caplog.text
    find_model("org/tiny", "v1", cache)
    assert "revision v1 has no effect: org/tiny is a directory" in caplog.text
    for path in ("tiny", "./org/no", "a/b/c", "/org/tiny", "../org", "org/", "", "org/né"):
        assert find_model(path, download_dir=cache) == type(tmp_path)(path)
    with pytest.raises(UserError, match="nowhere: no such model directory"):
        LLM("nowhere")


def test_what_is_not_in_the_cache_is_one_line_with_the_remedy(cache):
    with pytest.raises(UserError) as caught:
        LLM("org/other", download_dir=cache)
    said = str(caught.value)
    assert said.startswith(
        "org/other is no directory here, and the Hugging Face hub cannot give it"
    )
    assert "outgoing traffic has been disabled" in said and "\n" not in said and len(said) < 380
    assert said.endswith("or run `hf download org/other` where there is a network")


def test_a_full_disk_is_no_mistake_of_the_user(monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(OSError, match="No space left"):
        find_model("org/tiny")


DOORS = {
    "generate": (generate.app, ["--model", "ID", "text"]),
    "chat": (chat.app, ["--model", "ID"]),
    "serve": (serve.app, ["ID", "--port", "0"]),
    "speedup": (speedup.app, ["--model", "ID", "--prompts", "FILE", "--output", "OUT"]),
    "acceptance": (acceptance.app, ["--model", "ID", "--data", "FILE"]),
    "regenerate": (
        data.app,
        ["regenerate", "--model", "ID", "--data", "FILE", "--output", "OUT.jsonl"],
    ),
    "bench decode": (bench.app, ["decode", "--model", "ID"]),
    "bench load": (bench.app, ["load", "--model", "ID"]),
    "convert import": (convert.app, ["import", "ID", "OUT"]),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_front_door_takes_an_id(door, cache, tmp_path, capsys):
    """The model at tag v1, which is none, is refused by its path in the cache."""
    (tmp_path / "file.txt").write_text("the cat\n")
    app, options = DOORS[door]
    places = {
        "ID": "org/tiny",
        "FILE": tmp_path / "file.txt",
        "OUT": tmp_path / "out",
        "OUT.jsonl": tmp_path / "out.jsonl",
    }
    words = [str(places.get(word, word)) for word in options]
    with pytest.raises(SystemExit) as stop:
        run(app, [*words, "--download-dir", str(cache), "--revision", "v1"])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert f"models--org--tiny/snapshots/{OLDER}" in line
    assert "'older'" in line or "has no tokenizer" in line
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for one model, `org/tiny`."""

    files: dict[str, bytes]
    asked: Counter

    def do_GET(self):
        path = self.path.partition("?")[0]
        name = path.partition(f"/org/tiny/resolve/{COMMIT}/")[2]
        self.asked[self.command, name or path] += 1
        digests = {one: hashlib.sha1(body).hexdigest() for one, body in self.files.items()}
        if name in self.files:
            self.send(self.files[name], {"ETag": f'"{digests[name]}"', "X-Repo-Commit": COMMIT})
        elif path.startswith("/api/models/org/tiny/tree"):
            sizes = {one: len(body) for one, body in self.files.items()}
            self.send_json(
                [
                    {"type": "file", "path": one, "size": sizes[one], "oid": digests[one]}
                    for one in self.files
                ]
            )
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": one} for one in self.files]
            self.send_json({"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        else:
            self.send(b"", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def send_json(self, content):
        self.send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, body, headers, status=200):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(model_dir):
    """The requests so far, and the address of a server with the model and files that are not
    needed."""
    Hub.files = {path.name: path.read_bytes() for path in model_dir.iterdir()}
    Hub.files |= {
        "pytorch_model.bin": b"pickle",
        "original/consolidated.00.pth": b"pickle",
        "original/consolidated.safetensors": b"twice",
        "README.md": b"words",
        "chat_template.jinja": b"{{ messages }}",
        "merges.txt": b"a b",
    }
    Hub.asked = Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Hub.asked, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


FOUND = f"import runpy; find_model = runpy.run_path({hub_module.__file__!r})['find_model']"


def start(code, endpoint, home, offline=False):
    """A process of its own: huggingface_hub reads the environment when it is imported. The package
    is not, which would import torch."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": f"{offline:d}"}
    return subprocess.Popen(
        [sys.executable, "-c", f"{FOUND}\n{code}"],
        env=environment | {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_of_a_host_download_what_is_needed_once(hub, tmp_path, model_dir):
    asked, endpoint = hub
    both = [start("print(find_model('org/tiny'))", endpoint, tmp_path) for _ in range(2)]
    found = {process.communicate(timeout=300)[0].splitlines()[-1] for process in both}
    place = tmp_path / "hub" / "models--org--tiny" / "snapshots" / COMMIT
    assert found == {str(place)}
    own = {path.name for path in model_dir.iterdir()}
    assert {path.name for path in place.iterdir()} == own | {"chat_template.jinja", "merges.txt"}
    fetched = {name: times for (method, name), times in asked.items() if method == "GET"}
    files = {name: times for name, times in fetched.items() if not name.startswith("/api")}
    assert files == dict.fromkeys(own | {"chat_template.jinja", "merges.txt"}, 1)
    # Without a network the cache serves; and where a server knows of no such model, it says so.
    asked.clear()
    offline = start("print(find_model('org/tiny'))", endpoint, tmp_path, offline=True)
    assert offline.communicate(timeout=300)[0].split() == [str(place)] and not asked
    missing = start("find_model('org/other')", endpoint, tmp_path)
    last = missing.communicate(timeout=300)[1].splitlines()[-1]
    assert "org/other is no directory here" in last and "Repository Not Found" in last
