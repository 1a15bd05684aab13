"""Peers of every variant, each built and saved once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.models.variants import VARIANTS, Peer, build_peer

GetPeer = Callable[[str], Peer]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """These networks are too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> GetPeer:
    """The peer of a variant's name with the folder that `save_pretrained` wrote."""
    built: dict[str, Peer] = {}

    def get(name: str) -> Peer:
        if name not in built:
            model = build_peer(VARIANTS[name])
            folder: Path = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            built[name] = Peer(name=name, model=model, folder=folder)
        return built[name]

    return get
