-- Holds a number.
SELECT;
