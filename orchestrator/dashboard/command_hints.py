"""Complete commands about one job, ready to paste into the terminal where the user typed ndctl."""

from shlex import join, quote

from msgspec import Struct


class Commands(Struct, frozen=True, kw_only=True):
    job: str
    spec: str = "SPEC"
    """Spec file for a resubmission: the user's own file if known."""
    overrides: tuple[str, ...] = ()
    """Values of `--set` at submission, and overlays as `-f FILE`."""
    here: bool = False
    """The job ran with `--here`, inside an allocation that the user owns."""
    folder: str = ""
    """Folder of the submission, if the spec names files relative to it."""
    root: tuple[str, ...] = ()
    """`--run-root` options, if the job is not under the default run root."""
    submit_root: tuple[str, ...] | None = None
    """The same for `submit`, which may be typed in any folder. None: use `root`."""
    place: tuple[str, ...] = ()
    """Options that select the cluster, if several clusters have a job of this name."""

    def of(self, verb: str, *more: str | int) -> str:
        return join(["ndctl", verb, self.job, *map(str, more), *self.root, *self.place])

    def submit(self, edits: str = "") -> str:
        """The command that resumes the job; `edits` are extra options, quoted for a shell."""
        sets = [word for override in self.overrides for word in _words(override)]
        root = self.root if self.submit_root is None else self.submit_root
        where = ("--here",) if self.here else ()
        again = join(["ndctl", "submit", self.spec, *sets, *where, "--resume", *root])
        whole = f"{again} {edits}" if edits else again
        return f"cd {quote(self.folder)} && {whole}" if self.folder else whole


def _words(override: str) -> tuple[str, str]:
    option, _, file = override.partition(" ")
    return (option, file) if option == "-f" else ("--set", override)
