"""``python -m outbox.embedded shop``: a shell, or a command, with a PostgreSQL that runs as long as it does.

``OUTBOX_DATABASE_URL`` names the database there. If the variable is set before, that server is used: a database of this
run is made on it, and dropped at the end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from outbox.embedded import server
from outbox.embedded.external import URL_VARIABLE
from outbox.errors import EmbeddedError


def main() -> int:
    """Run the command; return its exit code, or 69 where there is no PostgreSQL."""
    usage = "%(prog)s [-h] [--folder FOLDER] database [-- command ...]"
    parser = argparse.ArgumentParser(prog="python -m outbox.embedded", description=__doc__, usage=usage)
    parser.add_argument("database", help="The name of the database; it is created if it isn't there.")
    parser.add_argument("--folder", type=Path, help="Keep the data in this folder. Default: gone at the end.")
    parser.epilog = "The command is run in place of your shell."
    # Wherever its options stand: argparse takes no more of them once it has seen the database.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, program = sys.argv[1:end], sys.argv[end + 1 :]
    options, command = parser.parse_args(own), program or [os.environ.get("SHELL", "/bin/sh")]
    try:
        with server([options.database], folder=options.folder) as postgres:
            url = postgres.url(options.database)
            if not program:
                print(f"{URL_VARIABLE} is set in this shell; leave it (exit) to stop PostgreSQL", file=sys.stderr)  # noqa: T201 - a command's own words
            # Ctrl-C is for the command, where it means what it always does; PostgreSQL is stopped when that ends.
            signal.signal(signal.SIGINT, lambda *_: None)
            return subprocess.Popen(command, env={**os.environ, URL_VARIABLE: url}).wait()  # noqa: S603 - the user's own
    except EmbeddedError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command's own words
        return 69


if __name__ == "__main__":
    sys.exit(main())
