"""What is wrong is refused in OpenAI's shape, whole and streamed, with the field and words that help."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.pooling import TextPooling
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, serving, until

TEXT = Path(__file__).with_name("refusals.yaml").read_text().replace("LONG", "x" * 500).replace("MANY", "97, " * 500)
CASES = [(route, name, *row) for route, rows in yaml.safe_load(TEXT).items() for name, row in rows.items()]
STREAMED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"}
BOTH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
}


@pytest.fixture(scope="module")
def everything(model: Decoder) -> Iterator[Served]:
    """A server that embeds as well."""
    service = make_service(model, ServeOptions(), EngineOptions())
    service.pooling = TextPooling(mode="mean", normalize=True)
    with serving(service) as found:
        yield found


@pytest.mark.parametrize(("route", "body", "field", "words"), [(each[0], *each[2:]) for each in CASES],
                         ids=[f"{each[0]} {each[1]}" for each in CASES])  # fmt: skip
def test_what_cannot_be_is_refused_by_its_field(
    everything: Served, route: str, body: Any, field: str | None, words: str
) -> None:
    asked = [(path, base | body) for path, base in BOTH.items()] if route == "structure" else [(route, body)]
    streamed = [(path, each | {"stream": True}) for path, each in asked
                if path in STREAMED and isinstance(each, dict) and "stream_options" not in each]  # fmt: skip
    for path, each in (*asked, *streamed):
        answer = everything.post(path, each)
        assert answer.headers["content-type"] == "application/json"
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        found = answer.status_code, error["param"], words in error["message"]
        assert found == (404 if field == "model" else 400, field, True), answer.text
    until(lambda: everything.service.num_active == 0)
