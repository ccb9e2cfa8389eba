"""What a handler takes beside its message, by its declaration: what carries its changes in the framework's transaction.

The annotation of its second parameter decides: a Session, a Connection of SQLAlchemy's, or a plain cursor of psycopg's;
of an async function, an AsyncSession, an AsyncConnection, or an AsyncCursor. Without one it is a session. Classes are
found among the modules that are imported: an annotation can't have named one of another module.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from outbox.database.session import CarrierKind, DeclaredCarrier
from outbox.errors import InvalidHandler
from outbox.text import message_of

#: The class of each kind, for plain functions and for async ones: its module, and its name there.
_CLASSES = {
    False: {
        CarrierKind.SESSION: ("sqlalchemy.orm", "Session"),
        CarrierKind.CONNECTION: ("sqlalchemy", "Connection"),
        CarrierKind.CURSOR: ("psycopg", "Cursor"),
    },
    True: {
        CarrierKind.SESSION: ("sqlalchemy.ext.asyncio", "AsyncSession"),
        CarrierKind.CONNECTION: ("sqlalchemy.ext.asyncio", "AsyncConnection"),
        CarrierKind.CURSOR: ("psycopg", "AsyncCursor"),
    },
}


def carrier_of(what: str, function: Callable[..., Any], *, is_async: bool) -> DeclaredCarrier:
    """Return what a function, which is called with an argument and a carrier, declares that it takes; ``what`` it is.

    A subclass of the session that an application declares is made as ``Class(connection, join_transaction_mode=…)``
    (an async one without the connection), and must be possible so.

    Raises:
        InvalidHandler: names the parameter, and the possible types.
    """
    parameter = _second_parameter(function)
    if parameter is None or parameter.annotation is parameter.empty:
        return DeclaredCarrier(is_async=is_async)
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            annotation = _resolved(annotation, function)
        except Exception as error:
            # A session that only type checkers import is what it would get without an annotation.
            if "Session" in annotation:
                return DeclaredCarrier(is_async=is_async)
            raise InvalidHandler(
                f"{what}: the annotation {annotation!r} of parameter {parameter.name!r} can't be read "
                f"({message_of(error)}); import what it names outside of 'if TYPE_CHECKING', or annotate it as "
                f"{_possible(is_async)}"
            ) from None
    for declared in _alternatives(annotation):
        if (found := _kind_of(declared, is_async)) is not None:
            _check_session(what, parameter.name, found)
            return found
    raise InvalidHandler(
        f"{what}: parameter {parameter.name!r} is annotated as {_name_of(annotation)}, and "
        f"{'an async def' if is_async else 'a plain def'} gets {_possible(is_async)}"
    )


def _second_parameter(function: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter that takes the second argument; None where no single one is declared for it."""
    try:
        signature = inspect.signature(function)
        name, value = list(signature.bind("first", "second").arguments.items())[-1]
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    return signature.parameters[name] if value == "second" else None


def _resolved(annotation: str, function: Callable[..., Any]) -> Any:
    """Return what an annotation in words names, where the function was written."""
    written: Any = inspect.unwrap(function)
    while hasattr(written, "func"):  # a partial
        written = inspect.unwrap(written.func)
    if not hasattr(written, "__globals__"):  # an object that is called
        written = inspect.unwrap(type(written).__call__)
    return eval(annotation, getattr(written, "__globals__", {}))  # noqa: S307 - the application's own source


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield each type that an annotation allows, without its wrapping: None, metadata, parameters, an alias."""
    for alias in ("__value__", "__supertype__"):  # of ``type``, of NewType
        annotation = getattr(annotation, alias, annotation)
    origin = get_origin(annotation)
    if origin in {Union, types.UnionType}:
        for each in get_args(annotation):
            yield from _alternatives(each)
    elif origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif annotation is not type(None):
        yield origin or annotation


def _kind_of(declared: Any, is_async: bool) -> DeclaredCarrier | None:
    """Return what a function gets whose parameter is of a type; None if it can't get that."""
    if declared is Any or getattr(declared, "_is_protocol", False):
        return DeclaredCarrier(is_async=is_async)
    if not isinstance(declared, type):
        return None
    session = _class_of(CarrierKind.SESSION, is_async)
    if declared is object or declared is session:
        return DeclaredCarrier(is_async=is_async)
    if session is not None and issubclass(declared, session):
        return DeclaredCarrier(CarrierKind.SESSION, is_async, declared)
    kinds = (CarrierKind.CONNECTION, CarrierKind.CURSOR)
    return next((DeclaredCarrier(kind, is_async) for kind in kinds if declared is _class_of(kind, is_async)), None)


def _class_of(kind: CarrierKind, is_async: bool) -> type | None:
    module, name = _CLASSES[is_async][kind]
    return getattr(sys.modules.get(module), name, None)


def _check_session(what: str, parameter: str, carrier: DeclaredCarrier) -> None:
    """Raise InvalidHandler if a session of the application's own class can't be made."""
    if carrier.session is None:
        return
    positional = () if carrier.is_async else ("connection",)
    named = dict.fromkeys(
        ("join_transaction_mode", "expire_on_commit") if carrier.is_async else ("join_transaction_mode",)
    )
    try:
        inspect.signature(carrier.session).bind(*positional, **named)
    except TypeError as error:
        arguments = ", ".join([*positional, *(f"{name}=…" for name in named)])
        raise InvalidHandler(
            f"{what}: parameter {parameter!r} is annotated as {_name_of(carrier.session)}, which can't be made by "
            f"({arguments}): {error}; annotate it as {_possible(carrier.is_async)}"
        ) from None


def _possible(is_async: bool) -> str:
    *others, last = (f"{module}.{name}" for module, name in _CLASSES[is_async].values())
    return f"{', '.join(others)} or {last}"


def _name_of(annotation: Any) -> str:
    return f"{annotation.__module__}.{annotation.__qualname__}" if isinstance(annotation, type) else str(annotation)
