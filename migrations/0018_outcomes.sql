-- What follows from an outcome.
SELECT 1;
