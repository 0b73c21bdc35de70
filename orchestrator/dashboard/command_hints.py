"""Commands about one job, each whole: typed where ndctl was asked, it finds the job."""

from dataclasses import dataclass
from shlex import join, quote


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    job: str
    spec: str = "SPEC"
    """The file to submit it from again: the user's own, where it is known."""
    overrides: tuple[str, ...] = ()
    """What was set besides when it was submitted."""
    here: bool = False
    """It ran in an allocation of its user's own."""
    folder: str = ""
    """Where it was submitted, if the spec names files that lie there."""
    root: tuple[str, ...] = ()
    """Options that lead to its run root."""
    submit_root: tuple[str, ...] | None = None
    """The same for `submit`, which is typed in any folder; None: as above."""
    place: tuple[str, ...] = ()
    """Options that tell it from jobs of the same name in other clusters."""

    def of(self, verb: str, *more: str | int) -> str:
        return join(["ndctl", verb, self.job, *map(str, more), *self.root, *self.place])

    def submit(self, edits: str = "") -> str:
        """Resumes it; `edits` as they are typed."""
        sets = [word for override in self.overrides for word in ("--set", override)]
        root = self.root if self.submit_root is None else self.submit_root
        where = ("--here",) if self.here else ()
        again = join(["ndctl", "submit", self.spec, *sets, *where, "--resume", *root])
        whole = f"{again} {edits}" if edits else again
        return f"cd {quote(self.folder)} && {whole}" if self.folder else whole
