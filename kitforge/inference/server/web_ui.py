"""The chat web UI: one HTML document without external resources."""

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from kitforge.data.optional_imports import import_optional


def page(name: str, *, needs_token: bool, is_chat: bool, context: int, most: int, sampling: Mapping[str, Any]) -> str:
    """The HTML document for a model of that name, which `is_chat` where it has a chat template, and generates at most
    `most` tokens; `sampling` has the values where the page names none."""
    body = Template(_read("page.html")).substitute(
        name=escape(name),
        hidden="" if needs_token else " hidden",
        base="" if is_chat else " checked",
        kind="continues" if is_chat else "is a base model, without a chat template: it continues",
        context=context,
        most=most,
        # A small model may never end a text, and room stays for the next question.
        max_tokens=max(1, min(1024 if is_chat else 256, most, context // 2)),
        **{name: 1 if sampling.get(name) is None else sampling[name] for name in ("temperature", "top_p")},
    )
    return f"{_head(name)}{body}<script>{_read('page.js')}</script>\n</body>\n</html>\n"


@cache
def _markdown() -> Any:
    markdown_it = import_optional("markdown_it", needed_for="the chat page", extra="serve")
    reader = markdown_it.MarkdownIt("commonmark", {"html": False, "linkify": False, "breaks": True})
    # An image would tell another server what is read.
    return reader.enable(["table", "strikethrough"]).disable("image")


def rendered(text: str) -> str:
    """A Markdown text as HTML without anything of the text's own HTML. Its headings follow that of a message."""
    tokens = _markdown().parse(text)
    headings = [token for token in tokens if token.type in ("heading_open", "heading_close")]
    least = min((token.tag for token in headings), default="h1")
    for token in tokens:
        # The policy of the page allows no styles within its elements.
        if "style" in token.attrs:
            token.attrs["class"] = token.attrs.pop("style").rpartition(":")[2]
    for token in headings:
        token.tag = f"h{min(6, 3 + int(token.tag[1]) - int(least[1]))}"
    html: str = _markdown().renderer.render(tokens, _markdown().options, {})
    return html


def docs_page(name: str, paths: Mapping[str, Mapping[str, Any]]) -> str:
    """The HTML document that lists the routes of an OpenAPI schema. It needs no script, so it works offline."""
    routes = [(method.upper(), path, route) for path, methods in paths.items() for method, route in methods.items()]
    rows = "".join(
        f"<li>{method} <code>{escape(path)}</code> {escape(route['summary'])}</li>\n" for method, path, route in routes
    )
    return (
        f"{_head(f'Routes of {name}')}<main>\n<h1>Routes of {escape(name)}</h1>\n<ul>\n{rows}</ul>\n"
        '<p>Their fields are in <a href="/openapi.json">/openapi.json</a>.</p>\n</main>\n</body>\n</html>\n'
    )


def _head(title: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} \N{MIDDLE DOT} Kitforge</title>\n<style>{_read('page.css')}</style>\n</head>\n<body>\n"
    )


def content_security_policy() -> str:
    """The Content-Security-Policy header: no external resources, and no script but ours in generated text."""
    files = ("page.css", "page.js")
    css, js = (base64.b64encode(hashlib.sha256(_read(name).encode()).digest()).decode("ascii") for name in files)
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; style-src 'sha256-{css}'; script-src 'sha256-{js}'"
    )


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text("utf-8")
