"""`ndctl serve`: metrics and pages of jobs over HTTP."""

import logging
import os
from pathlib import Path

import click

from orchestrator.cli.options import say, warn


@click.command(
    epilog="Example: ndctl serve /scratch/runs --token-file ~/.ndctl-token"
    "   or: ndctl serve --textfile /var/lib/node_exporter/ndctl.prom"
)
@click.argument("run_roots", metavar="[RUN_ROOT]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--bind", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9417, show_default=True, help="0: any free."
)
@click.option("--socket", type=click.Path(path_type=Path), help="Unix socket in place of the port.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with the token. [NDCTL_SERVE_TOKEN, else a new one, which is printed]",
)
@click.option("--no-token", is_flag=True, help="Ask for no token; only on a loopback address.")
@click.option(
    "--tls",
    nargs=2,
    metavar="CERT KEY",
    type=click.Path(path_type=Path),
    help="Serve HTTPS with this certificate and key (PEM).",
)
@click.option(
    "--textfile",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the metrics to FILE, for node_exporter's textfile collector.",
)
@click.option(
    "--allow-cancel", is_flag=True, help="Pages have a button that cancels a job with your rights."
)
def serve(  # noqa: PLR0913 - click hands over one argument for each option
    run_roots: tuple[Path, ...],
    bind: str,
    port: int,
    socket: Path | None,
    token_file: Path | None,
    no_token: bool,
    tls: tuple[Path, Path] | None,
    textfile: Path | None,
    allow_cancel: bool,
) -> None:
    """Serve a web page of all jobs, and metrics for Prometheus at /metrics, until interrupted.

    Shows the jobs that `ndctl list` shows, and those in the RUN_ROOTs. It needs no running job.
    """
    from orchestrator.app import serve as server
    from orchestrator.system import SystemClock
    from orchestrator.web.access import is_loopback

    if no_token and token_file is not None:
        raise click.UsageError("give --token-file or --no-token, not both")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    token = None if no_token or socket is not None else _token(token_file)
    wanted = server.Serve(
        run_roots=run_roots,
        bind=bind,
        port=port,
        socket=socket,
        token=token,
        tls=tls,
        textfile=textfile,
        allow_cancel=allow_cancel,
    )
    server.check(wanted)
    for root in run_roots:
        if not root.is_dir():
            warn(f"there is no folder {root}; its jobs are shown once it exists")
    if token is not None and tls is None and not is_loopback(bind):
        warn("token and pages cross the network unencrypted; --tls encrypts them")
    server.serve(wanted, os.environ, SystemClock(), lambda address: say(f"serving at {address}"))


def _token(file: Path | None) -> str:
    from orchestrator.app.serve import TOKEN, new_token

    if file is not None:
        token = file.read_text().strip()
        if not token:
            raise click.UsageError(f"{file} has no token in it")
        return token
    return os.environ.get(TOKEN) or new_token()
