"""The button that cancels a job: the only way in which a page changes anything.

A page of another site must not press it. So the form has a token that only our pages contain, and
the browser must say that the form was on a page of this server.
"""

import hmac
import secrets
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from orchestrator.dashboard.reading.job_reader import ReadJob
from orchestrator.errors import NdctlError
from orchestrator.job.stage import ENDED
from orchestrator.plan.page.markup import element
from orchestrator.posix.run_with_timeout import within
from orchestrator.web.access import sender
from orchestrator.web.live.hub import Hub
from orchestrator.web.live.routes import address_of, answer, still_reading
from orchestrator.web.live.static import StaticFiles
from orchestrator.web.pages.address import job_path
from orchestrator.web.pages.page import Page, Rows, row
from orchestrator.web.pages.render import notice
from orchestrator.web.server import AddRoutes

CANCEL_S = 60.0
"""Limit for asking a leader or a scheduler. What was asked goes on after that."""
FIELD = "token"

Cancel = Callable[[Path, str], str]
"""Cancels the job in this run directory, as `ndctl cancel --no-wait`, for the person in the second
argument. Returns what was done."""


class CancelForms:
    """Forms whose tokens hold as long as this process, each for one launch of one job."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(32)

    def token(self, run_dir: Path, launch: int) -> str:
        said = f"{launch} {run_dir}".encode(errors="surrogatepass")
        return hmac.new(self.secret, said, sha256).hexdigest()

    def __call__(self, job: ReadJob, *, alone: bool) -> Rows:
        """The form of a job that has not ended."""
        run = job.snapshot.seen.run
        if run.job is None or job.snapshot.standing.state in ENDED:
            return {}
        form = element(
            "form",
            element("p", "Its ranks get time to write a checkpoint, then all processes end."),
            element(
                "input",
                type="hidden",
                name=FIELD,
                value=self.token(job.path, run.job.launch.launch),
            ),
            element("button", f"Cancel {job.path.name}", type="submit"),
            method="post",
            action=job_path(job.path, alone=alone, verb="cancel"),
        )
        details = element("details", element("summary", "Cancel this job …"), form)
        return {"cancel": row("div", "cancel", details)}


def cancel_routes(hub: Hub, static: StaticFiles, forms: CancelForms, cancel: Cancel) -> AddRoutes:
    async def post(request: web.Request) -> web.Response:
        try:
            page = await _cancelled(request, hub, forms, cancel)
        except (NdctlError, OSError):  # TimeoutError is an OSError
            return still_reading()
        return answer(page, static, "", None)

    def add(app: web.Application) -> None:
        app.router.add_post("/job/{name}/cancel", post)

    return add


async def _cancelled(request: web.Request, hub: Hub, forms: CancelForms, cancel: Cancel) -> Page:
    address = address_of(request)
    job = await hub.job(address)
    if job is None or job.snapshot.seen.run.job is None:
        return notice("no such job", "The job is not known here any more.", 404, ("/", "all jobs"))
    back = (job_path(job.path, alone=address.digest is None), f"job {job.path.name}")
    launch = job.snapshot.seen.run.job.launch.launch
    wanted = forms.token(job.path, launch)
    if not _is_own_page(request) or not _same(wanted, await _given(request)):
        said = "Nothing was cancelled: the page is older than the server or the job. Open it again."
        return notice("not cancelled", said, 403, back)
    try:
        said = await within(CANCEL_S, cancel, job.path, sender(request))
    except TimeoutError:
        said = f"There was no answer for {CANCEL_S:.0f} s. The job's page shows whether it ends."
        return notice("no answer", said, 504, back)
    except (NdctlError, OSError) as exc:
        return notice("not cancelled", str(exc), 409, back)
    return notice("cancelling", said, 200, back)


async def _given(request: web.Request) -> str:
    try:
        given = (await request.post()).get(FIELD)
    except (ValueError, LookupError):  # it is no form, not in UTF-8, or in no known encoding
        return ""
    return given if isinstance(given, str) else ""


def _same(wanted: str, given: str) -> bool:
    return hmac.compare_digest(wanted.encode(), given.encode(errors="surrogatepass"))


def _is_own_page(request: web.Request) -> bool:
    """Browsers say from which site a form comes, and pages cannot change that."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:  # not over plain HTTP from another machine
        return site == "same-origin"
    return urlsplit(request.headers.get("Origin", "")).netloc == request.host
