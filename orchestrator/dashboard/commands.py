"""Commands about one job, each whole: typed where ndctl was asked, it finds the job."""

from dataclasses import dataclass
from shlex import join


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    job: str
    spec: str = "SPEC"
    """The file to submit it from again."""
    root: tuple[str, ...] = ()
    """Options that lead to its run root."""
    place: tuple[str, ...] = ()
    """Options that tell it from jobs of the same name in other clusters."""

    def of(self, verb: str, *more: str | int) -> str:
        return join(["ndctl", verb, self.job, *map(str, more), *self.root, *self.place])

    def submit(self, edits: str = "") -> str:
        """Goes on with it; `edits` as they are typed."""
        again = join(["ndctl", "submit", self.spec, "--resume", *self.root])
        return f"{again} {edits}" if edits else again
