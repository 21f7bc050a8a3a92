-- Unique keys: who holds which.
SELECT 1;
