"""SQL of revisions that make a table partitioned: the old one becomes the DEFAULT partition, without being read."""

from __future__ import annotations

from collections.abc import Sequence

# What follows the name of a table would stay behind with the old one.
_REFUSE = """
DO $$
DECLARE found text;
BEGIN
    SELECT string_agg(what, ', ') INTO found FROM (
        SELECT format('policy %I on %s', polname, polrelid::regclass) AS what, polrelid AS relid FROM pg_policy
         UNION ALL
        SELECT format('trigger %I on %s', tgname, tgrelid::regclass), tgrelid FROM pg_trigger WHERE NOT tgisinternal
         UNION ALL
        SELECT format('rule %I on %s', rulename, ev_class::regclass), ev_class FROM pg_rewrite
         UNION ALL
        SELECT format('foreign key %I of %s', conname, conrelid::regclass), confrelid FROM pg_constraint
         WHERE contype = 'f'
         UNION ALL
        SELECT format('publication %I', p.pubname), r.prrelid
          FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
    ) o WHERE relid IN ({tables});
    IF found IS NOT NULL THEN
        RAISE EXCEPTION 'the tables of the outbox become partitioned ones, and these would be lost: %', found
              USING HINT = 'Drop them, upgrade, and make them again.';
    END IF;
END $$"""

# Indexes of the table's own, and those that somebody has added, are made again for all partitions: that takes those of
# the old table over, and builds nothing. Owner and privileges are those of the old table.
_PARTITION = """
DO $$
DECLARE
    definitions text[] := ARRAY(SELECT pg_get_indexdef(indexrelid) FROM pg_index
                                 WHERE indrelid = '{s}.{table}'::regclass AND NOT indisprimary AND indisvalid
                                   AND NOT indisunique);
    each record;
    definition text;
BEGIN
    FOR each IN SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
                 WHERE indrelid = '{s}.{table}'::regclass LOOP
        EXECUTE format('ALTER INDEX {s}.%I RENAME TO %I', each.relname, left(each.relname, 55) || '_default');
    END LOOP;
    ALTER TABLE {s}.{table} RENAME TO {table}_default;
    CREATE TABLE {s}.{table} (
        LIKE {s}.{table}_default INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE
             INCLUDING COMMENTS,
        CONSTRAINT pk_{table} PRIMARY KEY ({key})
    ) PARTITION BY RANGE ({column});
    ALTER TABLE {s}.{table} ATTACH PARTITION {s}.{table}_default DEFAULT;
    FOREACH definition IN ARRAY definitions LOOP
        EXECUTE definition;
    END LOOP;
    FOR each IN SELECT a.privilege_type, a.is_grantable, NULL AS attname,
                       CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS grantee
                  FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
                 WHERE c.oid = '{s}.{table}_default'::regclass AND a.grantee <> c.relowner
                 UNION ALL
                SELECT a.privilege_type, a.is_grantable, quote_ident(t.attname),
                       CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
                  FROM pg_attribute t CROSS JOIN LATERAL aclexplode(t.attacl) a
                 WHERE t.attrelid = '{s}.{table}_default'::regclass LOOP
        EXECUTE concat('GRANT ', each.privilege_type, ' (' || each.attname || ')', ' ON {s}.{table} TO ', each.grantee,
                       CASE WHEN each.is_grantable THEN ' WITH GRANT OPTION' END);
    END LOOP;
    FOR each IN SELECT relowner::regrole::text AS name FROM pg_class
                 WHERE oid = '{s}.{table}_default'::regclass
                   AND relowner <> (SELECT relowner FROM pg_class WHERE oid = '{s}.{table}'::regclass) LOOP
        EXECUTE 'ALTER TABLE {s}.{table} OWNER TO ' || each.name;
    END LOOP;
END $$"""


def refuse(*tables: str) -> str:
    """Return what fails where something hangs on one of these tables that wouldn't follow its name."""
    return _REFUSE.replace("{tables}", ", ".join(f"'{{s}}.{table}'::regclass" for table in tables))


def partition(table: str, column: str, key: Sequence[str]) -> str:
    """Return what makes a table one that is partitioned by ranges of a column, with a primary key."""
    return _PARTITION.replace("{table}", table).replace("{column}", column).replace("{key}", ", ".join(key))
