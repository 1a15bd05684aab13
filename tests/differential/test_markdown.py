"""Markdown of a model, by the HTML reader of the standard library: nothing in it acts, and code is what was written."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from kitforge.inference.server.web_ui import rendered
from tests.differential.drawn import drawn

TEXTS = {"p", "br", "hr", "em", "strong", "s", "a", "code", "pre", "blockquote", "ul", "ol", "li"}
TAGS = TEXTS | {"h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"}
# What an attribute may hold, by its name; a link may lead anywhere but to a script.
ATTRIBUTES = {"href", "title", "class", "start"}
# Whole elements, and bits of which there may be others.
ELEMENTS = r"""<b>x</b> <script>x</script> <img/src=x/onerror=y> <!--x--> <![CDATA[x]]> <?x?> &lt;b> &#x3c;b>
![a](b) [a](javascript:b) [a](JaVaScRiPt&colon;b) [a](data:text/html,b) <vbscript:b> <https://a.b/?"'>
[a](b"c) [x]:javascript:b [x] `a` **a** _a_ ~~a~~"""
BITS = (
    r"""< > " ' \ [ ]( ] ![ ) ` ``` ~~~ # ###### - 1. 999. * ** _ ~~ | |-|:-:| |a|b| --- === javascript: https://a.b/"""
)
SPACES = ["\n", "\n", "\n\n", " ", " ", "    ", "\t", "  \n", "\0", "\n> ", "\n- ", "\n# "]
PIECES = (
    st.sampled_from(ELEMENTS.split()) | st.sampled_from(BITS.split()) | st.sampled_from(SPACES) | st.text(max_size=4)
)
MARKDOWN = st.lists(PIECES, max_size=25).map("".join)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader


@drawn(150)
@given(MARKDOWN)
def test_nothing_in_a_reply_acts(text: str) -> None:
    for tag, attributes in read(rendered(text)).tags:
        assert tag in TAGS and set(attributes) <= ATTRIBUTES
        link = (attributes.get("href") or "").lower().strip()
        assert not link.startswith(("javascript", "vbscript", "file", "data:text"))


@drawn(100)
@given(MARKDOWN)
def test_code_is_what_was_written(code: str) -> None:
    # CommonMark has one kind of line end, and no zeros.
    code = code.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd").replace("~~~", "")
    found = read(rendered(f"~~~~\n{code}\n~~~~"))
    assert [tag for tag, _ in found.tags] == ["pre", "code"] and found.text == f"{code}\n\n"
