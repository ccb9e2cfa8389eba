"""Reading a page as a browser without scripts does: its text, links, and forms that can be filled in and sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

if TYPE_CHECKING:
    import httpx

    from tests.console.web import Http

_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


@dataclass
class Form:
    """A form: where it is sent, and its fields with what stands in them; unticked boxes aren't sent."""

    action: str
    method: str
    id: str | None = None
    fields: list[tuple[str, str]] = field(default_factory=list)
    boxes: list[tuple[str, str]] = field(default_factory=list)
    buttons: list[tuple[str, str]] = field(default_factory=list)


class Page(HTMLParser):
    """A page. ``tags`` are all elements with their attributes, ``text`` what a reader sees."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(convert_charrefs=True)
        self.status = response.status_code
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.links: list[tuple[str, str]] = []
        self.forms: list[Form] = []
        self.rows: list[str] = []
        self._words: list[str] = []
        self._open: list[str] = []
        self._area: tuple[Form, str, int] | None = None
        self._link: tuple[str, int] | None = None
        self._row: int | None = None
        self.feed(response.text)
        self.close()

    @property
    def text(self) -> str:
        """All the text."""
        return " ".join(" ".join(self._words).split())

    def form(self, action: str) -> Form:
        """Return the only form whose action ends so."""
        (found,) = [form for form in self.forms if urlsplit(form.action).path.endswith(action)]
        return found

    def link(self, text: str) -> str:
        """Return where the first link with this text leads to."""
        return next(href for href, words in self.links if text in words)

    def has_link(self, text: str) -> bool:
        """Is there a link with this text?"""
        return any(text in words for _, words in self.links)

    # --- the parser's ------------------------------------------------------------------------------------

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "a":
            self._link = (values.get("href", ""), len(self._words))
        elif tag == "tr" or "data-row" in values:
            self._row = len(self._words)
        elif tag == "form":
            self.forms.append(Form(values.get("action", ""), values.get("method", "get"), values.get("id")))
        elif tag in {"input", "button", "select", "textarea"}:
            self._note_field(tag, values)
        elif tag == "option" and "selected" in values and self._area and self._area[0].fields:
            name, _ = self._area[0].fields[-1]
            self._area[0].fields[-1] = (name, values.get("value", ""))

    def _note_field(self, tag: str, values: dict[str, str]) -> None:
        owner = next((form for form in self.forms if form.id and form.id == values.get("form")), None)
        if owner is None and "form" in values:
            # A form that comes later in the page.
            owner = Form("", "post", values["form"])
            self.forms.append(owner)
        owner = owner or (self.forms[-1] if "form" in self._open else None)
        name = values.get("name")
        if owner is None or name is None:
            return
        pair = (name, values.get("value", ""))
        if tag == "button":
            owner.buttons.append(pair)
        elif values.get("type") in {"checkbox", "radio"}:
            (owner.fields if "checked" in values else owner.boxes).append(pair)
        else:
            owner.fields.append(pair)
            self._area = (owner, tag, len(self._words))

    def handle_endtag(self, tag: str) -> None:
        """Note the end of an element."""
        if tag in self._open:
            while self._open and self._open.pop() != tag:
                pass
        if tag == "a" and self._link:
            href, begin = self._link
            self.links.append((href, " ".join(" ".join(self._words[begin:]).split())))
        elif tag in {"tr", "li"} and self._row is not None:
            self.rows.append(" ".join(" ".join(self._words[self._row :]).split()))
            self._row = None
        elif tag == "textarea" and self._area:
            owner, _, begin = self._area
            owner.fields[-1] = (owner.fields[-1][0], "".join(self._words[begin:]))

    def handle_data(self, data: str) -> None:
        """Note a text."""
        if not {"script", "style", "template"} & set(self._open):
            self._words.append(data)


class Visitor:
    """Goes through pages: follows links, fills forms in, is redirected."""

    def __init__(self, http: Http, root: str = "") -> None:
        self.http, self.root = http, root
        self.at = root + "/"

    def as_role(self, role: str | None) -> Visitor:
        """The same for somebody with another role."""
        return Visitor(self.http.as_role(role), self.root)

    def go(self, path: str, **options: Any) -> Page:
        """Open a page, by what comes after the console's root, or by a link."""
        return self._ask("GET", path if path.startswith("/") else f"{self.root}/{path}", **options)

    def send(self, form: Form, *ticked: str, **values: Any) -> Page:
        """Send a form; ``ticked`` are names of boxes, ``values`` what is typed (or the button that is pressed)."""
        pairs = [(name, value) for name, value in form.fields if name not in values]
        pairs += [(name, value) for name, value in form.boxes if name in ticked or f"{name}={value}" in ticked]
        pairs += [(name, str(value)) for name, value in values.items()]
        data: dict[str, list[str]] = {}
        for name, value in pairs:
            data.setdefault(name, []).append(value)
        if form.method == "get":
            return self._ask("GET", form.action, params=data)
        return self._ask("POST", form.action, data=data, headers={"Sec-Fetch-Site": "same-origin"})

    def _ask(self, method: str, path: str, **options: Any) -> Page:
        response = self.http.ask(method, path, **options)
        while response.status_code in {302, 303, 307}:
            self.at = urljoin(self.at, response.headers["location"])
            response = self.http.ask("GET", self.at)
        self.at = str(response.request.url.raw_path, "ascii")
        return Page(response)
