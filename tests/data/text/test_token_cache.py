"""The cache holds the corpus and nothing else, whoever builds it, however often it is killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kitforge.data import cache_folder
from kitforge.data.cache_folder import default_root
from kitforge.data.source import Source, open_source
from kitforge.data.text import token_cache, tokenize_documents
from kitforge.data.text.token_cache import TokenCache, build_token_cache
from kitforge.data.text.tokenize_documents import TokenizeJob, token_dtype
from kitforge.data.tokenizers.loading import ByteTokenizer, SentencePieceTokenizer, TokenizerConfig, make_tokenizer
from kitforge.foundation import files
from kitforge.foundation.errors import ConfigError, DataError
from tests.differential.drawn import WHOLE

TEXTS = ["one", "два", "three " * 50, "四"]


def folder_of_files(folder: Path, count: int = 6) -> Source:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        rows = [{"text": f"{number} {word} " * (7 * number + word)} for word in range(1, 30)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(folder)


def contents(cache: TokenCache) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.folder.iterdir() if not path.name.startswith(".")}


def test_documents_come_back_each_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    cache = build_token_cache(open_source(TEXTS), tokenizer, tmp_path)
    assert cache.num_documents == len(TEXTS)
    assert cache.num_tokens == len(cache.tokens) == sum(len(text.encode()) + 1 for text in TEXTS)
    for number, text in enumerate(TEXTS):
        tokens = cache.tokens[cache.offsets[number] : cache.offsets[number + 1]]
        assert tokens[-1] == tokenizer.eos_id
        assert tokenizer.decode(tokens) == text


def test_a_finished_cache_holds_three_files_and_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = build_token_cache(open_source(TEXTS), ByteTokenizer(), tmp_path)
    assert set(contents(cache)) == {"tokens.bin", "documents.npy", "cache.json"}
    monkeypatch.setattr(token_cache, "run_tokenize_jobs", None)
    again = build_token_cache(open_source(TEXTS), ByteTokenizer(), tmp_path)
    assert again.fingerprint == cache.fingerprint
    assert again.folder == cache.folder


def test_a_copy_of_the_text_has_the_same_fingerprint(tmp_path: Path) -> None:
    """At another place, fetched at another time, into another cache: what two nodes compare, and a resume."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("\n".join(TEXTS))
    os.utime(tmp_path / "other" / "text.txt", (1, 1))
    one, other = (
        build_token_cache(open_source(tmp_path / name / "text.txt"), ByteTokenizer(), tmp_path / name / "cache")
        for name in ("one", "other")
    )
    assert one.fingerprint == other.fingerprint
    assert one.folder.name != other.folder.name


def test_where_documents_end_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    end = chr(ByteTokenizer.eos_id) if ByteTokenizer.eos_id < 256 else ""
    caches = [
        build_token_cache(open_source(texts), ByteTokenizer(), tmp_path)
        for texts in (["ab", "c"], ["a", "bc"], ["ab" + end])
    ]
    assert len({cache.fingerprint for cache in caches}) == 3


