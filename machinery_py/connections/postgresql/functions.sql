-- Steps on the tables: each call is one statement, and so one transaction.
--
-- `_now` is the moment in tests; NULL: the server's clock, as it is now and not at the begin of the
-- transaction. Lists come as JSON, which costs the client half of what arrays do; bodies alone are
-- an array, since JSON has no bytes. All of it runs READ COMMITTED: a statement behind a lock sees
-- what was committed while the lock was waited for.
--
-- Locks, in this order for all steps of a call: rows, messages, new rows; each sorted. commit_new
-- takes its new rows first and as they come: two that send the same UUIDs in opposite orders may meet
-- in a deadlock, and the one that loses is repeated.
-- Advisory locks: 1 making the tables, 2 closed queues, 4 turns, 6 numbers; and one for each queue
-- with a limit.
--
-- The settings at the end of each function: plans are made once, and use indexes. A plan that was
-- made while a table was empty would read it from end to end for ever.

CREATE OR REPLACE FUNCTION machinery.moment(_now bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(_now, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
$$;

CREATE OR REPLACE FUNCTION machinery.topic_of(_queue bytea) RETURNS bytea LANGUAGE sql IMMUTABLE AS
$$ SELECT 'queue '::bytea || _queue $$;

-- Begin a connection. Out: versions of the tables, microseconds by the server's clock. It has the
-- rights of who owns it, so that no other role has to have that of setting the sequence.
CREATE OR REPLACE FUNCTION machinery.connect(
    _now bigint, OUT version int, OUT oldest int, OUT at bigint
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT v.version, v.oldest INTO version, oldest FROM machinery.schema_version v;
    -- Whoever may connect may call it: no moment is far ahead.
    at := least(machinery.moment(_now), machinery.moment(NULL) + 86400000000);
    -- Two that moved the sequence at once might move it back; and so might one, if others drew all
    -- numbers up to the clock meanwhile: a tenth of a second is more than they draw.
    PERFORM pg_advisory_xact_lock(hashtext('machinery'), 6);
    IF nextval('machinery.numbers') < at - 100000 THEN
        PERFORM setval('machinery.numbers', at);
    END IF;
    at := machinery.moment(NULL);
END $$;

-- Whether the row is there that keeps another one.
CREATE OR REPLACE FUNCTION machinery.is_kept(_kind text, _id bytea, _now bigint) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (
        SELECT 1 FROM machinery.rows r WHERE r.kind = _kind AND r.id = _id
        AND (r.expires_at IS NULL OR r.expires_at > _now
             OR r.kept_kind IS NOT NULL AND machinery.is_kept(r.kept_kind, r.kept_id, _now)));
END $$;

-- Whether a row is not over.
CREATE OR REPLACE FUNCTION machinery.is_there(
    _expires_at bigint, _kept_kind text, _kept_id bytea, _now bigint
) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT _expires_at IS NULL OR _expires_at > _now
        OR _kept_kind IS NOT NULL AND machinery.is_kept(_kept_kind, _kept_id, _now)
$$;

-- How many messages wait in a queue, and whether any does.
CREATE OR REPLACE FUNCTION machinery.count_waiting(_queue bytea) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT count(*) FROM machinery.items i
            WHERE i.queue = _queue AND i.state = 0 AND i.turn >= 0)
        + (SELECT count(*) FROM machinery.items i
           WHERE i.queue = _queue AND i.state = 0 AND i.turn < 0)
        + (SELECT count(*) FROM machinery.items i WHERE i.queue = _queue AND i.state = 3);
END $$;

CREATE OR REPLACE FUNCTION machinery.is_waiting(_queue bytea) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (SELECT 1 FROM machinery.items i
            WHERE i.queue = _queue AND i.state = 0 AND i.turn >= 0)
        OR EXISTS (SELECT 1 FROM machinery.items i
           WHERE i.queue = _queue AND i.state = 0 AND i.turn < 0)
        OR EXISTS (SELECT 1 FROM machinery.items i WHERE i.queue = _queue AND i.state = 3);
END $$;

-- Wake the processes that watch these topics. Whoever begins to watch while this transaction is
-- under way may miss it, and looks a second time.
CREATE OR REPLACE FUNCTION machinery.tell(_topics bytea[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(w.channel, encode(w.topic, 'hex'))
        FROM machinery.watches w WHERE w.topic = ANY(_topics);
END $$;

CREATE OR REPLACE FUNCTION machinery.read(_now bigint, _kinds text[], _ids bytea[])
RETURNS TABLE (
    n bigint, version bigint, body bytea, at bigint, name bytea, kept_kind text, kept_id bytea
) LANGUAGE plpgsql STABLE AS $$
DECLARE now bigint := machinery.moment(_now);
BEGIN
    RETURN QUERY
    SELECT u.n, r.version, r.body, r.at, r.name, r.kept_kind, r.kept_id
    FROM unnest(_kinds, _ids) WITH ORDINALITY u(kind, id, n)
    JOIN machinery.rows r ON r.kind = u.kind AND r.id = u.id
    WHERE machinery.is_there(r.expires_at, r.kept_kind, r.kept_id, now);
END $$;

-- A change or a condition of a row. op: k a condition alone, x the same of a row that is not there,
-- whose place is locked; c create, w write, d delete; s is a set; of a join (j): y the row of the
-- whole set, b one beside a member.
-- wants: the version that it must have, 0: none; once: if it is there, the step is a repeat.
-- s: number of the step; b: of the body; last: the step's version is that of this row.
-- found, has, next: whether there is such a row, its version if it is not over, the new version.
DO $$ BEGIN
    CREATE TYPE machinery.row_op AS (
        s int, op text, kind text, id bytea, wants bigint, once boolean, lives bigint, at bigint,
        name bytea, kept_kind text, kept_id bytea, b int, last boolean, j int,
        found boolean, has bigint, next bigint);
EXCEPTION WHEN duplicate_object THEN NULL;
END $$;

-- Write a row, whatever is there.
CREATE OR REPLACE FUNCTION machinery.put(_op machinery.row_op, _body bytea, _now bigint)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO machinery.rows
        (kind, id, version, expires_at, at, name, body, kept_kind, kept_id, sweep_at)
    VALUES (_op.kind, _op.id, nextval('machinery.numbers'), _now + _op.lives, _op.at, _op.name,
            _body, _op.kept_kind, _op.kept_id, _now + _op.lives)
    -- Not excluded.version: that number was drawn before the lock was waited for.
    ON CONFLICT (kind, id) DO UPDATE SET
        version = nextval('machinery.numbers'), expires_at = excluded.expires_at,
        at = excluded.at, name = excluded.name, body = excluded.body,
        kept_kind = excluded.kept_kind, kept_id = excluded.kept_id, sweep_at = excluded.sweep_at;
END $$;

-- Queue new messages, in their order.
CREATE OR REPLACE FUNCTION machinery.push(
    _pushes json, _results int[], _bodies bytea[], _now bigint
) RETURNS void LANGUAGE plpgsql AS $$  -- not sql, which would be planned at each call
BEGIN
    INSERT INTO machinery.items (queue, state, priority, turn, due, put_at, tenant, body)
        SELECT p.queue, CASE WHEN p.due > _now THEN 1 WHEN p.tenant IS NOT NULL THEN 3 ELSE 0 END,
            p.priority, p.turn, p.due, _now, p.tenant, coalesce(_bodies[p.b], '')
        FROM ROWS FROM (json_to_recordset(_pushes) AS (s int, id bigint, queue bytea, b int,
            priority int, turn bigint, due bigint, tenant bytea))
            WITH ORDINALITY AS p(s, id, queue, b, priority, turn, due, tenant, n)
        WHERE _results[p.s] = 0 AND p.id IS NULL ORDER BY p.n;
END $$;

-- Carry out steps, each whole or not at all.
--
-- No two steps of a call touch one row or message, but for conditions, creations and sets: the
-- client sees to that. So all are compared at once, and then written at once.
--
-- In: _lazy: a power cut may undo it; _closing: a queue is closed or opened; _rows as row_op;
--     _items {s, hold, id, count, claim, op}, with op h hold, d delete, p is pushed;
--     _pushes {s, id, queue, b, priority, turn, due, tenant, same}; _rooms {s, queue, most, adds};
--     _joins {s, j, kind, id, member, whole, ready_kind, ready_id}, whose rows are ops of this j:
--     y the row of the whole set, b one beside a member; _tell {s, topic}.
-- Out: of each step 0 committed, 1 conflict, 2 repeated, 3 gone, 4 no room; the version of its last
--     row; how many wait in the queue that has no room.
-- Raises MP001: another one made a row at this moment; call it again.
CREATE OR REPLACE FUNCTION machinery.commit(
    _now bigint, _steps int, _lazy boolean, _closing boolean, _rows json, _items json,
    _pushes json, _rooms json, _joins json, _tell json, _bodies bytea[],
    OUT at bigint, OUT results int[], OUT versions bigint[], OUT waiting bigint[]
) LANGUAGE plpgsql AS $f$
#variable_conflict use_column
DECLARE
    ops machinery.row_op[];
    op machinery.row_op;
    makes machinery.row_op[] := '{}';
    changes machinery.row_op[] := '{}';
    drops machinery.row_op[] := '{}';
    one record;
    now bigint := machinery.moment(_now);
    wanted bigint;
    made bigint;
BEGIN
    at := now;
    results := array_fill(0, ARRAY[_steps]);
    IF _lazy THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF _closing THEN
        PERFORM pg_advisory_xact_lock(hashtext('machinery'), 2);  -- waits for claims
    END IF;

    IF _rows IS NOT NULL THEN
        versions := array_fill(0::bigint, ARRAY[_steps]);
        -- Whoever waits for a lock here gets the row as it is then. One that comes meanwhile is not
        -- seen: it is in the way of ours below.
        ops := ARRAY(
            SELECT ROW(o.s, o.op, o.kind, o.id, o.wants, o.once, o.lives, o.at, o.name, o.kept_kind,
                       o.kept_id, o.b, o.last, o.j, r.version IS NOT NULL,
                       CASE WHEN r.version IS NULL OR NOT machinery.is_there(
                           r.expires_at, r.kept_kind, r.kept_id, now) THEN 0 ELSE r.version END,
                       CASE WHEN o.op IN ('w', 'c', 's', 'x') THEN nextval('machinery.numbers') END
                   )::machinery.row_op
            FROM (SELECT * FROM json_populate_recordset(NULL::machinery.row_op, _rows)
                  ORDER BY kind, id) o
            LEFT JOIN LATERAL (
                SELECT c.version, c.expires_at, c.kept_kind, c.kept_id FROM machinery.rows c
                    WHERE o.op = 'c' AND c.kind = o.kind AND c.id = o.id
                UNION ALL
                SELECT * FROM (
                    SELECT l.version, l.expires_at, l.kept_kind, l.kept_id FROM machinery.rows l
                    WHERE o.op <> 'c' AND l.kind = o.kind AND l.id = o.id FOR UPDATE) locked
            ) r ON true);
        FOREACH op IN ARRAY ops LOOP
            IF op.once AND op.has <> 0 THEN
                results[op.s] := 2;
            ELSIF op.wants <> op.has AND results[op.s] = 0 THEN
                results[op.s] := 1;
            END IF;
        END LOOP;
    END IF;

    IF _items IS NOT NULL THEN
        PERFORM 1 FROM machinery.items i
            WHERE i.id = ANY(ARRAY(SELECT t.id FROM json_to_recordset(_items) AS t(id bigint)))
            ORDER BY i.id FOR UPDATE;
        FOR one IN
            SELECT DISTINCT t.s
            FROM json_to_recordset(_items)
                AS t(s int, hold text, id bigint, count int, claim bigint)
            LEFT JOIN machinery.items i ON i.id = t.id
            WHERE i.id IS NULL OR CASE
                WHEN t.hold = '' THEN i.hold IS NOT NULL
                ELSE i.hold IS DISTINCT FROM t.hold OR i.count <> t.count
                    OR i.claim IS DISTINCT FROM t.claim OR NOT EXISTS (
                        SELECT 1 FROM machinery.holds h WHERE h.id = t.hold AND NOT h.ended)
            END
        LOOP
            IF results[one.s] = 0 THEN
                results[one.s] := 3;
            END IF;
        END LOOP;
    END IF;

    IF _rooms IS NOT NULL THEN
        waiting := array_fill(0::bigint, ARRAY[_steps]);
        FOR one IN
            SELECT * FROM json_to_recordset(_rooms)
                AS r(s int, queue bytea, most bigint, adds bigint) ORDER BY queue
        LOOP
            CONTINUE WHEN results[one.s] <> 0;
            PERFORM pg_advisory_xact_lock(
                hashtext('machinery rooms'), hashtext(encode(one.queue, 'hex')));
            made := machinery.count_waiting(one.queue);
            IF made + one.adds > one.most THEN
                results[one.s] := 4;
                waiting[one.s] := made;
            END IF;
        END LOOP;
    END IF;

    IF _rows IS NOT NULL THEN
        FOREACH op IN ARRAY ops LOOP
            IF results[op.s] = 0 THEN
                IF op.op IN ('w', 'c', 's', 'x') AND NOT op.found THEN
                    makes := makes || op;
                ELSIF op.op = 'w' OR op.op = 'c' AND op.has = 0 THEN
                    changes := changes || op;
                END IF;
                IF op.op = 'd' AND op.found OR op.op = 'x' AND NOT op.found THEN
                    drops := drops || op;
                END IF;
                IF op.last THEN
                    versions[op.s] := op.next;
                END IF;
            END IF;
        END LOOP;
        IF cardinality(makes) > 0 THEN
            wanted := (SELECT count(DISTINCT (o.kind, o.id)) FROM unnest(makes) o);
            INSERT INTO machinery.rows (kind, id, version, expires_at, at, name, body, kept_kind,
                kept_id, sweep_at, members)
            SELECT DISTINCT ON (o.kind, o.id) o.kind, o.id, o.next, now + o.lives, o.at, o.name,
                coalesce(_bodies[o.b], ''), o.kept_kind, o.kept_id, now + o.lives,
                CASE o.op WHEN 's' THEN 0 END
            FROM unnest(makes) o ORDER BY o.kind, o.id, o.s
            ON CONFLICT (kind, id) DO NOTHING;
            GET DIAGNOSTICS made = ROW_COUNT;
            IF made <> wanted THEN
                RAISE EXCEPTION 'a row was made meanwhile' USING ERRCODE = 'MP001';
            END IF;
        END IF;
        IF cardinality(changes) > 0 THEN
            UPDATE machinery.rows r SET version = o.next, expires_at = now + o.lives, at = o.at,
                    name = o.name, body = coalesce(_bodies[o.b], ''), kept_kind = o.kept_kind,
                    kept_id = o.kept_id, sweep_at = now + o.lives
                FROM unnest(changes) o WHERE r.kind = o.kind AND r.id = o.id AND (
                    o.op = 'w' OR NOT machinery.is_there(
                        r.expires_at, r.kept_kind, r.kept_id, now));
        END IF;
        IF cardinality(drops) > 0 THEN
            DELETE FROM machinery.rows r USING unnest(drops) o
                WHERE r.kind = o.kind AND r.id = o.id;
        END IF;
    END IF;

    IF _joins IS NOT NULL THEN
        FOR one IN
            SELECT * FROM json_to_recordset(_joins) AS j(s int, j int, kind text, id bytea,
                member bytea, whole bigint, ready_kind text, ready_id bytea) ORDER BY j.j
        LOOP
            CONTINUE WHEN results[one.s] <> 0 OR EXISTS (
                SELECT 1 FROM machinery.rows r WHERE r.kind = one.ready_kind AND r.id = one.ready_id
                AND machinery.is_there(r.expires_at, r.kept_kind, r.kept_id, now));
            UPDATE machinery.rows r SET members = 0, expires_at = NULL, sweep_at = NULL
                WHERE r.kind = one.kind AND r.id = one.id
                AND (r.members IS NULL OR NOT machinery.is_there(
                    r.expires_at, r.kept_kind, r.kept_id, now));
            IF FOUND THEN
                DELETE FROM machinery.members m WHERE m.kind = one.kind AND m.id = one.id;
            END IF;
            INSERT INTO machinery.members VALUES (one.kind, one.id, one.member)
                ON CONFLICT DO NOTHING;
            CONTINUE WHEN NOT FOUND;
            UPDATE machinery.rows r
                SET members = r.members + 1, version = nextval('machinery.numbers')
                WHERE r.kind = one.kind AND r.id = one.id RETURNING r.members INTO made;
            PERFORM machinery.put(o, coalesce(_bodies[o.b], ''), now) FROM unnest(ops) o
                WHERE o.j = one.j AND (o.op = 'b' OR o.op = 'y' AND made >= one.whole);
        END LOOP;
        -- Sets that nobody has joined, since they were whole before.
        DELETE FROM machinery.rows r USING unnest(ops) o
            WHERE o.op = 's' AND NOT o.found AND r.kind = o.kind AND r.id = o.id AND r.members = 0;
    END IF;

    IF _items IS NOT NULL THEN
        DELETE FROM machinery.items i
            USING json_to_recordset(_items) AS t(s int, id bigint, op text)
            WHERE t.op = 'd' AND results[t.s] = 0 AND i.id = t.id;
    END IF;
    IF _pushes IS NOT NULL THEN
        IF _items IS NOT NULL THEN
            UPDATE machinery.items i SET queue = p.queue, body = coalesce(_bodies[p.b], i.body),
                    hold = NULL, claim = NULL, runs = false,
                    state = CASE WHEN p.same THEN 0 WHEN p.due > now THEN 1
                                 WHEN p.tenant IS NOT NULL THEN 3 ELSE 0 END,
                    priority = CASE WHEN p.same THEN i.priority ELSE p.priority END,
                    turn = CASE WHEN p.same THEN i.turn ELSE p.turn END,
                    due = CASE WHEN p.same THEN i.due ELSE p.due END,
                    tenant = CASE WHEN p.same THEN i.tenant ELSE p.tenant END
                FROM json_to_recordset(_pushes) AS p(s int, id bigint, queue bytea, b int,
                    priority int, turn bigint, due bigint, tenant bytea, same boolean)
                WHERE results[p.s] = 0 AND i.id = p.id;
        END IF;
        PERFORM machinery.push(_pushes, results, _bodies, now);
    END IF;
    IF _tell IS NOT NULL THEN
        PERFORM machinery.tell(ARRAY(
            SELECT t.topic FROM json_to_recordset(_tell) AS t(s int, topic bytea)
            WHERE results[t.s] = 0));
    END IF;
END $f$;

-- The same for steps that make rows, and queue messages: most likely none of the rows is there, so
-- nobody looks before, which would cost as much again. If one is, it is as if nothing had been done.
--
-- In: as commit, with rows that are written if there is none, or once; the last one of each step
--     comes before all others. _closing, _items, _rooms, _joins: nothing.
CREATE OR REPLACE FUNCTION machinery.commit_new(
    _now bigint, _steps int, _lazy boolean, _closing boolean, _rows json, _items json,
    _pushes json, _rooms json, _joins json, _tell json, _bodies bytea[],
    OUT at bigint, OUT results int[], OUT versions bigint[], OUT waiting bigint[]
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now bigint := machinery.moment(_now);
    done record;
BEGIN
    IF _lazy THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    WITH made AS (
        INSERT INTO machinery.rows (kind, id, version, expires_at, at, name, body, kept_kind,
            kept_id, sweep_at)
        SELECT o.kind, o.id, nextval('machinery.numbers'), now + o.lives, o.at, o.name,
            coalesce(_bodies[o.b], ''), o.kept_kind, o.kept_id, now + o.lives
        FROM json_to_recordset(_rows) AS o(kind text, id bytea, lives bigint, at bigint, name bytea,
            kept_kind text, kept_id bytea, b int)
        ON CONFLICT (kind, id) DO NOTHING RETURNING version
    ) SELECT array_agg(m.version) INTO versions FROM made m;
    IF cardinality(versions) IS DISTINCT FROM json_array_length(_rows) THEN
        DELETE FROM machinery.rows r USING json_to_recordset(_rows) AS o(kind text, id bytea)
            WHERE r.kind = o.kind AND r.id = o.id AND r.version = ANY(versions);
        SELECT * INTO done FROM machinery.commit(
            _now, _steps, _lazy, false, _rows, NULL, _pushes, NULL, NULL, _tell, _bodies);
        at := done.at;
        results := done.results;
        versions := done.versions;
        RETURN;
    END IF;
    at := now;
    results := array_fill(0, ARRAY[_steps]);
    PERFORM machinery.push(_pushes, results, _bodies, now);
    PERFORM machinery.tell(ARRAY(SELECT t.topic FROM json_to_recordset(_tell) AS t(topic bytea)));
END $$;

-- commit inside a transaction that goes on: nothing is raised for a row that was made meanwhile,
-- and all processes are told, since those that wait when it commits are not known yet.
CREATE OR REPLACE FUNCTION machinery.commit_within(
    _now bigint, _steps int, _lazy boolean, _closing boolean, _rows json, _items json,
    _pushes json, _rooms json, _joins json, _tell json, _bodies bytea[],
    OUT at bigint, OUT results int[], OUT versions bigint[], OUT waiting bigint[]
) LANGUAGE plpgsql AS $$
DECLARE
    done record;
BEGIN
    LOOP
        BEGIN
            SELECT * INTO done FROM machinery.commit(
                _now, _steps, false, false, _rows, _items, _pushes, NULL, _joins, NULL, _bodies);
            EXIT;
        EXCEPTION WHEN SQLSTATE 'MP001' THEN  -- it is seen now
            CONTINUE;
        END;
    END LOOP;
    PERFORM pg_notify('machinery', encode(t.topic, 'hex'))
        FROM json_to_recordset(_tell) AS t(s int, topic bytea) WHERE done.results[t.s] = 0;
    at := done.at;
    results := done.results;
    versions := done.versions;
    waiting := done.waiting;
END $$;

-- For roles that send, and no more: both have the rights of who owns them, and refuse what is not
-- part of a send. A task, a group, a token or a queue may be made, and not changed; the key of a
-- unique task may be taken.
--
-- In: as commit; _within: as commit_within.
CREATE OR REPLACE FUNCTION machinery.send(
    _within boolean, _now bigint, _steps int, _lazy boolean, _closing boolean, _rows json,
    _items json, _pushes json, _rooms json, _joins json, _tell json, _bodies bytea[],
    OUT at bigint, OUT results int[], OUT versions bigint[], OUT waiting bigint[]
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    done record;
BEGIN
    IF _closing OR _items IS NOT NULL OR _joins IS NOT NULL OR EXISTS (
        SELECT 1 FROM json_to_recordset(_pushes) AS p(id bigint, priority int)
        WHERE p.id IS NOT NULL OR p.priority NOT BETWEEN 0 AND 255
    ) OR EXISTS (
        SELECT 1 FROM json_populate_recordset(NULL::machinery.row_op, _rows) o
        WHERE (o.kind = 'claim' AND o.op IN ('c', 'k', 'x', 'w', 'd')
            OR o.kind IN ('task', 'group', 'token', 'queue')
            AND (o.op IN ('c', 'k', 'x') OR o.op = 'w' AND (o.wants = 0 OR o.once))) IS NOT TRUE
            OR o.kept_kind IS NOT NULL  -- rows that keep each other have no end
    ) THEN
        RAISE insufficient_privilege USING MESSAGE = 'this role may send, and no more';
    END IF;
    -- At a moment ahead, what is there would be over, and might be written; views show no other.
    _now := greatest(0, least(_now, machinery.moment(NULL)));
    IF _within THEN
        SELECT * INTO done FROM machinery.commit_within(
            _now, _steps, _lazy, false, _rows, NULL, _pushes, NULL, NULL, _tell, _bodies);
    ELSE
        SELECT * INTO done FROM machinery.commit(
            _now, _steps, _lazy, false, _rows, NULL, _pushes, _rooms, NULL, _tell, _bodies);
    END IF;
    at := done.at;
    results := done.results;
    versions := done.versions;
    waiting := done.waiting;
END $$;

CREATE OR REPLACE FUNCTION machinery.read_sent(_now bigint, _kinds text[], _ids bytea[])
RETURNS TABLE (
    n bigint, version bigint, body bytea, at bigint, name bytea, kept_kind text, kept_id bytea
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT _kinds <@ ARRAY['task', 'group', 'chord ready', 'claim', 'token'] THEN
        RAISE insufficient_privilege USING MESSAGE = 'this role may send, and no more';
    END IF;
    RETURN QUERY SELECT * FROM machinery.read(_now, _kinds, _ids);
END $$;

REVOKE EXECUTE ON FUNCTION machinery.send, machinery.read_sent FROM PUBLIC;

-- Queue what is due, a step of it, and give turns to what waits for one. Out: when more is due.
CREATE OR REPLACE FUNCTION machinery.promote(_now bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    now bigint := machinery.moment(_now);
    next_due bigint;
    lane record;
    begins bigint;
BEGIN
    SELECT min(i.due) INTO next_due FROM machinery.items i WHERE i.state = 1;
    IF next_due <= now THEN
        UPDATE machinery.items SET state = CASE WHEN tenant IS NULL THEN 0 ELSE 3 END
            WHERE id = ANY(ARRAY(
                SELECT i.id FROM machinery.items i WHERE i.state = 1 AND i.due <= now
                ORDER BY i.due, i.id LIMIT 10000 FOR UPDATE SKIP LOCKED));
        SELECT min(i.due) INTO next_due FROM machinery.items i WHERE i.state = 1;
    END IF;
    IF EXISTS (SELECT 1 FROM machinery.items i WHERE i.state = 3) THEN
        PERFORM pg_advisory_xact_lock(hashtext('machinery'), 4);
        -- Tenants of a queue that was empty begin anew.
        DELETE FROM machinery.turns t WHERE t.tenant <> ''
            AND t.queue IN (SELECT i.queue FROM machinery.items i WHERE i.state = 3)
            AND NOT EXISTS (SELECT 1 FROM machinery.items i
                WHERE i.queue = t.queue AND i.state = 0 AND i.turn >= 0);
        FOR lane IN
            SELECT i.queue, i.priority, i.tenant, array_agg(i.id ORDER BY i.id) AS ids
            FROM (SELECT * FROM machinery.items i WHERE i.state = 3 ORDER BY i.id LIMIT 10000) i
            GROUP BY 1, 2, 3
        LOOP
            -- Not one that is over, and behind all that the tenant has waiting.
            SELECT greatest(coalesce(max(t.turn) FILTER (WHERE t.tenant = ''), 1),
                            coalesce(max(t.turn) FILTER (WHERE t.tenant <> ''), 0) + 1) INTO begins
                FROM machinery.turns t WHERE t.queue = lane.queue AND t.priority = lane.priority
                AND t.tenant IN ('', ':'::bytea || lane.tenant);
            UPDATE machinery.items i SET state = 0, turn = begins + u.n - 1
                FROM unnest(lane.ids) WITH ORDINALITY u(id, n) WHERE i.id = u.id AND i.state = 3;
            INSERT INTO machinery.turns VALUES (
                    lane.queue, lane.priority, ':'::bytea || lane.tenant,
                    begins + cardinality(lane.ids) - 1)
                ON CONFLICT (queue, priority, tenant) DO UPDATE SET turn = excluded.turn;
        END LOOP;
    END IF;
    RETURN next_due;
END $$;

-- Claim up to _items messages of the queues, the first queue first, before their bodies exceed
-- _size bytes. _lost: first what was claimed under this number and later ones; those that are
-- carried out after this one give nothing, since nobody would ask for it again.
-- Out: first a row with next_due alone: when the next late message is due.
CREATE OR REPLACE FUNCTION machinery.claim(
    _now bigint, _hold text, _queues bytea[], _items int, _size bigint, _number bigint, _lost bigint
) RETURNS TABLE (
    next_due bigint, id bigint, queue bytea, body bytea, count int, claim bigint, strikes int,
    put_at bigint, fence bigint
) LANGUAGE plpgsql AS $f$
#variable_conflict use_column
DECLARE
    now bigint := machinery.moment(_now);
    due bigint;
    _queue bytea;
    one record;
    taken bigint[] := '{}';
    again bigint[] := '{}';
    room bigint := _size;
    wanted int := _items;
    waited bigint;
    others bigint;
    left_over boolean := false;
BEGIN
    SELECT min(i.due) INTO due FROM machinery.items i WHERE i.state = 1;
    -- A look that finds nothing writes nothing.
    IF _lost IS NULL AND (due IS NULL OR due > now) AND NOT EXISTS (
        SELECT 1 FROM unnest(_queues) q WHERE machinery.is_waiting(q) AND NOT EXISTS (
            SELECT 1 FROM machinery.rows r WHERE r.kind = 'closed' AND r.id = q)
    ) THEN
        next_due := due;
        RETURN NEXT;
        RETURN;
    END IF;
    -- What a power cut undoes is claimed again.
    PERFORM set_config('synchronous_commit', 'off', true);
    IF due <= now OR EXISTS (SELECT 1 FROM machinery.items i WHERE i.state = 3) THEN
        due := machinery.promote(_now);
    END IF;
    next_due := due;
    RETURN NEXT;
    -- Who ends the hold waits for this claim, and who closes a queue.
    IF _lost IS NULL THEN
        PERFORM 1 FROM machinery.holds h
            WHERE h.id = _hold AND NOT h.ended AND h.oldest_claim <= _number FOR KEY SHARE;
    ELSE  -- and this one for those that are lost
        PERFORM 1 FROM machinery.holds h WHERE h.id = _hold FOR UPDATE;
        UPDATE machinery.holds SET oldest_claim = _number
            WHERE id = _hold AND NOT ended AND oldest_claim <= _number;
    END IF;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock_shared(hashtext('machinery'), 2);

    IF _lost IS NOT NULL THEN
        FOR one IN
            SELECT i.id, octet_length(i.body) AS size FROM machinery.items i
            WHERE i.state = 2 AND i.hold = _hold AND i.claim >= _lost
            ORDER BY i.queue, i.priority DESC, i.turn, i.id
        LOOP
            again := again || one.id;
            room := room - one.size;
        END LOOP;
        wanted := _items - cardinality(again);
    END IF;
    FOREACH _queue IN ARRAY _queues LOOP
        EXIT WHEN cardinality(taken) >= wanted OR left_over;
        CONTINUE WHEN EXISTS (SELECT 1 FROM machinery.rows r
            WHERE r.kind = 'closed' AND r.id = _queue);
        others := wanted - cardinality(taken);
        waited := 0;
        IF EXISTS (SELECT 1 FROM machinery.items i
                   WHERE i.queue = _queue AND i.state = 0 AND i.turn < 0) THEN
            SELECT count(*) INTO waited FROM (SELECT 1 FROM machinery.items i
                WHERE i.queue = _queue AND i.state = 0 AND i.turn >= 0 LIMIT others) o;
            -- While others wait, those that have waited get half of it.
            waited := greatest((others + _number % 2) / 2, others - waited);
        END IF;
        FOR one IN
            SELECT * FROM (
                SELECT w.* FROM (SELECT i.id, octet_length(i.body) AS size, i.priority, i.turn
                    FROM machinery.items i WHERE i.queue = _queue AND i.state = 0 AND i.turn < 0
                    ORDER BY i.priority DESC, i.turn, i.id LIMIT waited FOR UPDATE SKIP LOCKED) w
                UNION ALL
                SELECT o.* FROM (SELECT i.id, octet_length(i.body) AS size, i.priority, i.turn
                    FROM machinery.items i WHERE i.queue = _queue AND i.state = 0 AND i.turn >= 0
                    ORDER BY i.priority DESC, i.turn, i.id LIMIT others FOR UPDATE SKIP LOCKED) o
            ) found ORDER BY found.priority DESC, found.turn, found.id
        LOOP
            room := room - one.size;
            IF cardinality(taken) >= wanted
                OR room < 0 AND cardinality(taken) + cardinality(again) > 0 THEN
                left_over := true;
                EXIT;
            END IF;
            taken := taken || one.id;
        END LOOP;
    END LOOP;
    IF cardinality(again) + cardinality(taken) = 0 THEN
        RETURN;
    END IF;
    IF left_over THEN  -- others have passed over what is locked and not taken
        PERFORM machinery.tell(ARRAY(SELECT machinery.topic_of(q) FROM unnest(_queues) q));
    END IF;
    RETURN QUERY
    WITH gone AS (
        UPDATE machinery.items i SET state = 2, hold = _hold, runs = false,
            claim = CASE WHEN i.id = ANY(taken) THEN _number ELSE i.claim END,
            count = i.count + CASE WHEN i.id = ANY(taken) THEN 1 ELSE 0 END
        WHERE i.id = ANY(again || taken)
        RETURNING i.id, i.queue, i.body, i.count, i.claim, i.strikes, i.put_at, i.priority, i.turn,
            i.tenant
    ), served AS (
        INSERT INTO machinery.turns AS t
        SELECT g.queue, g.priority, '', max(g.turn) FROM gone g
        WHERE g.tenant IS NOT NULL AND g.id = ANY(taken) GROUP BY g.queue, g.priority
        ON CONFLICT (queue, priority, tenant) DO UPDATE SET turn = greatest(t.turn, excluded.turn)
    )
    SELECT NULL::bigint, g.id, g.queue, g.body, g.count, g.claim, g.strikes, g.put_at,
        nextval('machinery.numbers')
    FROM (SELECT * FROM gone ORDER BY array_position(again || taken, gone.id)) g;
END $f$;

-- End a hold, and give back up to _back of its messages. _beat: its last beat, if it is to be dead
-- by that; NULL: it is ended in any case. _struck: those that ran; NULL: those noted here.
-- Messages that a step has at this moment are passed over: it may be a transaction without an end.
-- Out: how many went back; NULL: it has beaten meanwhile; whether none is left.
CREATE OR REPLACE FUNCTION machinery.end_hold(
    _hold text, _beat bigint, _back int, _struck bigint[], OUT back int, OUT is_over boolean
) LANGUAGE plpgsql AS $$
DECLARE
    there record;
    queues bytea[];
BEGIN
    SELECT * INTO there FROM machinery.holds h WHERE h.id = _hold FOR UPDATE;  -- waits for claims
    IF NOT FOUND THEN
        back := 0;
        is_over := true;
        RETURN;
    END IF;
    is_over := false;
    IF NOT there.ended AND there.beat_at <> _beat THEN
        RETURN;
    END IF;
    UPDATE machinery.holds SET ended = true WHERE id = _hold;
    WITH gone AS (
        UPDATE machinery.items i SET state = 0, hold = NULL, claim = NULL, runs = false,
            strikes = i.strikes
                + CASE WHEN _struck IS NULL THEN i.runs ELSE i.id = ANY(_struck) END::int
        WHERE i.id = ANY(ARRAY(
            SELECT h.id FROM machinery.items h WHERE h.state = 2 AND h.hold = _hold
            ORDER BY h.id LIMIT _back FOR UPDATE SKIP LOCKED))
        RETURNING i.queue
    ) SELECT count(*), array_agg(DISTINCT machinery.topic_of(queue)) INTO back, queues FROM gone;
    PERFORM machinery.tell(queues);
    DELETE FROM machinery.holds h WHERE h.id = _hold AND NOT EXISTS (
        SELECT 1 FROM machinery.items i WHERE i.state = 2 AND i.hold = _hold);
    is_over := FOUND;
END $$;

-- Delete rows that still have these versions, but for those that somebody has locked.
CREATE OR REPLACE FUNCTION machinery.forget(_kinds text[], _ids bytea[], _versions bigint[])
RETURNS void LANGUAGE sql AS $$
    WITH old AS MATERIALIZED (
        SELECT r.kind, r.id FROM unnest(_kinds, _ids, _versions) u(kind, id, version)
        JOIN machinery.rows r ON r.kind = u.kind AND r.id = u.id AND r.version = u.version
        ORDER BY r.kind, r.id FOR UPDATE OF r SKIP LOCKED
    ) DELETE FROM machinery.rows r USING old o WHERE r.kind = o.kind AND r.id = o.id
$$;

-- Delete up to _items rows that are over, and what nobody watches. Out: whether more may be left.
CREATE OR REPLACE FUNCTION machinery.expire(_now bigint, _items int) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    now bigint := machinery.moment(_now);
    looked bigint;
BEGIN
    IF EXISTS (SELECT 1 FROM machinery.watches w WHERE w.until < now) THEN
        DELETE FROM machinery.watches w WHERE w.until < now;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM machinery.rows r WHERE r.sweep_at <= now) THEN
        RETURN false;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    WITH old AS MATERIALIZED (
        SELECT r.kind, r.id,
            machinery.is_there(r.expires_at, r.kept_kind, r.kept_id, now) AS stays
        FROM machinery.rows r WHERE r.sweep_at <= now
        ORDER BY r.sweep_at LIMIT _items FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM machinery.rows r USING old o
        WHERE NOT o.stays AND r.kind = o.kind AND r.id = o.id
    ), kept AS (  -- by another row: it is looked at again in a minute
        UPDATE machinery.rows r SET sweep_at = greatest(r.expires_at, now + 60000000)
        FROM old o WHERE o.stays AND r.kind = o.kind AND r.id = o.id
    ) SELECT count(*) INTO looked FROM old;
    RETURN looked = _items;
END $$;

DO $$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['is_kept', 'count_waiting', 'is_waiting', 'tell', 'read', 'put',
                                'commit', 'commit_new', 'commit_within', 'promote', 'claim',
                                'end_hold', 'forget', 'expire'] LOOP
        EXECUTE format(
            'ALTER FUNCTION machinery.%I SET plan_cache_mode = force_generic_plan', name);
        EXECUTE format('ALTER FUNCTION machinery.%I SET enable_seqscan = off', name);
        EXECUTE format('ALTER FUNCTION machinery.%I SET enable_hashjoin = off', name);
        EXECUTE format('ALTER FUNCTION machinery.%I SET enable_mergejoin = off', name);
        -- What has no index is small, and yet as dear as what is worth compiling.
        EXECUTE format('ALTER FUNCTION machinery.%I SET jit = off', name);
    END LOOP;
END $$;
-- The transaction has settings of its own.
ALTER FUNCTION machinery.commit_within SET lock_timeout = '5s';
