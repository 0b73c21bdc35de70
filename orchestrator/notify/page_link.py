"""Addresses of the pages of `ndctl serve` and of leaders."""

from urllib.parse import quote


def page_link(url: str, job: str, incident: int | None = None) -> str:
    """The address of a page behind `url`. The server there finds the job by its name."""
    path = f"{url.rstrip('/')}/job/{quote(job, safe='')}"
    return path if incident is None else f"{path}/incident/{incident}"
