"""The files of a run that trackers keep."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from classify.models import net_file
from classify.reports import summary
from harness.local import metrics_log

FROM_RUN = (*net_file.NAMES, summary.FILE, metrics_log.FILE, "run.json")


def of_run(output: pathlib.Path) -> list[pathlib.Path]:
    """Those of a finished run off a cluster, and its report, which is written now."""
    from classify.reports import html_report  # which no cluster has

    report = output / "report.html"
    html_report.write([output], report)
    return [report, *(output / name for name in FROM_RUN)]


def of_trial(write_network: Callable[[pathlib.Path], Any]) -> list[pathlib.Path]:
    """The network of a cluster's trial; on every rank, for its weights are gathered from all.

    Args:
        write_network: writes it on the chief.
    """
    net = pathlib.Path(tempfile.mkdtemp()) / net_file.NAMES[0]  # stays until it is sent
    write_network(net)
    return [net, net_file.beside(net)]
