"""What the pages show is run as it stands, from an empty folder."""

from pathlib import Path

import pytest

from tests.documentation.markdown import ROOT, Story, num_marks, pages, stories
from tests.warm.shell import Run

TOLD = [story for page in pages() for story in stories(page, page.read_text(encoding="utf-8"))]
# Trainers of other libraries only define what tests/verify runs.
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if not path.name.startswith("verify_")]
# Examples that go on where another one ended, in its folder.
AFTER = {"three_lines.py": "two_lines.py"}


def tell(story: Story, folder: Path, scripts: Path, run: Run) -> str:
    """Run the blocks of a story in `folder`, which holds nothing of ours; their output, one after the other."""
    output = ""
    for block in story.blocks:
        script = scripts / f"block_{block.line}.{'py' if block.language == 'python' else 'sh'}"
        script.write_text(block.code, encoding="utf-8")
        command = ["python"] if block.language == "python" else ["bash", "-euo", "pipefail"]
        output += run([*command, str(script)], folder)
    return output


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("may_shorten")
@pytest.mark.parametrize(
    "story", [pytest.param(story, id=story.name, marks=[pytest.mark.slow] * story.is_slow) for story in TOLD]
)
def test_the_page_runs_as_it_stands(story: Story, empty: Path, tmp_path: Path, run: Run) -> None:
    tell(story, empty, tmp_path, run)


@pytest.mark.slow
@pytest.mark.usefixtures("may_shorten")
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.name not in AFTER], ids=lambda path: path.name)
def test_the_example_runs_in_an_empty_folder(example: Path, empty: Path, run: Run) -> None:
    run(["python", str(example)], empty)
    for later, earlier in AFTER.items():
        if earlier == example.name:
            assert "generated_text" in run(["python", str(example.with_name(later))], empty)


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.name)
def test_every_mark_belongs_to_a_block(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert num_marks(text) == sum(len(story.blocks) for story in stories(page, text))


def test_the_readme_shows_code_within_twenty_lines_and_runs_it() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert "```python" in lines[:20]
    assert any(story.page.name == "README.md" for story in TOLD)


MARKED = "<!-- test -->\n```bash\n{}\n```\n"
CONTINUED = "<!-- test: continued, slow -->\n```python\n{}\n```\n"


@pytest.mark.slow
def test_blocks_of_one_story_share_a_folder(empty: Path, tmp_path: Path, run: Run) -> None:
    text = MARKED.format("echo told > note") + "Then:\n\n" + CONTINUED.format("print(open('note').read())")
    (story,) = stories(Path("page.md"), text)
    assert story.is_slow
    assert tell(story, empty, tmp_path, run) == "told\n\n"


def test_a_new_story_begins_with_an_empty_folder() -> None:
    assert len(list(stories(Path("page.md"), MARKED.format("a") + "\n" + MARKED.format("b")))) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["false", "no_such_command", "false | cat", "echo $unset_name"])
def test_a_block_that_fails_is_seen(fault: str, empty: Path, tmp_path: Path, run: Run) -> None:
    (story,) = stories(Path("page.md"), MARKED.format(f"{fault}\necho done"))
    with pytest.raises(AssertionError, match="ended with"):
        tell(story, empty, tmp_path, run)


def test_a_mark_with_an_unknown_word_is_refused() -> None:
    with pytest.raises(AssertionError, match="knows no fast"):
        list(stories(Path("page.md"), "<!-- test: fast -->\n```bash\ntrue\n```\n"))


def test_a_mark_that_lost_its_block_is_counted() -> None:
    text = "<!-- test -->\n\n```bash\ntrue\n```\n"
    assert num_marks(text) == 1
    assert not list(stories(Path("page.md"), text))


def test_the_command_on_the_path_is_that_of_the_checkout(empty: Path, run: Run) -> None:
    assert str(ROOT) in run(["python", "-c", "import kitforge; print(kitforge.__file__)"], empty)
