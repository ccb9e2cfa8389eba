"""Take messages instead of being called: see them under a lease, and say of each what came of it.

It prints::

    taken: order 1, order 2
    order 1 is packed and acknowledged, in one transaction
    order 2 was left; at attempt 2 it is packed too
    the first lease of order 2 counts no more
"""

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from outbox import Outbox, embedded
from outbox.database import migration
from outbox.errors import LeaseEnded
from outbox.testing import advance, drain

outbox = Outbox(group="shop")
packing = outbox.leased("order-created", group="packing")


if __name__ == "__main__":
    with embedded.server(["shop"], durable=False) as server:
        migration.upgrade(server.url("shop"))
        engine = create_engine(server.url("shop"))
        outbox.bind(engine)
        with Session(engine) as session, session.begin():
            session.execute(text("CREATE TABLE parcel (order_name text)"))
            for name in ("order 1", "order 2"):
                outbox.send(session, "order-created", name, key="k")
        drain(outbox)
        first, second = packing.take(10, invisible=60)
        print(f"taken: {first.body}, {second.body}")
        with Session(engine) as session, session.begin():
            session.execute(text("INSERT INTO parcel VALUES (:name)"), {"name": first.body})
            first.acknowledge(session)
        print(f"{first.body} is packed and acknowledged, in one transaction")
        advance(outbox, 61)  # its lease ends; nothing has to be written for that
        (again,) = packing.take(10)
        again.acknowledge()
        print(f"{again.body} was left; at attempt {again.attempt} it is packed too")
        try:
            second.acknowledge()
        except LeaseEnded:
            print(f"the first lease of {second.body} counts no more")
        engine.dispose()
