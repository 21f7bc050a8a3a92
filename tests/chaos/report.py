"""What a run has to say: the faults it inflicted, what the jobs came to, and what broke a promise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psycopg import Connection

from tests.chaos import journal
from tests.chaos.checks import Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    seed: int
    """With which it can be repeated, as far as chance is concerned."""
    notes: list[str]
    """What could not be inflicted, and why."""
    faults: Mapping[str, int]
    """Inflicted, by kind."""
    figures: Mapping[str, int]
    """What happened."""
    verdicts: list[Verdict]
    """One per check."""
    complaints: list[str]
    """Of processes that did not behave; none is acceptable either."""
    errors: Mapping[str, int]
    """Tracebacks in the logs, by their last line: worth a look."""

    @property
    def is_clean(self) -> bool:
        """Every promise was kept."""
        return not self.complaints and not any(verdict.count for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"is_clean": self.is_clean}

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", *self.notes]
        for title, numbers in (("faults", self.faults), ("figures", self.figures), ("errors logged", self.errors)):
            lines += ["", title, *(f"  {number:>9,}  {name}" for name, number in numbers.items())]
        lines += ["", "violations"]
        for verdict in self.verdicts:
            lines.append(f"  {verdict.count:>9,}  {verdict.name}")
            lines += [f"             {shown}" for shown in verdict.shown]
        lines += [f"             {complaint}" for complaint in self.complaints]
        return "\n".join([*lines, "", "clean" if self.is_clean else "NOT CLEAN"])


FIGURES = """
    SELECT 'jobs meant and acknowledged', count(*) FROM ledger.intents WHERE is_meant AND fate = 'committed'
    UNION ALL SELECT 'jobs taken back', count(*) FROM ledger.intents WHERE NOT is_meant OR fate = 'rolled back'
    UNION ALL SELECT 'jobs in doubt at the commit', count(*) FROM ledger.intents WHERE is_meant AND fate = 'unknown'
    UNION ALL SELECT 'jobs', count(*) FROM a_job
    UNION ALL (SELECT 'jobs ' || state, count(*) FROM a_final GROUP BY state ORDER BY state)
    UNION ALL (SELECT 'attempts ' || outcome, count(*) FROM ledger.ends GROUP BY outcome ORDER BY outcome)
    UNION ALL SELECT 'attempts completed in a transaction of their own', count(*)
                FROM ledger.ends WHERE outcome = 'completed' AND flush IS NULL
    UNION ALL SELECT 'counted in these', sum(total)::bigint FROM app.counters
    UNION ALL SELECT 'of these after the fence, before the rescue', count(*)
                FROM ledger.ends WHERE outcome = 'completed' AND flush IS NULL AND was_gone
    UNION ALL SELECT 'attempts past their time, ended by maintenance', count(*)
                FROM ledger.ends WHERE outcome IN ('retried', 'failed') AND flush IS NULL AND NOT was_gone
    UNION ALL SELECT 'of these before they had begun', count(*)
                FROM ledger.ends x
               WHERE outcome IN ('retried', 'failed') AND flush IS NULL AND NOT was_gone
                 AND NOT EXISTS (SELECT FROM ledger.runs r WHERE r.entry_id = x.entry_id)
    UNION ALL SELECT 'jobs to run after others', count(DISTINCT child) FROM ledger.parents
    UNION ALL SELECT 'handlers begun', count(*) FROM ledger.runs
    UNION ALL SELECT 'handlers killed', count(*) FROM ledger.runs WHERE ended_at IS NULL
    UNION ALL SELECT 'longest time in which no handler began, ms', coalesce(max(pause)::bigint, 0)
                FROM (SELECT extract(epoch FROM started_at - lag(started_at) OVER (ORDER BY started_at))::numeric * 1000
                      FROM ledger.runs) t(pause)
    UNION ALL SELECT 'claims', count(*) FROM ledger.claims
    UNION ALL SELECT 'runtimes', count(*) FROM awa.runtime_instances
    UNION ALL SELECT 'runtimes fenced or left', count(*) FROM awa.gone_runtimes
    UNION ALL (SELECT format('controls: %s, %s', what, happened), count(*)
                 FROM ledger.controls GROUP BY what, happened ORDER BY what, happened)
    UNION ALL SELECT 'changes of slot', count(*)
                FROM (SELECT slot <> lag(slot) OVER (ORDER BY entry_id) AS changed FROM ledger.entries) t WHERE changed
    UNION ALL SELECT 'segments emptied', count(*) FROM ledger.prunes
"""

LOGGED = {
    "outcomes refused as stale": r"(\d+) outcomes were refused",
    "runtimes that found themselves gone": r"WARNING.* was silent for too long",
    "attempts released whose claim nobody received": r"released (\d+) attempts (?:whose claim|of \d+ claims) ",
    "flushes that failed": r"WARNING.* recording failed",
    "outcomes that could not be recorded at first": r"recording an outcome failed",
}
"""What workers log: counted, by the number that is said or by the line."""


def count_figures(conn: Connection[Any], directory: Path) -> dict[str, int]:
    """What happened, by the ledger, the journals and the logs."""
    figures: dict[str, int] = dict(conn.execute(FIGURES).fetchall())
    stale = sum(line["run"] == "stale" for line in journal.read(directory, "worker-*.journal"))
    for line in journal.read(directory, "cutter.journal"):
        name = f"connections: {line['happened']}"
        figures[name] = figures.get(name, 0) + 1
    figures["handlers told that they are stale"] = stale
    logs = "".join(path.read_text(errors="replace") for path in directory.glob("worker-*.log"))
    for name, pattern in LOGGED.items():
        figures[name] = sum(int(found) if found.isdigit() else 1 for found in re.findall(pattern, logs))
    return figures


def count_errors(directory: Path) -> Counter[str]:
    """The last lines of tracebacks in all logs, numbers left out."""
    found: Counter[str] = Counter()
    for path in directory.glob("*.log"):
        text = path.read_text(errors="replace")
        for traceback in re.findall(r"^Traceback .*\n(?:[ \n].*\n?)*(\S.*)", text, re.MULTILINE):
            found[re.sub(r"\d+", "N", traceback)[:150]] += 1
    return found
