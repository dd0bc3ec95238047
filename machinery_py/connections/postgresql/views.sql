-- What people may read: docs/reference/postgresql-schema.md. Nothing of the library reads it.

-- A body that is JSON; text in jsonb has no NUL: it becomes U+FFFD.
CREATE OR REPLACE FUNCTION machinery.document(_body bytea) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
DECLARE
    document text := convert_from(_body, 'UTF8');
BEGIN
    IF position('\u0000' IN document) > 0 THEN
        document := regexp_replace(document, '(?<!\\)((\\\\)*)\\u0000', '\1\\ufffd', 'g');
    END IF;
    RETURN document::jsonb;
END $$;

-- A name; one that is no text of the database is shown with escapes.
CREATE OR REPLACE FUNCTION machinery.name_of(_name bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(_name, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
    RETURN encode(_name, 'escape');
END $$;

-- id: the UUID's bytes, by which one task is found at once: WHERE id = 'task_1c9e...'.
CREATE OR REPLACE VIEW machinery.tasks AS
SELECT t.doc->0->>'task_uuid' AS uuid,
    t.doc->0->>'task_name' AS name,
    coalesce(t.doc->0->>'state', 'PENDING') AS state,
    t.doc->0->>'queue' AS queue,
    coalesce((t.doc->0->>'attempt')::int, 1) AS attempt,
    (t.doc->0->>'created_at')::timestamptz AS created_at,
    (t.doc->0->>'started_at')::timestamptz AS started_at,
    (t.doc->0->>'finished_at')::timestamptz AS finished_at,
    (t.doc->0->>'eta')::timestamptz AS eta,
    t.doc->0->>'worker' AS worker,
    t.doc->0->>'error' AS error,
    t.doc->0->>'error_type' AS error_type,
    (SELECT jsonb_agg(r.result->'value')
        FROM jsonb_array_elements(t.doc->0->'results') r(result)) AS results,
    t.id
FROM (
    SELECT r.id, d.doc FROM machinery.rows r CROSS JOIN LATERAL machinery.document(r.body) d(doc)
    -- is_there would read the row that keeps it with the rights of who looks.
    WHERE r.kind = 'task' AND (
        r.expires_at IS NULL OR r.expires_at > machinery.moment(NULL)
        OR EXISTS (
            SELECT 1 FROM machinery.rows k WHERE k.kind = r.kept_kind AND k.id = r.kept_id
            AND (k.expires_at IS NULL OR k.expires_at > machinery.moment(NULL))))
) t WHERE jsonb_typeof(t.doc->0) = 'object';

CREATE OR REPLACE VIEW machinery.queues AS
SELECT machinery.name_of(q.queue) AS queue,
    coalesce(i.waiting, 0) AS waiting,
    coalesce(i.late, 0) AS late,
    coalesce(i.running, 0) AS running,
    (SELECT count(*) FROM machinery.rows d WHERE d.kind = 'dead' AND d.name = q.queue) AS dead,
    to_timestamp(i.oldest_at / 1e6) AS oldest_at,
    EXISTS (SELECT 1 FROM machinery.rows c WHERE c.kind = 'closed' AND c.id = q.queue) AS paused
FROM (
    SELECT r.id AS queue FROM machinery.rows r WHERE r.kind = 'queue'
    UNION SELECT i.queue FROM machinery.items i
    UNION SELECT r.name FROM machinery.rows r WHERE r.kind = 'dead' AND r.name IS NOT NULL
) q LEFT JOIN (
    SELECT i.queue, count(*) FILTER (WHERE i.state IN (0, 3)) AS waiting,
        count(*) FILTER (WHERE i.state = 1) AS late, count(*) FILTER (WHERE i.state = 2) AS running,
        min(i.put_at) FILTER (WHERE i.state IN (0, 3)) AS oldest_at
    FROM machinery.items i GROUP BY i.queue
) i ON i.queue = q.queue;

CREATE OR REPLACE VIEW machinery.dead_letters AS
SELECT d.doc->>'id' AS id,
    d.doc->>'uuid' AS uuid,
    d.doc->>'name' AS name,
    d.doc->>'queue' AS queue,
    d.doc->>'reason' AS reason,
    d.doc->>'error' AS error,
    (d.doc->>'strikes')::int AS strikes,
    (d.doc->>'died_at')::timestamptz AS died_at
FROM machinery.rows r CROSS JOIN LATERAL machinery.document(r.body) d(doc)
WHERE r.kind = 'dead';
