"""Permissions, the three roles that bundle them, and the principal that has them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outbox.errors import InvalidSettings
from outbox.operator.acts import ACTS

#: See everything, bodies masked; cancel bulk jobs; see bodies as they are. Each act has a permission of its own.
VIEW, CANCEL, REVEAL = "view", "bulk_job:cancel", "payload:read"


class Role(enum.StrEnum):
    """A bundle of permissions; each role has those of the one before it.

    ``viewer`` sees, with bodies masked. ``operator`` acts where nothing is lost. ``admin`` decides halves, compensates
    local transactions and sees bodies unmasked.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def permissions(self) -> frozenset[str]:
        """What the role may do."""
        return ROLES[self]

    @classmethod
    def _missing_(cls, value: object) -> Role:
        raise InvalidSettings(f"role {value!r} must be one of: {', '.join(cls)}")


_VIEWER = frozenset({VIEW})
_OPERATOR = _VIEWER | {CANCEL, *(act.permission for act in ACTS.values() if act.role == "operator")}

#: Every permission that there is.
PERMISSIONS = _OPERATOR | {REVEAL, *(act.permission for act in ACTS.values())}
#: The permissions of each role.
ROLES = {Role.VIEWER: _VIEWER, Role.OPERATOR: _OPERATOR, Role.ADMIN: PERMISSIONS}


@dataclass(frozen=True, slots=True)
class Principal:
    """The sender of a request: ``id`` is what the audit records, ``name`` what the pages show.

    Raises:
        InvalidSettings: a permission that isn't one of `PERMISSIONS`.
    """

    id: str
    name: str
    permissions: frozenset[str] = _VIEWER

    def __post_init__(self) -> None:
        if unknown := sorted(self.permissions - PERMISSIONS):
            raise InvalidSettings(f"permission {unknown[0]!r} must be one of: {', '.join(sorted(PERMISSIONS))}")

    @classmethod
    def of(cls, id: str, role: Role | str = Role.VIEWER, *, name: str | None = None) -> Principal:  # noqa: A002
        """Return a principal of a role: ``viewer``, ``operator`` or ``admin``.

        Raises:
            InvalidSettings: there is no such role.
        """
        return cls(id, name or id, Role(role).permissions)

    @property
    def role(self) -> str:
        """The biggest role whose permissions the principal has; ``custom`` where it has none of them."""
        return next((str(role) for role in reversed(Role) if self.permissions >= role.permissions), "custom")

    def may(self, permission: str) -> bool:
        """Return whether the principal has a permission."""
        return permission in self.permissions
