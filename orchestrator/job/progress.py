"""How far a job has trained: in its present attempt, and in all of them."""

from collections.abc import Mapping

from msgspec import Struct, field

from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.messages.events import MemoryCheckpointsSet, StragglerFound
from orchestrator.contract.skipped_batches import Window
from orchestrator.job.plans import Rollback


class Attempt(Struct, frozen=True, kw_only=True):
    """The present attempt; between two attempts the last one."""

    number: int = 0
    """0 before the first attempt."""
    placement: tuple[str, ...] = ()
    """Its hosts in node-rank order."""
    done: Mapping[str, bool] = field(default_factory=dict)
    """Host without a process of this attempt -> whether all its ranks returned 0."""
    killed: tuple[int, ...] = ()
    """The first ranks that were told to stop, did not end within the grace and were killed."""
    step: int = 0
    """The last step that ranks reported; before the first report, that of the attempt before."""
    stepped: bool = False
    """Its own ranks reported `step`."""
    runs: bool = False
    """A user's program that has never reported a step runs on all ranks."""
    drills: tuple[int, ...] = ()
    """Drills that happened in this attempt."""
    stragglers: Mapping[int, StragglerFound] = field(default_factory=dict)
    """Rank that keeps its peers waiting -> when and by how much."""
    memory: MemoryCheckpointsSet | None = None
    """What its ranks keep in the memory of their hosts; None: they have not said yet."""
    memory_lost: bool = False
    """Between two attempts: all its agents have ended, and with them what was kept in memory."""

    @property
    def own_step(self) -> int:
        """The last step that its own ranks reported; 0 before the first report."""
        return self.step if self.stepped else 0


class Progress(Struct, frozen=True, kw_only=True):
    """Checkpoints and training time of all attempts."""

    saved: int = 0
    """Newest complete checkpoint's step; 0 for none."""
    saved_at: float | None = None
    """When it was complete; None if the journal does not say."""
    saves: tuple[int, ...] = ()
    """Steps of the last few checkpoints, oldest first."""
    lineage: int = 0
    """The attempt in which training last started from the disk or at step 0; 0 before the first."""
    resumed: tuple[Made, ...] = ()
    """From where attempts since `lineage` resumed in memory: number of the attempt, and the step.
    Later steps of earlier attempts are not part of the training any more."""
    remembered: int = 0
    """Newest step that was resumed from the memory of the hosts; 0 for none."""
    unused: int = 0
    """Step of a complete checkpoint that a user's program did not load: it started at step 0, and
    said of no checkpoint that it is damaged. 0 for none."""
    skipped: tuple[Window, ...] = ()
    """Batches that are skipped on purpose."""
    rollbacks: tuple[Rollback, ...] = ()
    """Rollbacks since a person last submitted the job."""
    save_every: int | None = None
    """Steps between two checkpoints, if the ranks chose them (`checkpoint.every`)."""
    trained_s: float = 0.0
    """Seconds of training in all attempts, up to the last step that was reported."""
    stepped_at: float = 0.0
    """When a step was last reported."""
    drills: tuple[int, ...] = ()
    """Drills that happened since the job was last submitted."""
