"""``awa config show`` and ``awa completion``, without a database."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from awa.cli import main
from awa.config import Settings

SECRET = "s3cret"


def show(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, ["config", "show", *arguments])


def test_every_setting_is_told_with_its_origin_and_no_password() -> None:
    environment = {
        "AWA_DATABASE_URL": f"postgresql://ada:{SECRET}@db.example:5433/app",
        "AWA_LISTEN_URL": f"host=direct.example password={SECRET}",
        "AWA_QUEUES": "email:min=1,weight=3,default",
        "AWA_THREADS": "4",
        "AWA_SCHEMA": "other",
    }
    done = show("--schema", "jobs", "--json", **environment)
    assert done.exit_code == 0 and SECRET not in done.output
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["settings"].keys() == {field.name for field in fields(Settings)} - {"sources"}
    assert told["settings"]["threads"] == {"value": 4, "from": "AWA_THREADS"}
    assert told["settings"]["schema"] == {"value": "jobs", "from": "--schema"}
    assert told["settings"]["queues"]["value"] == ["email:min=1,weight=3", "default"]
    assert told["settings"]["heartbeat"] == {"value": 5.0, "from": "default"}
    assert "host=direct.example" in told["settings"]["listen_url"]["value"]
    assert told["database"]["from"] == "AWA_DATABASE_URL" and "db.example" in told["database"]["address"]
    text = show(**environment)
    assert SECRET not in text.output
    assert ["notify", "default", "on"] in [line.split() for line in text.stdout.splitlines()]
    typed = show("--database", f"postgresql://ada:{SECRET}@typed.example/app", "--json", **environment)
    assert json.loads(typed.stdout)["database"]["from"] == "--database" and SECRET not in typed.output


def test_a_database_that_libpq_or_nobody_names() -> None:
    told = json.loads(show("--json", PGHOST="pg.example", PGDATABASE="app", PGPASSWORD=SECRET).stdout)["database"]
    assert told["from"] == "PGHOST, PGDATABASE" and "host=pg.example" in told["address"] and SECRET not in str(told)
    assert "a private PostgreSQL is started" in show().stdout
    assert "no private PostgreSQL is started" in show(AWA_EMBEDDED="0").stdout
    refused = show(AWA_THREADS="none")
    assert refused.exit_code == 78 and "threads is 'none' (from AWA_THREADS)" in refused.stderr


def test_what_code_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"import awa\nclient = awa.Client('postgresql://ada:{SECRET}@code.example/app', schema='mine')\n"
    (tmp_path / "said_in_code.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = show("said_in_code", "--json", "--schema", "typed", AWA_DATABASE_URL="postgresql://else.example/app")
    told = json.loads(done.stdout)
    assert told["settings"]["schema"] == {"value": "mine", "from": "argument"}
    assert told["database"]["from"] == "argument" and "code.example" in told["database"]["address"]
    assert SECRET not in done.output
    assert show("no_such_module").exit_code == 78


def complete(words: str, position: int) -> list[str]:
    environment = {"_AWA_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    done = CliRunner(env=environment).invoke(main, [], prog_name="awa")
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_and_options_are_completed() -> None:
    assert complete("awa do", 1) == ["doctor"]
    assert {"config", "job", "storage"} <= set(complete("awa", 1))
    assert complete("awa queue pa", 2) == ["pause"]
    assert "--problems" in complete("awa doctor --", 2)
    asked = "from awa.cli import main; main([], prog_name='awa')"
    environment = {"_AWA_COMPLETE": "bash_complete", "COMP_WORDS": "awa ", "COMP_CWORD": "1"}
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", asked], env=environment, capture_output=True, text=True, timeout=60
    )
    assert "plain,storage" in traced.stdout
    assert "awa.cli" in traced.stderr and "awa.cli." not in traced.stderr  # no command is imported for its name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell])
    assert script.exit_code == 0 and f"_AWA_COMPLETE={shell}_complete" in script.stdout
    if program := shutil.which(shell):
        checked = subprocess.run([program, "-n"], input=script.stdout, capture_output=True, text=True, timeout=30)
        assert (checked.returncode, checked.stderr) == (0, "")
    if shell == "bash":
        wrong = CliRunner().invoke(main, ["completion", "tcsh"])
        assert wrong.exit_code == 2 and "bash" in wrong.output
