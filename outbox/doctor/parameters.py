"""PostgreSQL's configuration parameters: their values, and the SQL that changes one where it was set."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.doctor.patient import Patient
from outbox.store import doctor as store


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as it is for the doctor's session, and where that value comes from (``pg_settings.source``)."""

    name: str
    value: str
    source: str


def parameters(patient: Patient, *names: str) -> dict[str, Parameter]:
    """Return parameters by name."""
    (rows,) = patient.read(store.parameters(names))
    return {row[0]: Parameter(*row) for row in rows}


def set_to(patient: Patient, parameter: Parameter, value: str) -> str:
    """Return the SQL that gives a parameter this value, for all or where it was set otherwise."""
    role, database = patient.server.role, patient.server.database
    match parameter.source:
        case "database":
            return f"ALTER DATABASE {database} RESET {parameter.name};"
        case "user":
            return f"ALTER ROLE {role} RESET {parameter.name};"
        case "database user":
            return f"ALTER ROLE {role} IN DATABASE {database} RESET {parameter.name};"
        case "client":
            return f"leave {parameter.name} out of the connection's options (URL, PGOPTIONS or connect_args)"
        case "command line":
            return f"start the server without {parameter.name} on its command line"
    return f"ALTER SYSTEM SET {parameter.name} = {value}; SELECT pg_reload_conf();"
