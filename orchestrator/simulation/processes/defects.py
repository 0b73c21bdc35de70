"""Log handler of simulated agents and leaders. It prints nothing and collects each defect that a
process logs and survives."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class DefectHandler(logging.Handler):
    def __init__(self, defects: list[BaseException]) -> None:
        super().__init__(logging.CRITICAL)
        self.defects = defects

    def emit(self, record: logging.LogRecord) -> None:
        # `Agent` and `Leader` log an unexpected exception as critical.
        if record.exc_info and record.exc_info[1] is not None:
            self.defects.append(record.exc_info[1])


@contextmanager
def collect_defects(defects: list[BaseException]) -> Iterator[None]:
    logger = logging.getLogger("orchestrator")
    handler, disabled = DefectHandler(defects), logging.root.manager.disable
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
        logger.removeHandler(handler)
        logger.propagate = propagates
