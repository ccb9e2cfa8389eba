"""Settings of a project whose Django works on psycopg2, as a backend of its own may."""

import sys

# Django takes psycopg 3 wherever it can import it.
_psycopg = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "psycopg"}
sys.modules["psycopg"] = None  # type: ignore[assignment]  # what an import of nothing looks like
import django.db.backends.postgresql.base  # noqa: E402, F401 - chooses its driver now
from django.db.backends.postgresql.psycopg_any import is_psycopg3  # noqa: E402 - as above

del sys.modules["psycopg"]
sys.modules.update(_psycopg)

from tests.django.inside import settings as inside  # noqa: E402 - imports the driver

globals().update({name: value for name, value in vars(inside).items() if name.isupper()})

assert not is_psycopg3
