"""Nothing fails in silence: whoever catches a failure raises, tells it, hands it on, or says why it needn't be told."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What tells: an event, a record, a line for whoever watches a command.
TELLING = {"emit", "_tell", "log", "log_failure", "say", "debug", "info", "warning", "error", "critical", "exception"}
#: An exception of these says what a value isn't or what isn't there: the answer to a question, and no failure.
ANSWERS = {
    "ArgumentError",
    "AttributeError",
    "BlockingIOError",
    "NotFound",
    "Empty",
    "FileNotFoundError",
    "ImportError",
    "IndexError",
    "InvalidOperation",
    "KeyError",
    "LookupError",
    "ModuleNotFoundError",
    "OverflowError",
    "PackageNotFoundError",
    "ProcessLookupError",
    "RecursionError",
    "StopIteration",
    "TypeError",
    "UnicodeDecodeError",
    "ValueError",
    "binascii.Error",
    "locale.Error",
}


def swallowed(path: Path) -> Iterator[int]:
    """Yield the lines at which a failure is caught, and goes no further without a word."""
    text = path.read_text()
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            if not (is_answer(node.type) or goes_on(node) or has_reason(lines, node.lineno, node.body[-1].end_lineno)):
                yield node.lineno
        elif isinstance(node, ast.With):
            caught = [kind for item in node.items for kind in suppressed(item.context_expr)]
            if not (all(map(is_answer, caught)) or has_reason(lines, node.lineno, node.body[-1].end_lineno)):
                yield node.lineno


def suppressed(manager: ast.expr) -> list[ast.expr]:
    """Return what a context manager suppresses, as far as it is `contextlib.suppress`."""
    is_suppress = isinstance(manager, ast.Call) and ast.unparse(manager.func).endswith("suppress")
    return manager.args if isinstance(manager, ast.Call) and is_suppress else []


def is_answer(caught: ast.expr | None) -> bool:
    """Is all that is caught the answer to a question?"""
    if caught is None:
        return False
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return all(ast.unparse(kind) in ANSWERS for kind in kinds)


def goes_on(handler: ast.ExceptHandler) -> bool:
    """Is the exception raised, told, or made use of?"""
    for node in (each for statement in handler.body for each in ast.walk(statement)):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Name) and node.id == handler.name:
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in TELLING:
            return True
    return False


def has_reason(lines: list[str], first: int, last: int | None) -> bool:
    """Is there a comment on the line above, or on one of the lines themselves?"""
    return any(re.search(r"(^|\s)# ", line) for line in lines[first - 2 : last])


def without_yield(path: Path) -> Iterator[int]:
    """Yield the lines of context managers that may end without a block: "generator didn't yield" is no failure of ours.

    One that catches what came before its ``yield`` yields in the handler, too, or raises; a ``match`` has a case for
    all that is left.
    """
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not any(ast.unparse(each).endswith("contextmanager") for each in function.decorator_list):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Try) and has_yield(node.body) and not begins_with_yield(node.body):
                yield from (each.lineno for each in node.handlers if not (has_yield(each.body) or raises(each)))
            elif isinstance(node, ast.Match) and any(has_yield(case.body) for case in node.cases):
                last = node.cases[-1]
                if last.guard is not None or ast.unparse(last.pattern) != "_" or not has_yield(last.body):
                    yield node.lineno


def has_yield(body: list[ast.stmt]) -> bool:
    """Is there a ``yield`` in it?"""
    return any(isinstance(node, ast.Yield) for statement in body for node in ast.walk(statement))


def begins_with_yield(body: list[ast.stmt]) -> bool:
    """Is the first statement the ``yield``, before which nothing can fail?"""
    return isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Yield)


def raises(handler: ast.ExceptHandler) -> bool:
    """Does it always raise?"""
    return isinstance(handler.body[-1], ast.Raise) and not any(
        isinstance(node, ast.Return) for statement in handler.body for node in ast.walk(statement)
    )


def test_a_context_manager_always_yields() -> None:
    """Whatever is caught before: a caller learns it from what the block gets, or from an exception."""
    paths = sorted((ROOT / "outbox").rglob("*.py"))
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in without_yield(path)] == []


def test_no_failure_is_swallowed() -> None:
    """Each is raised, told, handed on, or there is a comment that says why it needn't be."""
    paths = sorted((ROOT / "outbox").rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in swallowed(path)]
    assert found == []


#: What may describe an exception whose class isn't known: it is total, whatever that class does.
DESCRIBES = ROOT / "outbox" / "text.py"
BROAD = {"Exception", "BaseException"}


def described(path: Path) -> Iterator[int]:
    """Yield the lines at which an exception of any class is made a text by something else."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler) and node.name and node.type and kinds_of(node.type) & BROAD:
            yield from texts_of(node.name, node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                if argument.annotation is not None and kinds_of(argument.annotation) & BROAD:
                    yield from texts_of(argument.arg, node.body)


def kinds_of(annotation: ast.expr) -> set[str]:
    """Return the names in a type."""
    return {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}


def texts_of(name: str, body: list[ast.stmt]) -> Iterator[int]:
    """Yield the lines at which a name is formatted, or what its class is called is read."""
    for node in (each for statement in body for each in ast.walk(statement)):
        match node:
            case ast.FormattedValue(value=ast.Name(id=shown)) if shown == name:
                yield node.lineno
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[ast.Name(id=shown)]) if shown == name:
                yield node.lineno
            case ast.Attribute(
                value=ast.Call(func=ast.Name(id="type"), args=[ast.Name(id=shown)]), attr="__name__" | "__qualname__"
            ) if shown == name:
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id="traceback"))):
                yield node.lineno


def test_one_module_describes_exceptions() -> None:
    """Where an exception may be of any class, its text, class and traceback come from the module that can't fail."""
    # What is embedded stands alone, and catches its own.
    others = (path for path in sorted((ROOT / "outbox").rglob("*.py")) if "embedded" not in path.parts)
    paths = [path for path in others if path != DESCRIBES]
    assert [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in described(path)] == []
