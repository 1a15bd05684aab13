"""Differences of configurations."""

from kitforge.report.config_diff import differences, distinguishing, options


def test_options_get_dotted_names() -> None:
    text = "seed: 1\noptimizer:\n  name: adamw\n  betas:\n  - 0.9\n  - 0.95\ndata:\n  train: 'a: b.txt'\n  eval: null\n"
    assert options(text) == {
        "seed": "1",
        "optimizer.name": "adamw",
        "optimizer.betas": "0.9 0.95",
        "data.train": "'a: b.txt'",
        "data.eval": "null",
    }


def test_items_of_a_list_do_not_overwrite_each_other() -> None:
    first = "data:\n  mixture:\n  - path: a\n    weight: 1\n  - path: b\n    weight: 2\n"
    differing, _ = differences([first, first.replace("weight: 1", "weight: 3")])
    assert differing == {"data.mixture.weight": ["1 2", "3 2"]}


def test_only_what_differs_is_listed() -> None:
    differing, num_equal = differences(["a: 1\nb: 2\nc: 3\n", "a: 1\nb: 4\n", "a: 1\nb: 2\n"])
    assert differing == {"b": ["2", "4", "2"], "c": ["3", None, None]}
    assert num_equal == 1


def test_comments_and_indentation_make_no_difference() -> None:
    assert differences(["# one\na:\n  b: 1\n", "---\na:\n    b: 1\n"]) == ({}, 1)


def test_runs_are_named_by_what_tells_them_apart() -> None:
    def config(family: str, rate: float, seed: int) -> str:
        wide = "model:\n  family: " + family + f"\n  dims: {[len(family)] * 30}\n"
        return f"{wide}tables:\n  learning_rate: {rate}\noutput_dir: runs/{family}{rate}{seed}\nseed: {seed}\n"

    found = distinguishing([config("deepfm", 0.1, 1), config("dcn_v2", 0.1, 2), config("dcn_v2", 0.2, 3)])
    assert found == [
        "family deepfm, learning rate 0.1",
        "family dcn_v2, learning rate 0.1",
        "family dcn_v2, learning rate 0.2",
    ]
    assert distinguishing([config("deepfm", 0.1, 1), config("deepfm", 0.1, 2)]) == ["seed 1", "seed 2"]
    assert distinguishing([config("deepfm", 0.1, 1)] * 2) is None
