"""How the framework talks to PostgreSQL: statements in one round trip, the hook at commit, tables, migrations."""
