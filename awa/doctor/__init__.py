"""What is wrong with an installation, and what mends it.

Each check asks the database something that costs little however much is stored, says what it found in one sentence with
the values, and names the command or the SQL that mends it. A check that may not look, or that takes too long, is told
as that; only a database that does not answer ends an examination.
"""

from __future__ import annotations

from awa.doctor.checks import CHECKS, Check, section_of
from awa.doctor.examination import MOST, examine
from awa.doctor.finding import Finding, Level, worst

__all__ = ["CHECKS", "MOST", "Check", "Finding", "Level", "examine", "section_of", "worst"]
