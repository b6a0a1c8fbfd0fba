"""The files of a run that trackers keep."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from classify.models import net_file
from classify.reports import summary
from deepspeed_trial.errors import one_line, printable
from deepspeed_trial.local import metrics_log

FROM_RUN = (*net_file.NAMES, summary.FILE, metrics_log.FILE, "run.json")


def of_run(output: pathlib.Path) -> list[pathlib.Path]:
    """Those of a finished run off a cluster, and its report, which is written now if it can be."""
    from classify.reports import html_report  # which no cluster has

    report, files = output / "report.html", [output / name for name in FROM_RUN]
    try:
        html_report.write([output], report)
    except Exception as error:  # of pictures, fonts, disks: none of which the training needs
        print(printable(f"note: {report}: not written ({one_line(error)})"), file=sys.stderr)
        return files
    return [report, *files]


def of_trial(write_network: Callable[[pathlib.Path], Any], is_chief: bool) -> list[pathlib.Path]:
    """The network of a cluster's trial; on every rank, for its weights are gathered from all.

    Args:
        write_network: writes it on the chief.
        is_chief: whether this rank is.
    """
    folder = tempfile.mkdtemp() if is_chief else ""  # stays until it is sent
    net = pathlib.Path(folder) / net_file.NAMES[0]
    try:
        write_network(net)
    except OSError as error:
        print(printable(f"note: {net}: not written ({one_line(error)})"), file=sys.stderr)
        return []
    return [net, net_file.beside(net)]
