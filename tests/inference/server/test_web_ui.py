"""The built-in page in a real browser: what a model writes, what people do with it, and what goes wrong."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.web_ui import rendered
from tests.inference.server.browser_tab import Tab, browser_tab
from tests.inference.server.conftest import Served, make_service, serving
from tests.report.test_browser import browser, corner

__all__ = ["browser"]
# Replies come from the test, in the format of the server; all else is the server's.
_SCRIPTED = """
window.real = window.fetch, window.asked = [], window.refusals = [];
window.fetch = async (path, { body, signal } = {}) => {
  if (!path.startsWith("/v1/c")) return real(path, { method: body ? "POST" : "GET", body, signal,
    headers: { "Content-Type": "application/json" } });
  asked.push([path, JSON.parse(body)]);
  if (refusals.length) { const [status, error] = refusals.shift(); return Response.json({ error }, { status }); }
  return new Response(new ReadableStream({ start(stream) {
    const send = (body) => stream.enqueue(new TextEncoder().encode(`data: ${body}\\n\\n`));
    window.put = (delta) => send(JSON.stringify({ choices: [{ delta }] }));
    window.end = () => {
      send(JSON.stringify({ choices: [{ delta: {}, finish_reason: "stop" }] }));
      send(JSON.stringify({ choices: [], usage: { prompt_tokens: 4, completion_tokens: 8, total_tokens: 12 } }));
      send("[DONE]");
      stream.close();
    };
    signal.addEventListener("abort", () => stream.error(new DOMException("", "AbortError")));
  } }));
};
base.checked = false;
draw();
"""
TABLE = ("table", "thead", "tr", "th", "tbody", "td")
EVIL = "<img src=x onerror='document.title=1'>"
MARKDOWN = f"""## Sorting {EVIL}

<script>document.title = 2</script>

```python
print("<b>")
```

- one
  1. two

| a | b |
|---|--:|
| 1 | 2 |

