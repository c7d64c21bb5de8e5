"""How a command fails."""

from __future__ import annotations


class CommandError(Exception):
    """Ends the command with one line (or a few) on stderr and `exit_code`."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class NoCluster(CommandError):
    """No cluster runs that the command could be about."""

    def __init__(self, text: str) -> None:
        super().__init__(text, exit_code=3)
