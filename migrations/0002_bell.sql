-- Bells: waking whoever sleeps for a queue, and nobody else.
--
-- Adds functions only. Works with awa 0.1 and later.

-- The notification channel of this schema, the same length whatever its name.
CREATE FUNCTION awa.channel() RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT 'awa_' || left(encode(sha256(convert_to('awa.bell', 'UTF8')), 'hex'), 16)
$$;

-- Wake whoever sleeps for these queues. A sleeper holds its queue's bell, an advisory lock: when the bell can be had,
-- nobody waits, and nothing is notified. NOTIFY takes a lock of the whole cluster at commit; the bell spares it. The
-- empty name is the leader's, who promotes what waits for a time: a job rings for it when it is due within 1.5 s.
CREATE FUNCTION awa.ring(p_queues text[]) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queue text;
    v_bell bigint;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        v_bell := hashtextextended('awa.bell:' || v_queue, 0);
        IF pg_try_advisory_lock_shared(v_bell) THEN
            PERFORM pg_advisory_unlock_shared(v_bell);
        ELSE
            PERFORM pg_notify(awa.channel(), v_queue);
        END IF;
    END LOOP;
END $$;
