"""The command ``dashboard``: optuna-dashboard on a study's journal, for this machine alone."""

from __future__ import annotations

import argparse
import socket
import webbrowser

from trainables.config import check_integer
from trainables.errors import UserError
from tune_cac.cli.arguments import STUDY
from tune_cac.cli.command import argument, command

#: Address to serve on, which only programs on this machine can connect to.
HOST = "127.0.0.1"


@command(
    argument("--port", type=int, default=8080, help="port"),
    argument("--no-browser", action="store_true", help="print the address only"),
    *STUDY,
    help="look at a study in optuna-dashboard, also while it is searched",
    description="Serve optuna-dashboard on a study's journal, to this machine alone, until Ctrl-C.",
)
def run(arguments: argparse.Namespace) -> int:
    """Serve optuna-dashboard until Ctrl-C; the study may be searched meanwhile."""
    from tune_cac.study.folder import find_study, written

    layout = find_study(arguments.results, arguments.study)
    if not layout.journal.is_file():
        raise UserError(f"{layout.root} has no journal yet: its search has not begun")
    check_integer("--port", arguments.port, 1, 65535)
    try:
        from optuna_dashboard import run_server
    except ImportError:
        raise UserError("the command dashboard needs optuna-dashboard: pip install 'tune-cac[dashboard]'") from None
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, arguments.port))
        except OSError as error:
            raise UserError(
                f"port {arguments.port} of {HOST} cannot be used: {error.strerror}; choose another --port"
            ) from None
    with written(layout, f"dashboard {layout.root}"):
        storage = JournalStorage(JournalFileBackend(str(layout.journal)))
    address = f"http://{HOST}:{arguments.port}/"
    print(f"{layout.root}: {address} (Ctrl-C ends it)", flush=True)
    if not arguments.no_browser:
        webbrowser.open(address)
    run_server(storage, host=HOST, port=arguments.port)
    return 0
