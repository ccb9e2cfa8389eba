"""What ``OUTBOX`` in Django's settings says; anything that it leaves out comes from the environment, or is default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from django.conf import settings as django_settings

from outbox.errors import InvalidSettings
from outbox.reader import Reader, option, shape_of, unknown_name
from outbox.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class DjangoSettings:
    """The keys of ``OUTBOX`` that Django alone has; the others are fields of `Settings`, all in capitals."""

    databases: tuple[str, ...] = option(("default",), "The aliases of the databases with outbox tables.")
    group: str = option("default", "The producer group that is written into messages.")
    modules: str = option("messages", "The module of each application with its handlers.")
    console_url: str | None = option(None, "Where the console is; the admin's index links to it.")


class Configuration(NamedTuple):
    """Hold Django's own settings, and those that an `Outbox` takes."""

    own: DjangoSettings
    outbox: Settings


@cache
def configuration() -> Configuration:
    """Return what the settings of the project say; read once.

    Raises:
        InvalidSettings: as `read`.
    """
    return read(getattr(django_settings, "OUTBOX", {}))


def read(written: Mapping[str, Any]) -> Configuration:
    """Return what a mapping such as ``OUTBOX`` says.

    Raises:
        InvalidSettings: a key that is none, or a value that can't be; names it and the mend.
    """
    known = {shape.name.upper() for kind in (DjangoSettings, Settings) for shape in shape_of(kind)}
    if unknown := [key for key in written if key not in known]:
        raise InvalidSettings(
            "; ".join(
                f"OUTBOX.{key} must be in capitals: {key.upper()}"
                if key.upper() in known
                else unknown_name(key, sorted(known), "OUTBOX.")
                for key in unknown
            )
        )
    own_names = {shape.name for shape in shape_of(DjangoSettings)}
    own = {key.lower(): value for key, value in written.items() if key.lower() in own_names}
    others = {key.lower(): value for key, value in written.items() if key.lower() not in own_names}
    reader = Reader()
    return Configuration(
        DjangoSettings(**reader.values(DjangoSettings, own, "OUTBOX.", str.upper)),
        Settings.from_env(**reader.values(Settings, others, "OUTBOX.", str.upper)),
    )
