"""A process that dies when its handler has given points: the URL of the database is its argument."""

import sys

from sqlalchemy import create_engine

from outbox import Outbox, Settings
from outbox.testing import drain, killing
from tests.testing.shop import add_points

if __name__ == "__main__":
    shop = Outbox(create_engine(sys.argv[1]), settings=Settings())
    shop.consumer("order", group="points")(add_points)
    with killing(shop, "order", process=True):
        drain(shop)
