-- What lies in the database, in a schema of its own. Run once, on a database that has none of it.
--
--     rows      all that features keep; numbers of versions are fences
--     members   of the sets that are rows
--     items     messages; state 0 waiting, 1 late, 2 held, 3 waiting for a turn of its tenant
--     turns     of a fair queue the turn that is served (tenant ''), and the last of each tenant
--     holds     a row per consumer
--     watches   topics that processes wait for, each with the channel of the process
--
-- A moment is a bigint: microseconds since 1970. Names that users give are bytea: text has neither
-- NUL nor surrogates. Indexes on what a plain task changes are few: each of its writes costs each.

CREATE SCHEMA IF NOT EXISTS machinery;

-- oldest: version of this library's schema that can still work with these tables.
CREATE TABLE machinery.schema_version (version int PRIMARY KEY, oldest int NOT NULL);

-- Versions, fences and ids. Each connection moves it up to the server's clock. So after a promotion
-- of a replica that had not seen all, no number is given twice, if the clocks of the two servers
-- differ by less than the promotion took.
CREATE SEQUENCE machinery.numbers;

-- sweep_at: when to look whether the row is over. members: of a set, how many there are.
CREATE TABLE machinery.rows (
    kind text COLLATE "C" NOT NULL, id bytea NOT NULL, version bigint NOT NULL,
    expires_at bigint, at bigint, name bytea, body bytea NOT NULL,
    kept_kind text COLLATE "C", kept_id bytea, sweep_at bigint, members int,
    PRIMARY KEY (kind, id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE machinery.rows ALTER body SET STORAGE EXTERNAL;
CREATE INDEX rows_listed ON machinery.rows (kind, at, id) WHERE at IS NOT NULL;
CREATE INDEX rows_sweep ON machinery.rows (sweep_at) WHERE sweep_at IS NOT NULL;

CREATE TABLE machinery.members (
    kind text COLLATE "C" NOT NULL, id bytea NOT NULL, member bytea NOT NULL,
    PRIMARY KEY (kind, id, member)
);

-- Here, and not with the functions: to make a trigger anew waits for all that write.
CREATE FUNCTION machinery.forget_members() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM machinery.members WHERE kind = OLD.kind AND id = OLD.id;
    RETURN NULL;
END $$;
CREATE TRIGGER rows_deleted AFTER DELETE ON machinery.rows
    FOR EACH ROW WHEN (OLD.members IS NOT NULL) EXECUTE FUNCTION machinery.forget_members();

-- turn: as in connections/sqlite/schema.py; below 0 of one that has waited.
CREATE TABLE machinery.items (
    id bigint PRIMARY KEY DEFAULT nextval('machinery.numbers'), queue bytea NOT NULL,
    state smallint NOT NULL, priority int NOT NULL, turn bigint NOT NULL, due bigint NOT NULL,
    put_at bigint NOT NULL, tenant bytea, count int NOT NULL DEFAULT 0,
    strikes int NOT NULL DEFAULT 0, hold text COLLATE "C", claim bigint,
    runs boolean NOT NULL DEFAULT false, body bytea NOT NULL
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE machinery.items ALTER body SET STORAGE EXTERNAL;
CREATE INDEX items_waiting ON machinery.items (queue, priority DESC, turn, id)
    WHERE state = 0 AND turn >= 0;
CREATE INDEX items_waited ON machinery.items (queue, priority DESC, turn, id)
    WHERE state = 0 AND turn < 0;
CREATE INDEX items_late ON machinery.items (due, id) WHERE state = 1;
CREATE INDEX items_held ON machinery.items (hold) WHERE state = 2;
CREATE INDEX items_turnless ON machinery.items (queue, priority, tenant, id) WHERE state = 3;

CREATE TABLE machinery.turns (
    queue bytea NOT NULL, priority int NOT NULL, tenant bytea NOT NULL, turn bigint NOT NULL,
    PRIMARY KEY (queue, priority, tenant)
) WITH (fillfactor = 50);

-- oldest_claim: number of the last that named lost ones; a smaller one comes late, and gives nothing.
CREATE TABLE machinery.holds (
    id text COLLATE "C" PRIMARY KEY, body bytea NOT NULL, beat_at bigint NOT NULL,
    lease bigint NOT NULL, stalled boolean NOT NULL DEFAULT false,
    ended boolean NOT NULL DEFAULT false, oldest_claim bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20);

-- Not logged: after a crash those who wait connect anew, and watch again. A channel that pg_notify
-- refuses would fail all steps that tell its topic.
CREATE UNLOGGED TABLE machinery.watches (
    topic bytea NOT NULL, until bigint NOT NULL,
    channel text COLLATE "C" NOT NULL CHECK (channel ~ '^machinery_[0-9a-f]{16}$'),
    PRIMARY KEY (topic, channel)
);
