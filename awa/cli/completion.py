"""``awa completion``: the script that lets a shell complete what is typed after ``awa``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from awa.cli import main


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in SHELL: bash, zsh or fish.

    \b
    bash   eval "$(awa completion bash)"                                 in ~/.bashrc
    zsh    eval "$(awa completion zsh)"                                  in ~/.zshrc
    fish   awa completion fish > ~/.config/fish/completions/awa.fish     once
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # a template, so that the shell is not asked for its version: it may be another one that runs on this machine
    completing = kind(main, {}, "awa", "_AWA_COMPLETE")
    click.echo(completing.source_template % completing.source_vars())
