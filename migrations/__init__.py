"""The numbered SQL files that build and change the schema; shipped as ``awa._migrations``.

``NNNN_what_it_does.sql``, applied in order by ``awa migrate``, each in one transaction that also records its number
and checksum. They are written for a schema called ``awa`` (``awa.jobs``, or ``"awa"`` for the schema itself) and
renamed when they run. A statement that refuses transactions stands alone in its file, whose first line is
``-- awa: no transaction``, and must do no harm when it runs twice. Released files stay as they are: the next number
mends them.
"""
