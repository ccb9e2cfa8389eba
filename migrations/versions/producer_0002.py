"""Half messages, ops and messages in partitions by id, which prune empties as a whole.

The old tables become the DEFAULT partitions, with all their rows and without being read. What is built before, outside
of the transaction, keeps the time short in which nobody can send.
"""

from inspect import cleandoc

from alembic import op

revision = "producer_0002"
down_revision = "producer_0001"
branch_labels = None
depends_on = None

#: Indexes that are built before the transaction of this revision, while all goes on: (name, the table and columns).
BEFORE = (
    ("op_message_sequence_0002", "op_message (sequence)"),
    ("ix_message_topic_queue_position", "message (topic, queue, position)"),
)

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
    ) o WHERE relid IN ('{s}.half_message'::regclass, '{s}.op_message'::regclass, '{s}.message'::regclass);
    IF found IS NOT NULL THEN
        RAISE EXCEPTION 'the tables of the outbox become partitioned ones, and these would be lost: %', found
              USING HINT = 'Drop them, upgrade, and make them again.';
    END IF;
END $$"""

# In the order in which a pass of dispatch takes them: it has read no cursor that is out of date below.
_LOCK = "LOCK TABLE {s}.dispatch_cursor, {s}.half_message, {s}.op_message, {s}.message IN ACCESS EXCLUSIVE MODE"

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


def _partition(table: str, column: str, key: str) -> str:
    return _PARTITION.replace("{table}", table).replace("{column}", column).replace("{key}", key)


UPGRADE = (
    _REFUSE,
    _LOCK,
    *(f"CREATE INDEX IF NOT EXISTS {name} ON {{s}}.{target}" for name, target in BEFORE),
    "DROP INDEX {s}.ix_op_message_sequence",
    "ALTER INDEX {s}.op_message_sequence_0002 RENAME TO ix_op_message_sequence",
    "ALTER TABLE {s}.message DROP CONSTRAINT pk_message",
    "ALTER TABLE {s}.message ADD CONSTRAINT pk_message PRIMARY KEY USING INDEX ix_message_half_id_send_number",
    _partition("half_message", "id", "id"),
    _partition("op_message", "half_id", "half_id"),
    _partition("message", "half_id", "half_id, send_number"),
    # The log is still the same one, though its table isn't.
    """
    UPDATE {s}.dispatch_cursor SET log = regexp_replace(log, '[0-9]+$', '{s}.message'::regclass::oid::text)
     WHERE log LIKE concat('%.', '{s}.message_default'::regclass::oid)""",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(_in_schema(statement))


def downgrade() -> None:
    """Nothing: what comes next drops the tables, in whatever form they are."""


def _in_schema(statement: str) -> str:
    return cleandoc(statement).replace("{s}", f'"{op.get_context().version_table_schema}"')