[bad](javascript:alert(1)) [good](https://example.com) ![seen](https://example.com/x.png)
"""


@pytest.fixture(scope="module")
def opened(browser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser_tab(browser, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(opened: Tab, served: Served) -> Iterator[Tab]:
    """The page of a chat model, whose replies are scripted."""
    opened.open(served.url)
    opened.run("localStorage.clear()")
    opened.run(_SCRIPTED)
    yield opened
    assert opened.complaints == []


def say(tab: Tab, words: str) -> None:
    tab.run(f"text.value = {json.dumps(words)}; document.getElementById('form').requestSubmit()")


def put(tab: Tab, **delta: object) -> None:
    tab.until("window.put")
    tab.run(f"put({json.dumps(delta)})")


def end(tab: Tab, content: str | None = None) -> None:
    if content is not None:
        put(tab, content=content)
    tab.run("end(); window.put = null")
    tab.until("!running && !send.hidden")


def exchange(tab: Tab, words: str, content: str) -> None:
    say(tab, words)
    end(tab, content)


def said(tab: Tab) -> Any:
    return tab.run("[...document.querySelectorAll('.body')].map((each) => each.textContent.trim())")


def test_the_page_is_fetched_whole(model: Decoder) -> None:
    service = make_service(model, ServeOptions(token="secret", name="<b>mine</b>"), EngineOptions())
    with serving(service) as guarded:
        response = httpx.get(guarded.url)
        refused = httpx.post(f"{guarded.url}/markdown", json={"texts": ["*a*"]})
        headers = {"Authorization": "Bearer secret"}
        answer = httpx.post(f"{guarded.url}/markdown", json={"texts": ["*a*"]}, headers=headers)
    assert response.status_code == 200
    assert "&lt;b&gt;mine&lt;/b&gt;" in response.text and "<b>mine" not in response.text
    assert not re.findall(r"(?:src|href)=[\"'](?!data:,)", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert refused.status_code == 401 and answer.json() == {"html": ["<p><em>a</em></p>\n"]}


def test_markdown_is_rendered_without_anything_of_its_html() -> None:
    html = rendered(MARKDOWN)
    assert set(re.findall(r"<(\w+)", html)) == {"h3", "p", "pre", "code", "ul", "li", "ol", "a", *TABLE}
    assert not re.search(r"<[^>]*(?:style|src|on\w+)=", html) and html.count("javascript:") == 1
    assert '<th class="right">' in html and re.findall("<a [^>]*>", html)[0] == '<a href="https://example.com">'


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_painted_dark_under_its_own_policy(opened: Tab, served: Served, tmp_path: Path, width: int) -> None:
    opened.open(served.url, is_dark=True, width=width)
    picture = tmp_path / "picture.png"
    picture.write_bytes(opened.picture())
    assert opened.complaints == []
    assert max(corner(picture)[2]) < 60
    assert opened.run("document.documentElement.scrollWidth <= innerWidth && document.activeElement === text")


@pytest.mark.slow
def test_what_a_model_writes_is_shown_as_markdown_and_never_as_html(tab: Tab) -> None:
    exchange(tab, f"hello {EVIL}", MARKDOWN)
    assert said(tab)[0] == f"hello {EVIL}" and EVIL in said(tab)[1]
    assert tab.run("[document.title, talk.querySelectorAll('img, script, b').length]") == ["tiny \u00b7 Kitforge", 0]
    assert (
        tab.run("['h3', 'pre code', 'li li', 'th.right'].map((each) => talk.querySelectorAll(each).length)") == [1] * 4
    )
    assert tab.run("[...talk.querySelectorAll('a')].every((each) => each.target === '_blank')")
    tab.run("talk.querySelector('pre button').click()")
    assert tab.run("talk.querySelector('pre button').textContent") == "Copied"


@pytest.mark.slow
def test_one_may_scroll_up_while_it_writes(tab: Tab) -> None:
    lines = "\n\n".join(map(str, range(100)))
    say(tab, "count")
    put(tab, content=lines)
    tab.until("talk.scrollTop > 2000")
    assert tab.run("talk.scrollHeight - talk.scrollTop - talk.clientHeight < 2")
    tab.run("talk.scrollTop = 50")
    put(tab, content="\n\nmore")
    tab.until("talk.textContent.includes('more')")
    assert tab.run("talk.scrollTop") == 50
    end(tab)
    tab.until("document.getElementById('status').textContent")
    assert tab.run("talk.scrollTop") == 50


@pytest.mark.slow
def test_a_reply_that_is_stopped_is_kept_and_the_focus_is_where_one_writes(tab: Tab) -> None:
    say(tab, "hello")
    put(tab, content="Once")
    tab.until("talk.lastChild.textContent.includes('Once')")
    tab.run("stop.focus(); stop.click()")
    tab.until("document.getElementById('status').textContent === 'Stopped'")
    assert said(tab) == ["hello", "Once"] and tab.run("document.activeElement === text && stop.hidden")


@pytest.mark.slow
def test_a_finished_reply_is_announced_once_with_who_speaks_and_what_it_took(tab: Tab) -> None:
    say(tab, "hello")
    put(tab, content="Hi *there*")
    tab.until("talk.querySelector('em')")
    assert tab.run("[document.getElementById('status').textContent, talk.closest('[aria-live]')]") == ["", None]
    end(tab)
    tab.until("document.getElementById('status').textContent")
    assert tab.run("document.getElementById('status').textContent.trim()") == "tiny: Hi there"
    assert tab.run("[...talk.querySelectorAll('h2')].map((each) => each.textContent)") == ["You", "tiny"]
    meter = tab.run("document.getElementById('meter').textContent")
    assert re.fullmatch(r"[\d.]+ tokens/s, 12 of \d+ tokens of context", meter)


@pytest.mark.slow
def test_thoughts_and_calls_of_tools_are_folded(tab: Tab) -> None:
    say(tab, "hello")
    put(tab, reasoning_content="Let me ")
    put(tab, reasoning="see")
    put(tab, tool_calls=[{"index": 0, "function": {"name": "add", "arguments": '{"a"'}}])
    put(tab, tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}])
    end(tab, "Done")
    folded = "[...talk.querySelectorAll('details')].map((each) => [each.open, each.querySelector('pre').textContent])"
    assert tab.run(folded) == [[False, "Let me see"], [False, 'add({"a": 1})']]
    assert said(tab) == ["hello", "Done"]


@pytest.mark.slow
def test_a_message_is_edited_and_a_reply_regenerated(tab: Tab) -> None:
    exchange(tab, "one", "first")
    exchange(tab, "two", "second")
    tab.run("talk.lastChild.querySelector('.last').click()")
    end(tab, "third")
    assert said(tab) == ["one", "first", "two", "third"]
    tab.run("[...talk.querySelectorAll('button')].find((each) => each.textContent === 'Edit').click()")
    assert tab.run("text.value") == "one" and len(said(tab)) == 4
    exchange(tab, "none", "fourth")
    assert said(tab) == ["none", "fourth"]
    sent = tab.run("asked.map(([, body]) => body.messages.map((each) => each.content))")
    assert sent == [["one"], ["one", "first", "two"], ["one", "first", "two"], ["none"]]


@pytest.mark.slow
def test_conversations_are_kept_with_their_system_prompt(tab: Tab, served: Served) -> None:
    tab.until("document.getElementById('model').value")
    fields = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "7"}
    for name, value in fields.items():
        tab.run(f"document.getElementById({name!r}).value = {value!r}")
    exchange(tab, "hello", "*Hi*")
    body = tab.run("asked[0][1]")
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["model"]) == (0.5, 0.9, 7, "tiny")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    tab.run("document.getElementById('new').click()")
    assert said(tab) == [] and tab.run("document.getElementById('system').value") == ""
    tab.open(served.url)
    tab.run(_SCRIPTED)
    tab.run("document.querySelector('#list button').click()")
    tab.until("talk.querySelector('em')")
    assert said(tab) == ["hello", "Hi"] and tab.run("document.getElementById('system').value") == "Be brief."
    tab.run("document.querySelector('#list [aria-label=\"Delete hello\"]').click()")
    assert said(tab) == [] and tab.run("document.querySelectorAll('#list li').length + stored().length") == 0


@pytest.mark.slow
def test_of_several_models_one_is_chosen(tab: Tab) -> None:
    tab.until("document.getElementById('model').value")
    assert tab.run("document.getElementById('model').parentElement.hidden")
    tab.run(
        "[window.theirs, window.real] = [real, async () => Response.json({ data: [{ id: 'tiny' }, { id: 'own' }] })]"
    )
    tab.run("loadModels()")
    assert not tab.run("document.getElementById('model').parentElement.hidden")
    tab.run("document.getElementById('model').value = 'own'; window.real = theirs")
    exchange(tab, "hello", "Hi")
    assert tab.run("asked[0][1].model") == "own"


@pytest.mark.slow
def test_errors_are_told_in_words_of_the_page_and_go_away(tab: Tab) -> None:
    full = [400, {"message": "more than the model's 64", "code": "context_length_exceeded"}]
    for refusals, words in (
        ([[401, {"message": "send it as `Authorization`"}]], "the field Token"),
        ([full, full], "use New chat"),
        ([[429, {"message": "retry in a second"}]], "retry in a second"),
    ):
        tab.run(f"refusals = {json.dumps(refusals)}")
        say(tab, "hello")
        tab.until("!running && !document.getElementById('problem').hidden")
        assert words in tab.run("document.getElementById('problem').textContent")
        assert tab.run("text.value") == "hello" and said(tab) == []
    # Where the reply alone is too long, it is as long as there is room.
    tab.run(f"refusals = {json.dumps([full])}")
    exchange(tab, "hello", "Hi")
    assert tab.run("asked.slice(-2).map(([, body]) => 'max_tokens' in body)") == [True, False]
    assert tab.run("document.getElementById('problem').hidden") and said(tab) == ["hello", "Hi"]


@pytest.mark.slow
def test_a_base_model_says_so_and_continues_the_text(opened: Tab, served: Served) -> None:
    opened.open(served.url)
    opened.run("localStorage.clear()")
    assert opened.run("base.checked") and "is a base model" in opened.run("document.getElementById('note').innerText")
    opened.run("document.getElementById('max_tokens').value = 5; document.getElementById('temperature').value = 0")
    for start in ("Once ", "more "):
        say(opened, start)
        opened.until("!running && document.getElementById('meter').textContent")
    first, *_ = messages = opened.run("chat.messages.map((each) => each.content)")
    assert first == "Once " and len(messages) == 4
    body = {"prompt": "".join(messages[:3]), "max_tokens": 5, "temperature": 0}
    assert messages[3] == httpx.post(f"{served.url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert opened.complaints == []
