"""The chat web UI: one HTML document without external resources."""

import base64
import hashlib
from functools import cache
from html import escape
from pathlib import Path

_FOLDER = Path(__file__).parent


def page(name: str, *, needs_token: bool) -> str:
    """The HTML document for a model of that name."""
    hidden = "" if needs_token else " hidden"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(name)} \N{MIDDLE DOT} Kitforge</title>\n<style>{_read('page.css')}</style>\n</head>\n<body>\n"
        f'<header><p>Kitforge</p><h1>{escape(name)}</h1><button type="button" id="new">New chat</button></header>\n'
        '<main id="talk" aria-live="polite"></main>\n<form id="form" aria-label="Message">\n'
        f'<label{hidden}>Token <input id="token" type="password" autocomplete="off"></label>\n'
        '<label class="unseen" for="text">Message</label>\n'
        '<textarea id="text" rows="2" placeholder="Say something" required></textarea>\n'
        '<button id="send">Send</button><button type="button" id="stop" hidden>Stop</button>\n</form>\n'
        f"<script>{_read('page.js')}</script>\n</body>\n</html>\n"
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
    return (_FOLDER / name).read_text("utf-8")
