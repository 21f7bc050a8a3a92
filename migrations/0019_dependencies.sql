-- Jobs that wait for other jobs.
SELECT 1;
