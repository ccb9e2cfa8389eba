"""A topic as its services declare it: the model of its bodies, the version of that model, the way from older ones.

A message lives longer than the code that wrote it: it waits for a group that was away, is retried, or resent after
months. So each message says by which version of its model it was written, and the reader brings an older body to the
newest version before it is validated (Fowler's "tolerant reader", Axon's upcaster).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from outbox.errors import InvalidHandler, InvalidMessage, VersionUnknown
from outbox.message import content
from outbox.message.content import NO_CODECS, Codecs
from outbox.text import named, why_invalid

T = TypeVar("T")
Upcaster = Callable[[Any], Any]
U = TypeVar("U", bound=Upcaster)

#: The header that says which version of its topic's model a body is of. A message without it is of version 1.
VERSION_HEADER = "outbox-version"


class Topic(Generic[T]):
    """A topic whose bodies are of one type, in producers and consumers alike.

    ``model`` is a pydantic model, a dataclass, a TypedDict or any other type that pydantic reads. Its bodies are JSON,
    or of another ``content_type``, whose codec (`Outbox.codec`) then writes and reads what JSON would have.
    ``version`` counts from 1 and grows when a reader of the version before couldn't read bodies written now; then
    `upcast` says how an older body is brought to the next version. ``key`` takes a body and gives the message's key
    where a send gives none.

    Producer and consumer may be different services: put the declaration into a module that both import, and name it
    to `Outbox.topic`.

    Raises:
        InvalidMessage: the name or the content type isn't one.
        InvalidHandler: no model, or pydantic isn't installed or can't read it; a version that isn't a number from 1 on.
    """

    def __init__(
        self,
        name: str,
        model: type[T],
        *,
        version: int = 1,
        key: Callable[[T], str | None] | None = None,
        content_type: str = content.JSON,
    ) -> None:
        self.name: str = content.check_topic(name)
        if type(version) is not int or version < 1:
            raise InvalidHandler(f"topic {name!r}: version = {version!r} must be a number from 1 on")
        untyped: Any = model
        if untyped is None:
            raise InvalidHandler(f"topic {name!r} needs the model of its bodies: model=OrderCreated, or model=dict")
        self.model: type[T] = model
        self.version: int = version
        self.key: Callable[[T], str | None] | None = key
        self.content_type: str = content.check_content_type(content_type)
        self.upcasters: dict[int, Upcaster] = {}
        self.type_adapter: Any = content.adapter(untyped)

    def __repr__(self) -> str:
        return f"Topic({self.name!r}, {self.model_name}, version={self.version})"

    @property
    def model_name(self) -> str:
        """The name of the model, for people."""
        return getattr(self.model, "__name__", None) or str(self.model)

    def upcast(self, version: int) -> Callable[[U], U]:
        """Register how a body of ``version`` becomes one of the version after it.

        The function takes the body as `json.loads` gives it and returns the new one, which is validated after the last
        step. It may change what it was given, and does nothing else: a message may be read many times.

        Raises:
            InvalidHandler: no version before this topic's, or it has an upcaster already.
        """
        if type(version) is not int or not 1 <= version < self.version:
            raise InvalidHandler(
                f"topic {self.name!r} is at version {self.version}: no body is brought on from version {version!r}"
            )
        if version in self.upcasters:
            raise InvalidHandler(f"topic {self.name!r} has an upcaster from version {version} already")

        def register(function: U) -> U:
            self.upcasters[version] = function
            return function

        return register

    def missing_upcasters(self, since: int = 1) -> list[int]:
        """Return the versions from ``since`` on that can't be brought to the next one."""
        return [version for version in range(since, self.version) if version not in self.upcasters]

    def validated(self, body: Any) -> T:
        """Return a body as the model: one of it, or what one can be made of, such as a dict.

        Raises:
            InvalidMessage: it isn't one; names the fields.
        """
        try:
            return self.type_adapter.validate_python(body)  # type: ignore[no-any-return]  # it is a T by the adapter
        except (ValueError, RecursionError) as error:
            raise self._invalid(error) from None

    def encode(self, body: T, codecs: Codecs = NO_CODECS, content_type: str | None = None) -> tuple[bytes, str]:
        """Return the bytes and the content type of a body, which its readers can read; a given content type counts.

        Raises:
            InvalidMessage: it was changed into what the model doesn't allow, or can't be read again; names the fields.
                Or the content type has no codec.
        """
        content_type = self.content_type if content_type is None else content.check_content_type(content_type)
        # By alias, as the reader expects it. The warnings are of what is read, which raises.
        try:
            if content.is_json(content_type):
                raw: bytes = self.type_adapter.dump_json(body, by_alias=True, warnings="none")
                self.type_adapter.validate_json(raw)
                dump = partial(self.type_adapter.dump_python, body, by_alias=True, warnings="none")
                content.check_comes_back(body, raw, dump)
                return raw, content_type
            plain = self.type_adapter.dump_python(body, mode="json", by_alias=True, warnings="none")
        except (ValueError, RecursionError) as error:
            raise self._invalid(error) from None
        raw, content_type = codecs.encode(plain, content_type)
        try:
            self.type_adapter.validate_python(codecs.decode(raw, content_type))
        except (ValueError, RecursionError) as error:
            raise self._invalid(error) from None
        return raw, content_type

    def _invalid(self, error: Exception) -> InvalidMessage:
        # Instead of pydantic's error, which a traceback would show with the values.
        return InvalidMessage(f"a body of topic {self.name!r} must be a {self.model_name}: {why_invalid(error)}")

    def headers(self) -> dict[str, str]:
        """Return the headers that say the version; none for the first, so that undeclared messages are of it."""
        return {} if self.version == 1 else {VERSION_HEADER: str(self.version)}

    def decode(self, raw: bytes, content_type: str, headers: Mapping[str, str], codecs: Codecs = NO_CODECS) -> T:
        """Return a body as the model, brought from the version of its headers to the topic's.

        Raises:
            VersionUnknown: its version is newer than the topic's, or an upcaster is missing. A newer release of this
                service will read it, so the attempt fails and is made again later.
            InvalidMessage: the bytes don't fit the content type or the model, or an upcaster can't work with them.
        """
        version = self._version_of(headers)
        if version == self.version:
            return codecs.decode(raw, content_type, self.model)  # type: ignore[no-any-return]  # it is a T by the model
        if missing := self.missing_upcasters(version):
            raise VersionUnknown(
                f"a message of topic {self.name!r} is of version {version}, and nothing brings version "
                f"{missing[0]} to {missing[0] + 1}; write it with @topic.upcast({missing[0]})"
            )
        body = codecs.decode(raw, content_type)
        for step in range(version, self.version):
            try:
                body = self.upcasters[step](body)
            except Exception as error:
                raise InvalidMessage(
                    f"the body of version {version} of topic {self.name!r} can't be brought from version {step} to "
                    f"{step + 1}: {named(error)}"
                ) from error
        # As JSON once more: the model reads a date or a set from JSON by other rules than from Python.
        return content.decode(content.encode(body)[0], content.JSON, self.model)  # type: ignore[no-any-return]  # as above

    def _version_of(self, headers: Mapping[str, str]) -> int:
        text = headers.get(VERSION_HEADER, "1")
        try:
            version = int(text) if text.isascii() and text.isdigit() else 0
        except ValueError:  # more digits than Python converts
            version = 0
        if version < 1:
            raise InvalidMessage(f"header {VERSION_HEADER} = {text!r} of topic {self.name!r} isn't a version")
        if version > self.version:
            raise VersionUnknown(
                f"a message of topic {self.name!r} is of version {version}, newer than this code's {self.version}; "
                "deploy the release that declares it; until then the message is tried again"
            )
        return version
