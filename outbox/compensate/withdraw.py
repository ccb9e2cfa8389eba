"""Give up the rollback of one message: lift its fences, and end the item."""

from __future__ import annotations

from outbox import fences
from outbox.compensate.book import Book, Item
from outbox.compensate.places import Place, Waits
from outbox.store import compensate as store


def refuse(book: Book, item: Item, why: str) -> str:
    """End the item, for which nothing was fenced off; return its state."""
    return book.close(item, "skipped" if item.cancelled_by is None else "cancelled", f"{store.REFUSED}{why}")


def withdraw(book: Book, item: Item, why: str, places: list[Place]) -> str:
    """Decide that the message will not be compensated, lift the fences, end the item; return its state.

    Raises:
        Waits: a place can't be asked now. The decision stands.
    """
    if not book.refuse(item, why):
        state, _ = book.ended(item)
        # Pending and yet not to be refused: it was compensated by nobody's order, and the fences stay.
        return refuse(book, item, why) if state == "pending" else look_again(book, item, places, why)
    # While the message wasn't out, nobody knew where the groups would pass it. Nor do we, if somebody died in between.
    doubt = item.refused or not book.order(item).sends
    lift(book, item, places)
    if doubt and book.ended(item)[0] == "pending":
        lift(book, item, places, doubt=True)
    return refuse(book, item, why)


def look_again(book: Book, item: Item, places: list[Place], why: str) -> str:
    """Something came in between: if the item has ended by that, leave no fence behind; return its state.

    Raises:
        Waits: it is to be done over.
    """
    state, compensated = book.ended(item)
    if state == "pending":
        raise Waits(why, 0)
    if state in {"skipped", "cancelled"} and not compensated:
        lift(book, item, places)
    return state


def lift(book: Book, item: Item, places: list[Place], *, doubt: bool = False) -> None:
    """Lift the item's fences; nobody compensates for it any more."""
    order = book.order(item)
    for place in places:
        place.run(lambda connection: fences.lift(connection, book.schema, order, doubt=doubt))
