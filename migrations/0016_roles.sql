-- Roles: what needs the rights of the tables' owner becomes a function that has them, so that nobody who only works,
-- inserts or looks needs them. `awa migrate --grants` prints who gets which.
--
-- Adds a function and changes properties of functions; it waits for no table. Works with awa 0.1 and later. A role that
-- was granted rights by hand, and is neither the owner nor its member, needs EXECUTE on the functions below from now on.
--
-- Each pins its search_path: what a caller put in front of pg_catalog, or into pg_temp, is not found by it.

-- Give the planner a small sample of a slot, which autovacuum leaves alone.
CREATE FUNCTION awa.analyze_v1(p_slot smallint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET default_statistics_target = 10
AS $$
BEGIN
    EXECUTE format('ANALYZE awa.jobs_%1$s, awa.claims_%1$s, awa.completions_%1$s, awa.attempt_ends_%1$s', p_slot);
END $$;

-- TRUNCATE, and the checkpoint of the frontiers.
ALTER FUNCTION awa.prune_v1(smallint, bigint, oid) SECURITY DEFINER SET search_path = pg_catalog, pg_temp;

-- Setting the ring's sequence: who may set it may also turn the ring into a full slot.
ALTER FUNCTION awa.rotate_v1() SECURITY DEFINER SET search_path = pg_catalog, pg_temp;

ALTER FUNCTION awa.summarize_v1(smallint, bigint, integer) SET search_path = pg_catalog, pg_temp;

-- For who inserts, and may ask what became of a job and cancel it, and neither read nor write the tables otherwise.
ALTER FUNCTION awa.find_job_v2(bigint) SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
ALTER FUNCTION awa.cancel_v1(bigint, text, boolean) SECURITY DEFINER SET search_path = pg_catalog, pg_temp;

-- All other functions act with the rights of their caller, so everybody may have them.
REVOKE EXECUTE ON FUNCTION awa.analyze_v1(smallint), awa.prune_v1(smallint, bigint, oid), awa.rotate_v1(),
                           awa.summarize_v1(smallint, bigint, integer), awa.find_job_v2(bigint),
                           awa.cancel_v1(bigint, text, boolean)
  FROM PUBLIC;