def test_other_bytes_of_the_same_size_and_time_are_other_text(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the moon")
    status = path.stat()
    first = build_token_cache(open_source(path), ByteTokenizer(), tmp_path / "cache")
    path.write_text("the noon")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = build_token_cache(open_source(path), ByteTokenizer(), tmp_path / "cache")
    assert bytes(second.tokens[:8].tolist()) == b"the noon"
    assert second.fingerprint != first.fingerprint


def test_another_name_of_a_file_while_it_is_read_is_no_change(tmp_path: Path) -> None:
    """A backup that links to it changes the file's entry, and no byte."""
    path = tmp_path / "text.txt"
    path.write_text("the moon")
    source = open_source(path)
    os.link(path, tmp_path / "linked.txt")
    assert list(source.documents()) == ["the moon"]


def test_another_corpus_or_tokenizer_is_another_cache(tmp_path: Path) -> None:
    source = open_source(TEXTS * 10)
    other = make_tokenizer(TokenizerConfig(name="sentencepiece", vocab_size=280), source, tmp_path)
    caches = [build_token_cache(source, ByteTokenizer(), tmp_path), build_token_cache(source, other, tmp_path)]
    caches.append(build_token_cache(open_source(TEXTS * 9), ByteTokenizer(), tmp_path))
    assert len({cache.fingerprint for cache in caches}) == 3


@pytest.mark.parametrize(("size", "dtype"), [(258, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_tokens_take_the_smallest_type_that_holds_the_vocabulary(size: int, dtype: type) -> None:
    assert token_dtype(size) == dtype


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    source = folder_of_files(tmp_path / "corpus")
    found = [contents(build_token_cache(source, ByteTokenizer(), tmp_path / str(n), num_workers=n)) for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


def test_a_trained_tokenizer_works_in_processes(tmp_path: Path) -> None:
    source = folder_of_files(tmp_path / "corpus", 2)
    config = TokenizerConfig(name="sentencepiece", vocab_size=280)
    tokenizer = make_tokenizer(config, open_source(TEXTS * 10), tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    found = [contents(build_token_cache(source, tokenizer, tmp_path / str(n), num_workers=n)) for n in (1, 2)]
    assert found[0] == found[1]


def test_a_small_corpus_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_documents, "_run_in_processes", None)
    build_token_cache(folder_of_files(tmp_path / "corpus"), ByteTokenizer(), tmp_path)


def test_progress_counts_bytes_up_to_all_of_them(tmp_path: Path) -> None:
    source = folder_of_files(tmp_path / "corpus")
    seen: list[tuple[int, int]] = []
    build_token_cache(source, ByteTokenizer(), tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(shard.size for shard in source.shards())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


def test_shards_that_are_done_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of_files(tmp_path / "corpus")
    run, done = TokenizeJob.write, []

    def fail_at_third(job: TokenizeJob, tokenizer: ByteTokenizer) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job.path.name)
        run(job, tokenizer)

    monkeypatch.setattr(TokenizeJob, "write", fail_at_third)
    with pytest.raises(KeyboardInterrupt):
        build_token_cache(source, ByteTokenizer(), tmp_path)
    again: list[str] = []
    monkeypatch.setattr(TokenizeJob, "write", lambda job, tokenizer: (again.append(job.path.name), run(job, tokenizer)))
    build_token_cache(source, ByteTokenizer(), tmp_path)
    assert len(done) == len(again) == 3
    assert not set(done) & set(again)


# Slow enough to be killed in the middle, and known to other processes because it is no part of the script.
SLOW = """
import time
from kitforge.data.tokenizers.loading import ByteTokenizer

class SlowTokenizer:
    vocab_size, eos_id, pad_id, bos_id, eos_ids = 258, 256, 257, None, (256,)
    fingerprint = "byte"
    def encode(self, text):
        return ByteTokenizer().encode(text)
    encode_prompt = encode
    def encode_array(self, text):
        time.sleep(0.006)
        return ByteTokenizer().encode_array(text)
"""
BUILD = """
import sys
from pathlib import Path
from kitforge.data.source import open_source
from kitforge.data.text.token_cache import build_token_cache
from slow import SlowTokenizer
print("begin", flush=True)
build_token_cache(open_source(Path(sys.argv[1])), SlowTokenizer(), Path(sys.argv[2]), num_workers=int(sys.argv[3]))
print("end", flush=True)
"""


def start_build(folder: Path, root: Path, num_workers: int) -> subprocess.Popen[str]:
    (folder / "slow.py").write_text(SLOW)
    (folder / "script.py").write_text(BUILD)
    checkout = str(Path(files.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, folder / "script.py", folder / "corpus", root, str(num_workers)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([checkout, str(folder)])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    return process


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("num_workers", [1, 2] if WHOLE else [2])
def test_a_build_that_is_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, num_workers: int) -> None:
    source = folder_of_files(tmp_path / "corpus", 10)
    wanted = contents(build_token_cache(source, ByteTokenizer(), tmp_path / "wanted"))
    num_kills = 0
    for delay in (0.1, 0.3, 0.6, 1.0):
        process = start_build(tmp_path, tmp_path / "killed", num_workers)
        time.sleep(delay)
        if process.poll() is None:
            num_kills += 1
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert num_kills >= 2
    assert contents(build_token_cache(source, ByteTokenizer(), tmp_path / "killed")) == wanted


@pytest.mark.parametrize("point", ["tokens.bin", "documents.npy", "cache.json", "parts"])
def test_a_build_that_stops_at_any_of_its_last_steps_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    source = folder_of_files(tmp_path / "corpus", 3)
    wanted = contents(build_token_cache(source, ByteTokenizer(), tmp_path / "wanted"))

    class Killed(BaseException):
        pass

    def stop_at(place: Path, *arguments: object) -> None:
        if Path(place).name == point:
            raise Killed

    with monkeypatch.context() as patch:
        write, remove, replace = cache_folder.write_text, token_cache.shutil.rmtree, os.replace
        patch.setattr(files.os, "replace", lambda old, new: (stop_at(new), replace(old, new)))
        patch.setattr(cache_folder, "write_text", lambda path, text: (stop_at(path), write(path, text)))
        patch.setattr(token_cache.shutil, "rmtree", lambda path: (stop_at(path), remove(path)))
        with pytest.raises(Killed):
            build_token_cache(source, ByteTokenizer(), tmp_path / "stopped")
    assert contents(build_token_cache(source, ByteTokenizer(), tmp_path / "stopped")) == wanted


@pytest.mark.slow
def test_two_processes_that_build_at_once_share_one_cache(tmp_path: Path) -> None:
    source = folder_of_files(tmp_path / "corpus")
    processes = [start_build(tmp_path, tmp_path / "shared", 1) for _ in range(2)]
    for process in processes:
        assert process.communicate()[0] == "end\n"
        assert process.returncode == 0
    shared = contents(build_token_cache(source, ByteTokenizer(), tmp_path / "shared"))
    assert shared == contents(build_token_cache(source, ByteTokenizer(), tmp_path / "alone"))


def test_one_who_waits_for_the_lock_finds_the_cache_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, run, calls = open_source(TEXTS), TokenizeJob.write, []

    def slow_run(job: TokenizeJob, tokenizer: ByteTokenizer) -> None:
        calls.append(job)
        time.sleep(0.2)
        run(job, tokenizer)

    monkeypatch.setattr(TokenizeJob, "write", slow_run)
    threads = [threading.Thread(target=build_token_cache, args=(source, ByteTokenizer(), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@pytest.mark.slow
def test_a_script_that_guards_nothing_can_build_in_processes(tmp_path: Path) -> None:
    folder_of_files(tmp_path / "corpus", 2)
    process = start_build(tmp_path, tmp_path / "cache", 2)
    assert process.communicate()[0] == "end\n"
    assert process.returncode == 0


def test_an_error_in_a_process_reaches_the_person(tmp_path: Path) -> None:
    folder_of_files(tmp_path / "corpus", 3)
    (tmp_path / "corpus" / "1.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match=r"1\.jsonl:1 is not JSON"):
        build_token_cache(open_source(tmp_path / "corpus"), ByteTokenizer(), tmp_path, num_workers=2)


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\n"
        "class DeadlyTokenizer:\n"
        "    vocab_size, eos_id, eos_ids, fingerprint = 258, 256, (256,), 'deadly'\n"
        "    def encode(self, text): return list(text.encode())\n"
        "    encode_prompt = encode\n"
        "    def encode_array(self, text): os._exit(7)\n"
    )
    source = folder_of_files(tmp_path / "corpus", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        from deadly import DeadlyTokenizer

        with pytest.raises(DataError, match=r"(?s)has died.*exit code 7"):
            build_token_cache(source, DeadlyTokenizer(), tmp_path, num_workers=2)


def test_a_corpus_of_empty_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="there is no text"):
        build_token_cache(open_source(tmp_path / "a.jsonl"), ByteTokenizer(), tmp_path)


def test_a_shard_of_empty_documents_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    (tmp_path / "b.txt").write_text("text")
    assert (
        build_token_cache(
            open_source([tmp_path / "a.jsonl", tmp_path / "b.txt"]), ByteTokenizer(), tmp_path
        ).num_documents
        == 1
    )


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"(?s)cannot write the token cache.*KITFORGE_CACHE"):
        build_token_cache(open_source(TEXTS), ByteTokenizer(), tmp_path / "file")


@pytest.mark.parametrize("num_workers", [0, -1])
def test_a_number_of_processes_that_cannot_be_is_refused(tmp_path: Path, num_workers: int) -> None:
    with pytest.raises(ConfigError, match=r"data\.num_workers"):
        build_token_cache(open_source(TEXTS), ByteTokenizer(), tmp_path, num_workers=num_workers)


@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "cache.json"])
@pytest.mark.parametrize("damage", ["missing", "cut", "long"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    folder = build_token_cache(open_source(TEXTS), ByteTokenizer(), tmp_path).folder
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-8] if damage == "cut" else content + b"}2345678")
    if damage == "missing":
        (folder / name).unlink()
    if (name, damage) == ("documents.npy", "long"):
        np.save(folder / name, np.arange(99))
    with pytest.raises(DataError, match=rf"(?s){name} is damaged.*delete the folder"):
        TokenCache.open(folder)


def test_a_cache_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match=r"(?s)damaged.*format 2"):
        TokenCache.open(tmp_path)


def test_the_environment_says_where_caches_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KITFORGE_CACHE", "/somewhere")
    assert default_root() == Path("/somewhere")
    monkeypatch.delenv("KITFORGE_CACHE")
    assert default_root() == Path.home() / ".cache" / "kitforge"
