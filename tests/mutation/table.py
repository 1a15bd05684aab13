"""The faults: those that were drawn, and those that were written by hand."""

import json
from pathlib import Path

from tests.mutation.planting import Fault

DRAWN_FILE = Path(__file__).with_name("drawn.json")
BY_HAND_FILE = Path(__file__).with_name("by_hand.json")

# The rooms of the package, and where their tests are. A room within a room comes first.
ROOMS: dict[str, list[str]] = {
    "core/checkpoint": ["tests/core/checkpoint", "tests/distributed/test_checkpoint.py", "tests/trainer"],
    "core/kernels": ["tests/core/kernels", "tests/embedding_cache/test_equality.py"],
    "core/nn": ["tests/core/nn", "tests/models", "tests/inference"],
    "core/optim": ["tests/core/optim", "tests/trainer", "tests/embedding_cache"],
    "core/parallel": ["tests/core/parallel", "tests/distributed"],
    "data": ["tests/data", "tests/kits/transformers"],
    "embedding_cache": ["tests/embedding_cache"],
    "foundation": ["tests/foundation", "tests/test_composition.py", "tests/trainer"],
    "inference": ["tests/inference", "tests/kits/transformers"],
    "kits/recommender": [
        "tests/kits/recommender",
        "tests/embedding_cache/test_admission.py",
        "tests/differential/test_metrics.py",
    ],
    "kits/rlhf": ["tests/kits/rlhf", "tests/differential/test_alignment_losses.py"],
    "kits/transformers": [
        "tests/kits/transformers",
        "tests/differential/test_metrics.py",
        "tests/test_api.py",
        "tests/test_cli.py",
    ],
    "models": ["tests/models", "tests/kits/recommender"],
    "report": ["tests/report"],
    "trainer": ["tests/trainer", "tests/distributed/test_training.py", "tests/distributed/test_command.py"],
    "verify": ["tests/verify"],
    "cli": ["tests/test_cli.py", "tests/test_chat.py", "tests/test_api.py", "tests/test_composition.py"],
}


def faults() -> list[Fault]:
    """All faults, the drawn ones first."""
    files = [file for file in (DRAWN_FILE, BY_HAND_FILE) if file.exists()]
    return [Fault(**row) for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def room_of(file: str) -> str:
    """The room that a file below the package belongs to; what lies in none is of the command line and its doors."""
    return next((room for room in ROOMS if file.startswith(f"{room}/")), "cli")
