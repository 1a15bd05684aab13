"""Agent libraries as they are published use the server, and the page shows how."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kitforge.inference.pooling import TextPooling
from tests.data.chat.cases import THINKING
from tests.differential.drawn import WHOLE
from tests.documentation.markdown import ROOT
from tests.inference.server.conftest import serving
from tests.inference.server.scripted import chat_service, saying

CLIENTS_ENV = ROOT / ".venv-clients"
# The import of one that stands on OpenAI's client takes as long as those of all others together.
CLIENTS = ["openai", "responses", "langchain", "pydantic_ai", "agents", *(["litellm"] if WHOLE else [])]
ANSWER = '{"city": "Oslo", "celsius": 7}'
# Nothing is asked of the network but this machine, and nothing is sent to their makers.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}


def reply_to(prompt: str) -> str:
    """What a model says that calls the tool for each city, and then answers as it is asked to."""
    first, *turns = prompt.split("<|im_start|>user\n")
    asked = [turn for turn in turns if not turn.startswith("<tool_response>")][-1]
    if "Babble" in asked:
        return "Well, no."
    calls = [("warmth", f'{{"city": "{city}"}}') for city in ("Oslo", "Bergen") if city in asked]
    if '"warmth"' not in first or turns[-1] != asked:
        calls = [(name, ANSWER) for name in ("Weather", "final_result") if f'"name": "{name}"' in first]
    said = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in calls]
    return "<think>\nhm\n</think>\n\n" + ("\n".join(said) or ANSWER)


def page_blocks() -> list[str]:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    section = page.partition("\n## Clients\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What went wrong with each client. Their imports take seconds, so one process has them all."""
    if not (CLIENTS_ENV / ".done").exists():
        (pytest.fail if "CI" in os.environ else pytest.skip)("the clients are not installed: make clients")
    service = chat_service(tmp_path_factory.mktemp("hermes"), THINKING, max_length=8192)
    service.pooling = TextPooling(mode="mean", normalize=True)
    names = {token: name.encode() for name, token in service.tokenizer.special_tokens.items()}
    scripts: dict[str, list[int]] = {}

    def script_of(sequence: Any) -> list[int]:
        if sequence.options.pooling is not None:
            return [0]
        tokens = sequence.tokens[: sequence.prompt_length]
        prompt = b"".join(names.get(each, service.tokenizer.token_bytes(each)) for each in tokens).decode()
        if prompt not in scripts:
            scripts[prompt] = [*service.template.encode(reply_to(prompt)), service.tokenizer.eos_id]
        return scripts[prompt]

    with saying(script_of), serving(service) as served:
        url = f"{served.url}/v1"
        shown = [block.replace("http://127.0.0.1:8000/v1", url).replace("my-run", "tiny") for block in page_blocks()]
        done = subprocess.run(
            [CLIENTS_ENV / "bin" / "python", Path(__file__).with_name("agent_clients.py")],
            input=json.dumps({"url": url, "blocks": shown, "clients": CLIENTS}),
            env={name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | OFFLINE,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("client", CLIENTS)
def test_the_client_calls_tools_and_gets_answers_of_a_schema(errors: dict[str, str | None], client: str) -> None:
    assert errors[client] is None, errors[client]
